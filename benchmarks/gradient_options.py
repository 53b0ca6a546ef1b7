"""What the gradient options do to a decoder's step time and memory, judged on compiled TPU programs.

    python -m benchmarks.gradient_options [--topology v5e:2x4] [--batch 32] [--quick] [--cache FOLDER] [--json]

One training step in data_parallel and in semi_auto_parallel: reduced as XLA likes against buckets, whole against split by the parallel
optimizer, one batch against four micro-batches. Estimates are those of `benchmarks.judge`; `--quick` leaves out the compiler's cycles.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.judge_compile import Built, Job, Judged, judged

MODULE = "benchmarks.gradient_options"
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "width": 2048,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 16,
    "hidden": 6144,
    "max_seq": 1024,
}
LEVELS = ("level1", "level2", "level3")


class Variant(NamedTuple):
    """Options of the context, and what the table calls them."""

    name: str
    options: dict[str, Any]


def _optimizer(level: str, **config: Any) -> dict[str, Any]:
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": level, **config}}


VARIANTS = (
    Variant("as XLA combines", {}),
    Variant("comm_fusion 32 MB", {"comm_fusion": {"allreduce": {"mode": "size", "config": 32}}}),
    Variant("all_reduce_fusion_config [10, 20]", {"all_reduce_fusion_config": [10, 20]}),
    *(Variant(f"parallel optimizer, {level}", _optimizer(level)) for level in LEVELS),
    Variant("4 micro-batches", {"grad_accumulation_step": 4}),
    Variant(
        "4 micro-batches, level1, whole accumulators",
        _optimizer("level1", gradient_accumulation_shard=False) | {"grad_accumulation_step": 4},
    ),
    Variant("4 micro-batches, level1, split accumulators", _optimizer("level1") | {"grad_accumulation_step": 4}),
)
MODES = ("data_parallel", "semi_auto_parallel")


def build(job: Job) -> Built:
    """The step with the options of a variant."""
    from flax import nnx

    import spmdctx
    from spmdctx.lowering.compile_only import tpu_devices
    from spmdctx.models import DecoderConfig, abstract_program
    from spmdctx.models.training import loss_fn

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = spmdctx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt))(model, batch)
        optimizer.update(model, gradients)
        return loss

    devices = tpu_devices(job["topology"])
    _, arguments = abstract_program(DecoderConfig(dtype="bfloat16", remat=True, **SIZES), job["batch"])
    mean = {"gradients_mean": True} if job["mode"] == "data_parallel" else {}
    run = spmdctx.parallel(
        step,
        devices=devices,
        topology=f"tpu-{job['topology'].split(':')[0]}",
        donate_argnums=(0, 1),
        parallel_mode=job["mode"],
        **mean,
        **job["options"],
    )
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Judged]]:
    """The outcome of every variant in every mode."""
    found: dict[str, dict[str, Judged]] = {}
    for mode in arguments.mode or MODES:
        for variant in VARIANTS:
            job = {"topology": arguments.topology, "batch": arguments.batch, "mode": mode, "options": variant.options}
            found.setdefault(mode, {})[variant.name] = judged(job, MODULE, arguments.cache, codegen=not arguments.quick)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def table(found: dict[str, dict[str, Judged]], topology: str, batch: int) -> str:
    """Markdown, one row per variant and mode."""
    model = f"A decoder of {SIZES['num_layers']} layers of width {SIZES['width']}, {SIZES['max_seq']} tokens"
    columns = ("mode", "options", "step (cycles)", "step (roofline)", "waiting", "collectives", "moved", "peak", "found by the audit")
    lines = [
        f"{model}, batch {batch}, AdamW, on {topology}; per device.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for mode, rows in found.items():
        lines += [f"| {mode} | {name} | {_cells(outcome)} |" for name, outcome in rows.items()]
    return "\n".join(lines)


def _cells(outcome: Judged) -> str:
    made = outcome.judgement
    if made is None:
        return f"{outcome.error} | | | | | | "
    kinds = [f"{row['count']:.0f} {row['kind']}" for row in _by_kind(made.traffic)]
    moved = sum(row["payload_bytes"] for row in made.traffic)
    cycles = f"{made.cycles_s * 1e3:.1f} ms" if made.cycles_s else "-"
    return " | ".join(
        [
            cycles,
            f"{made.roofline_s * 1e3:.1f} ms",
            f"{made.roofline_exposed_s * 1e3:.1f} ms",
            ", ".join(kinds),
            f"{moved / 2**20:.0f} MiB",
            f"{made.peak_bytes / 2**30:.2f} GiB",
            f"{outcome.planned['found_share']:.0%}",
        ]
    )


def _by_kind(traffic: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Rows of one kind as one."""
    sums: dict[str, dict[str, Any]] = {}
    for row in traffic:
        known = sums.setdefault(row["kind"], {"kind": row["kind"], "count": 0.0})
        known["count"] += row["count"]
    return [sums[kind] for kind in sorted(sums)]


def main() -> int:
    """Prints the table, or the outcomes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--quick", action="store_true", help="leave out the compiler's cycles")
    parser.add_argument("--cache", type=Path, default=Path("out/gradient_options"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.json:
        plain = {
            mode: {name: {"judgement": one.judgement and one.judgement.to_dict(), "planned": one.planned} for name, one in rows.items()}
            for mode, rows in found.items()
        }
        print(json.dumps(plain))
    else:
        print(table(found, arguments.topology, arguments.batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())

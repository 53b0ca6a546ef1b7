"""Whether plans within a budget keep it once compiled, and what they cost there: models searched at shares of their fastest plan's peak.

    python -m benchmarks.budget_plans [--topology v5e:2x4] [--only 'mlp.*'] [--shares 0.9,0.6] [--cache FOLDER] [--again]

Prints a row per plan: the budget, the peak that is predicted and the one that was compiled, the step's time over that of the fastest
plan (predicted, and by the judge's roofline), the share of the planned bytes that is in the program, and seconds. A budget that no plan
meets is named with its error. Exits with 1 where a compiled peak is more than 15 % above its budget.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fidelity_plans import LLAMA, LLAMA_BATCH, SIZES
from benchmarks.judge_compile import Built, Job, Judged, judge_parser, judged

MODULE = "benchmarks.budget_plans"
MAX_EXCESS = 0.15
BUDGETED: dict[str, dict[str, Any]] = {
    "mlp": {**SIZES["mlp"], "BATCH": 8192},
    "transformer": {**SIZES["transformer"], "BATCH": 16},
    "moe": {**SIZES["moe"], "BATCH": 16},
    "vit": {"batch": 64},
    "encoder_decoder": {"BATCH": 16, "WIDTH": 2048, "HEAD_DIM": 128, "HIDDEN": 8192, "VOCAB": 16384},
    "gshard": {"batch": 32},
    "unet": {"batch": 64},
}
SEVEN_BILLION = {"vocab_size": 32000, "width": 4096, "num_layers": 4, "num_heads": 32, "num_kv_heads": 32, "hidden": 11008, "max_seq": 4096}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama2-7b of 4": SEVEN_BILLION,
    "llama2-7b of 4, scanned": {**SEVEN_BILLION, "scan_layers": True},
}


def jobs(topology: str, shares: tuple[float, ...]) -> Iterator[Job]:
    """The plans to be judged: per model the fastest, then one per share of its peak."""
    for model in (*LLAMAS, *BUDGETED):
        for share in (1.0, *shares):
            yield {"topology": topology, "model": model, "share": share}


def build(job: Job) -> Built:
    """Plans and lowers a job's step."""
    import spmdctx
    from spmdctx.lowering.compile_only import tpu_devices

    devices = tpu_devices(job["topology"])
    step, arguments = _program(job["model"])
    options: dict[str, Any] = {
        "parallel_mode": "auto_parallel",
        "search_mode": "dynamic_programming",
        "topology": f"tpu-{job['topology'].split(':')[0]}",
        "devices": devices,
    }
    run = spmdctx.parallel(step, donate_argnums=0, **options)
    if job["share"] < 1:
        budget = int(run.plan(*arguments).cost.memory_bytes * job["share"])
        run = spmdctx.parallel(step, donate_argnums=0, memory_bytes=budget, **options)
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def _program(model: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from benchmarks.judge_models import decoder_program, zoo_program
    from spmdctx.models import DecoderConfig
    from tests.zoo.case import UNSPLIT

    if model in BUDGETED:
        return zoo_program(model, UNSPLIT, BUDGETED[model])
    config = DecoderConfig(**LLAMAS[model], dtype="bfloat16", remat=True)
    return decoder_program(config, LLAMA_BATCH * LLAMA["max_seq"] // config.max_seq)


def main() -> int:
    """Prints the table; 0 where every budget is kept."""
    parser = judge_parser(__doc__)
    parser.add_argument("--shares", default="0.9,0.75,0.6", help="of the fastest plan's peak")
    parser.add_argument("--again", action="store_true", help="plan once more; what stays the same is not compiled again")
    arguments = parser.parse_args()
    shares = tuple(map(float, arguments.shares.split(",")))
    fastest: dict[str, Judged] = {}
    kept = True
    print(f"{'model':<18} {'share':>5} {'budget':>7} {'plan':>7} {'compiled':>8} MiB  {'time':>6} {'judged':>6}  {'found':>6} {'s':>5}")
    for job in jobs(arguments.topology, shares):
        if not re.search(arguments.only, job["model"]):
            continue
        one = judged(job, MODULE, arguments.cache, codegen=False, again=arguments.again)
        if one.judgement is None:
            print(f"{job['model']:<18} {job['share']:>5.2f} {one.error}", flush=True)
            continue
        first = fastest.setdefault(job["model"], one)
        print(_row(job, one, first), flush=True)
        kept &= one.judgement.peak_bytes <= (1 + MAX_EXCESS) * job["share"] * first.planned["memory_bytes"]
    return 0 if kept else 1


def _row(job: Job, one: Judged, first: Judged) -> str:
    assert one.judgement is not None
    assert first.judgement is not None
    peaks = [job["share"] * first.planned["memory_bytes"], one.planned["memory_bytes"], one.judgement.peak_bytes]
    budget, planned, compiled = (peak / 2**20 for peak in peaks)
    return (
        f"{job['model']:<18} {job['share']:>5.2f} {budget:>7.0f} {planned:>7.0f} {compiled:>8.0f}      "
        f"{one.planned['total_s'] / first.planned['total_s']:>6.3f} {one.judgement.roofline_s / first.judgement.roofline_s:>6.3f}  "
        f"{one.planned['found_share']:>6.1%} {one.seconds:>5.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())

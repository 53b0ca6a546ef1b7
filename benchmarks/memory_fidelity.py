"""How true predicted peaks of memory are: plans of a Llama step in all its forms, an MLP and a transformer, compiled for TPU.

    python -m benchmarks.memory_fidelity [--topology v5e:2x4] [--only 'llama.*scan'] [--cache FOLDER]

Llama steps have 2 or 4 layers, scanned or unrolled, with and without remat, at sizes that fill gigabytes; state is donated. Plans
come from data parallelism, tensor-parallel strategies and random legal pins. The compiled figure is what the compiler assigned in
HBM, arguments and results included. Prints a row per plan; exits with 1 unless 95 % of the peaks are within 15 %.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fidelity_plans import _pinned
from benchmarks.judge_compile import Built, Job, judge_parser, judged

MODULE = "benchmarks.memory_fidelity"
MAX_ERROR, MIN_SHARE = 0.15, 0.95
MESH = (2, 4)
FORMS = ((2, False, True, 32), (2, False, False, 32), (4, True, True, 32), (4, True, False, 16), (4, False, False, 16))
"""Layers, whether scanned, whether rematerialised, and the batch."""

LLAMA: dict[str, Any] = {"vocab_size": 16384, "width": 2048, "num_heads": 16, "num_kv_heads": 16, "hidden": 5632, "max_seq": 2048}


def jobs(topology: str) -> Iterator[Job]:
    """The plans to be compiled, all on 8 devices."""
    for layers, scan, remat, batch in FORMS:
        model = f"llama {layers} {'scan' if scan else 'unrolled'} {'remat' if remat else 'saved'}"
        sizes = {"num_layers": layers, "scan_layers": scan, "remat": remat}
        start = {"topology": topology, "model": model, "sizes": sizes, "batch": batch}
        yield {**start, "plan": "data_parallel"}
        yield {**start, "plan": "megatron"}
        yield {**start, "plan": "pins"}
        yield from ({**start, "plan": "random", "seed": seed} for seed in (1, 2))
    for model in ("mlp", "transformer"):
        start = {"topology": topology, "model": model, "sizes": {}, "batch": 0}
        yield {**start, "plan": "data_parallel"}
        yield from ({**start, "plan": "random", "seed": seed} for seed in (1, 2, 3))


def build(job: Job) -> Built:
    """Plans and lowers a job's step."""
    import jax
    import numpy as np

    import spmdctx
    from spmdctx.lowering.compile_only import tpu_devices

    devices = tpu_devices(job["topology"])
    step, arguments = _program(job)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(MESH), ("data", "model"))
    options: dict[str, Any] = {
        "data_parallel": {"parallel_mode": "data_parallel", "devices": devices},
        "megatron": {"parallel_mode": "semi_auto_parallel", "mesh": mesh},
    }.get(job["plan"], {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "mesh": mesh})
    if job["plan"] == "random":
        step = _pinned(step, mesh, job["seed"])
    run = spmdctx.parallel(step, topology=f"tpu-{job['topology'].split(':')[0]}", donate_argnums=0, **options)
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def _program(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from benchmarks.judge_models import decoder_program, zoo_program
    from spmdctx.models import DecoderConfig, Split
    from tests.zoo.case import UNSPLIT

    if not job["sizes"]:
        return zoo_program(job["model"], UNSPLIT)
    kinds = {"megatron": "megatron", "pins": "pins"}
    split = Split(kinds.get(job["plan"], "none"), *MESH)  # type: ignore[arg-type]  # the kinds come from a table of names
    config = DecoderConfig(**LLAMA, **job["sizes"], dtype="bfloat16")
    return decoder_program(config, job["batch"], split=split)


def main() -> int:
    """Prints the table; 0 where the peaks are true."""
    parser = judge_parser(__doc__)
    arguments = parser.parse_args()
    ratios = []
    print(f"{'plan':<44} {'predicted':>10} {'compiled':>10} MiB  ratio")
    for job in jobs(arguments.topology):
        name = f"{job['model']} {job['plan']}" + (f" {job['seed']}" if "seed" in job else "")
        if not re.search(arguments.only, name):
            continue
        one = judged(job, MODULE, arguments.cache, codegen=False, again=True)
        if one.judgement is None:
            print(f"{name:<44} {one.error}", flush=True)
            continue
        predicted, compiled = one.planned["memory_bytes"], one.judgement.peak_bytes
        ratios.append(predicted / compiled)
        print(f"{name:<44} {predicted / 2**20:>10.0f} {compiled / 2**20:>10.0f}     {ratios[-1]:>6.2f}", flush=True)
    if not ratios:
        return 1
    within = sum(abs(ratio - 1) <= MAX_ERROR for ratio in ratios) / len(ratios)
    print(f"{len(ratios)} plans: median {statistics.median(ratios):.2f}, {within:.0%} within {MAX_ERROR:.0%}")
    return 0 if within >= MIN_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())

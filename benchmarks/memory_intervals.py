"""How often compiled peaks of memory are within a plan's interval: ten models that no rule was made on, on four machines.

    python -m benchmarks.memory_intervals [--half tuning|untouched] [--only 'v5e.*random'] [--cache FOLDER] [--again]

Plans come from data parallelism, parameters split by rows (ZeRO-3), tensor-parallel pins, random legal pins and the searches; state is
donated. What is compiled is kept in the folder by its text, so that another prediction is quickly judged. Prints a row per plan, then
by machine, kind and half how many predictions are within 15 %, how many compiled peaks are at most the safe end, and how far below it.
Exits with 1 unless 97 % of the untouched half are. GPU needs JAX's CUDA plugin.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.judge_compile import RESULT, Built, Job, _digest, _versions, _workers, compile_gpu, compile_program, judge_parser

MODULE = "benchmarks.memory_intervals"
MACHINES = {"v5e:2x4": "tpu-v5e", "h100": "h100", "v5p:2x2x2": "tpu-v5p", "v6e:2x4": "tpu-v6e"}
KINDS = (
    "random 4x2",
    "rows 8x1",
    "dynamic_programming",
    "random 2x4",
    "data_parallel",
    "tensor 2x4",
    "recursive_programming",
    "tensor 1x8",
)
WITHIN, COVERED = 0.15, 0.97


class Row(NamedTuple):
    """A plan: the likely and the safe end of its peak, its arguments, and what was compiled, in bytes."""

    job: Job
    likely: int
    safe: int
    arguments: int
    compiled: int


def jobs() -> Iterator[Job]:
    """The plans to be compiled, all on 8 devices."""
    from benchmarks.memory_models import MODELS, TUNING

    for place, kind in enumerate(KINDS):
        for at, machine in enumerate(MACHINES):
            for model in MODELS:
                half = "tuning" if model in TUNING else "untouched"
                job = {"machine": machine, "model": model, "kind": kind, "size": (place + at) % 2, "half": half}
                yield {**job, "seed": zlib.crc32(f"{machine} {model} {kind}".encode())}


def build(job: Job) -> Built:
    """Plans and lowers a job's step."""
    import jax
    import numpy as np

    import spmdctx
    from benchmarks.fidelity_plans import _pinned
    from benchmarks.memory_models import program
    from spmdctx.lowering.compile_only import gpu_devices, tpu_devices

    devices = gpu_devices(8) if job["machine"] == "h100" else tpu_devices(job["machine"])
    step, arguments = program(job["model"], job["size"])
    kind, _, shape = job["kind"].partition(" ")
    options: dict[str, Any] = {"devices": devices, "parallel_mode": "auto_parallel", "search_mode": kind}
    if kind == "data_parallel":
        options = {"devices": devices, "parallel_mode": kind}
    elif shape:
        mesh = jax.sharding.Mesh(np.array(devices).reshape(*map(int, shape.split("x"))), ("data", "model"))
        options = {"mesh": mesh, "parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}
        step = _pinned(step, mesh, job["seed"]) if kind == "random" else _chosen(step, mesh, kind)
    run = spmdctx.parallel(step, topology=MACHINES[job["machine"]], donate_argnums=0, **options)
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def _chosen(step: Callable[..., Any], mesh: Any, kind: str) -> Callable[..., Any]:
    """The step with the batch split over "data", and parameters by rows, or as their names end: "_in" by columns, "_out" by rows."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def pin(leaf: Any, place: int | None, axis: str) -> Any:
        if place is None or leaf.shape[place] % mesh.shape[axis]:
            return leaf
        spec: list[Any] = [None] * leaf.ndim
        spec[place] = axis
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    def pin_state(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if leaf.ndim < 2:
            return leaf
        if kind == "rows":
            return pin(leaf, max(range(leaf.ndim), key=lambda place: leaf.shape[place]), "data")
        return pin(leaf, leaf.ndim - 1 if "_in'" in name else leaf.ndim - 2 if "_out'" in name or "table" in name else None, "model")

    def run(state: Any, *batch: Any) -> Any:
        return step(jax.tree_util.tree_map_with_path(pin_state, state), *(pin(leaf, 0, "data") for leaf in batch))

    return run


def name_of(job: Job) -> str:
    """A row's name."""
    return f"{job['model']} {job['size']} {job['machine']} {job['kind']}"


def outcome(job: Job, folder: Path, *, again: bool) -> dict[str, Any]:
    """What the folder knows of a job; else it is planned, and compiled where its program is new, in a process of its own."""
    place = folder / f"interval-{_digest(json.dumps([job, _versions(str(job['machine']))], sort_keys=True))}.json"
    if place.exists() and not again:
        return dict(json.loads(place.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        worker = _workers(MODULE).Process(target=_work, args=(job, Path(scratch), folder.resolve()))
        worker.start()
        worker.join()
        result = Path(scratch) / RESULT
        found = dict(json.loads(result.read_text())) if result.exists() else {"error": f"exit code {worker.exitcode}"}
    if "error" not in found:
        place.write_text(json.dumps({**found, "job": job}))
    return found


def _work(job: Job, scratch: Path, folder: Path) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    try:
        found = _judged(job, scratch, folder)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    (scratch / RESULT).write_text(json.dumps(found))
    # The compiler's thread may be generating code that nobody needs.
    os._exit(0)


def _judged(job: Job, scratch: Path, folder: Path) -> dict[str, Any]:
    built = build(job)
    plan = built.plan
    assert plan is not None
    text = built.lowered.as_text()
    # The planned peak limits TPU's scheduler, in whole percents of the device.
    place = folder / f"peak-{_digest(json.dumps([text, job['machine'], plan.cost.memory_bytes, _versions(job['machine'])]))}.json.gz"
    if place.exists():
        compiled = json.loads(gzip.decompress(place.read_bytes()))["peak"]
    else:
        hlo, compiled = (
            compile_gpu(built.lowered) if job["machine"] == "h100" else compile_program(built.lowered, scratch / "dump", codegen=False)
        )
        place.write_bytes(gzip.compress(json.dumps({"peak": compiled, "hlo": hlo}).encode()))
    return {"compiled": compiled, "program": place.name, **_foreseen(plan)}


def _foreseen(plan: Any) -> dict[str, Any]:
    arguments = sum(leaf.local_bytes(plan.logical_mesh) for leaf in plan.inputs)
    return {"likely": plan.cost.memory_bytes, "safe": plan.safe_memory_bytes, "arguments": arguments}


def rows_of(only: str, half: str | None, folder: Path, *, again: bool) -> Iterator[Row]:
    """The plans that were asked for, each printed."""
    print(f"{'plan':<46} {'likely':>7} {'safe':>7} {'compiled':>8} MiB  {'likely/c.':>9} {'safe/c.':>8}")
    for job in jobs():
        if not re.search(only, name_of(job)) or half not in (None, job["half"]):
            continue
        found = outcome(job, folder, again=again)
        if "error" in found:
            print(f"{name_of(job):<46} {found['error']}", flush=True)
            continue
        row = Row(job, *(found[name] for name in ("likely", "safe", "arguments", "compiled")))
        sizes = tuple(size / 2**20 for size in (row.likely, row.safe, row.compiled))
        ratios = f"{sizes[0] / sizes[2]:>9.2f} {sizes[1] / sizes[2]:>8.2f}"
        print(f"{name_of(job):<46} {sizes[0]:>7.0f} {sizes[1]:>7.0f} {sizes[2]:>8.0f}      {ratios}", flush=True)
        yield row


def summary(rows: Iterable[Row], title: str) -> str:
    """A line of figures over some plans."""
    rows = list(rows)
    within = sum(abs(row.likely / row.compiled - 1) <= WITHIN for row in rows)
    covered = sum(row.compiled <= row.safe for row in rows)
    ratios = sorted(row.compiled / row.likely for row in rows)
    low, middle, high = (ratios[min(len(ratios) - 1, int(share * len(ratios)))] for share in (0.05, 0.5, 0.95))
    tightness = statistics.median(row.safe / row.compiled for row in rows)
    return (
        f"{title:<24} {len(rows):>4} {within:>6} {low:>7.2f} {middle:>5.2f} {high:>5.2f} {ratios[-1]:>5.2f}"
        f" {covered:>7} {covered / len(rows):>6.1%} {tightness:>6.2f}"
    )


def main() -> int:
    """Prints the tables; 0 where the safe ends are safe."""
    parser = judge_parser(__doc__)
    parser.add_argument("--half", choices=("tuning", "untouched"))
    parser.add_argument("--again", action="store_true", help="plan once more; what stays the same is not compiled again")
    arguments = parser.parse_args()
    rows = list(rows_of(arguments.only, arguments.half, arguments.cache, again=arguments.again))
    print(f"{'':<24} plans within  compiled / likely: 5 %, 50 %, 95 %, most; covered; safe / compiled, median")
    for half in ("tuning", "untouched"):
        own = [row for row in rows if row.job["half"] == half]
        for name in ("machine", "kind", "model", "half"):
            for value in dict.fromkeys(row.job[name] for row in own):
                print(summary((row for row in own if row.job[name] == value), f"{half[:6]} {value}"))
    judged = [row for row in rows if row.job["half"] == "untouched"] or rows
    return 0 if judged and sum(row.compiled <= row.safe for row in judged) >= COVERED * len(judged) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compiles programs for the judge in processes of their own, and keeps what was judged.

A job is plain data that says which program to build. Its worker builds and compiles it; with `codegen=False` it ends as soon as the
compiler has written the scheduled, memory-assigned HLO, before code is generated: a tenth of the time, all collectives and the peak of
memory, but no estimated cycles. Outcomes lie in a folder, by the job; compiled programs too, by their StableHLO and the compiler's
version, so that a planner or a judge that changes is asked again without compiling what stays the same.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.judge import Judgement, judge_text, roofline_of
from benchmarks.judge_kinds import judged_by_kind
from benchmarks.judge_links import H100_HOSTS, Hosts, Slice, slice_of
from spmdctx.audit.hlo import read_module
from spmdctx.machine.presets import topology as preset

if TYPE_CHECKING:
    import jax

    from spmdctx.plan.plan import Plan

Job = dict[str, Any]
SCHEDULED = "*after_optimizations_after_buffer_assignment.txt"
POLL_S = 0.2
RESULT = "result.json"


class Built(NamedTuple):
    """What a builder returns: the program, its devices in the order of its mesh, its plan where it has one, and that by kind of op."""

    lowered: jax.stages.Lowered
    devices: Sequence[Any]
    plan: Plan | None = None
    kinds: Mapping[str, float] | None = None


def is_gpu(topology: str) -> bool:
    """Whether a topology is that of GPUs: "h100:8"."""
    return topology.startswith("h100:")


def devices_of(topology: str) -> Sequence[Any]:
    """Devices that exist only for the compiler, of "v5p:2x2x2" or "h100:8"."""
    from spmdctx.lowering.compile_only import gpu_devices, tpu_devices

    return gpu_devices(int(topology.partition(":")[2])) if is_gpu(topology) else tpu_devices(topology)


def machine_of(topology: str) -> str:
    """The preset of a topology's devices."""
    name = topology.partition(":")[0]
    return name if is_gpu(topology) else f"tpu-{name}"


def links_of(topology: str, devices: Sequence[Any]) -> Slice | Hosts:
    """What joins devices in the program's order."""
    return replace(H100_HOSTS, num_devices=len(devices)) if is_gpu(topology) else slice_of(topology, devices)


class Judged(NamedTuple):
    """A job's outcome; `planned` is what its plan says, and how that compares. `error` says why there is no judgement."""

    judgement: Judgement | None
    planned: dict[str, Any]
    seconds: float
    error: str = ""


def judged(job: Job, module: str, folder: Path, *, codegen: bool, again: bool = False) -> Judged:
    """The outcome of a job, from the folder where it is known.

    Args:
        job: plain data with at least "topology" ("v5p:2x2x2").
        module: the benchmark whose `build(job) -> Built` makes the program.
        folder: where outcomes are kept.
        codegen: compile to the end, for the compiler's cycles.
        again: judge once more what is known: the planner may have changed.
    """
    place = folder / f"{key_of(job, module, codegen)}.json"
    if again or not place.exists():
        start = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        known = {**_run(job, module, folder, codegen), "seconds": time.perf_counter() - start, "job": job}
        # What went wrong may go right next time.
        if not known["error"]:
            place.write_text(json.dumps(known, indent=1))
    else:
        known = json.loads(place.read_text())
    return _outcome(known)


def judge_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of what the benchmarks of compiled plans have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--only", default="", metavar="REGEX", help="plans whose name it matches")
    parser.add_argument("--cache", type=Path, default=Path(".judged"), metavar="FOLDER", help="where outcomes are kept")
    return parser


def already_judged(job: Job, module: str, folder: Path) -> Judged | None:
    """What the folder holds of a job, with the compiler's cycles where it holds them; None where it holds nothing."""
    for codegen in (True, False):
        place = folder / f"{key_of(job, module, codegen)}.json"
        if place.exists():
            return _outcome(json.loads(place.read_text()))
    return None


def _outcome(known: dict[str, Any]) -> Judged:
    made = Judgement.from_dict(known["judgement"]) if known["judgement"] else None
    return Judged(made, known["planned"], known["seconds"], known["error"])


def key_of(job: Job, module: str, codegen: bool) -> str:
    """Names an outcome."""
    return _digest(json.dumps([job, module, codegen, _versions(str(job.get("topology", "")))], sort_keys=True))


def _versions(topology: str) -> list[str]:
    return [importlib.metadata.version(name) for name in ("jax", "jax-cuda12-plugin" if is_gpu(topology) else "libtpu")]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _run(job: Job, module: str, folder: Path, codegen: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        worker = _workers(module).Process(target=_work_apart, args=(module, job, Path(scratch), folder.resolve(), codegen))
        worker.start()
        worker.join()
        result = Path(scratch) / RESULT
        if result.exists():
            outcome: dict[str, Any] = json.loads(result.read_text())
            return outcome
        return {"judgement": None, "planned": {}, "error": f"exit code {worker.exitcode}"}


@cache
def _workers(module: str) -> ForkServerContext:
    """Starts workers that have imported what a job needs, which takes longer than most jobs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload([module, *_IMPORTED])
    return workers


_IMPORTED = ["benchmarks.templates_zoo", "spmdctx", "spmdctx.audit", "spmdctx.lowering.compile_only", "tests.zoo", "scipy.stats"]


def _work_apart(module: str, job: Job, scratch: Path, folder: Path, codegen: bool) -> None:
    # Without codegen the worker leaves in the middle of a compilation, with whatever temporary files that has.
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    try:
        work(module, job, scratch, folder, codegen)
    except Exception as error:
        failed: dict[str, Any] = {"judgement": None, "planned": {}, "error": f"{type(error).__name__}: {error}"[:300]}
        (scratch / RESULT).write_text(json.dumps(failed))
    # The compiler's thread may be generating code that nobody needs.
    os._exit(0)


def work(module: str, job: Job, scratch: Path, folder: Path, codegen: bool) -> None:
    """Builds, compiles and judges a job in this process, and writes `RESULT` into `scratch`."""
    build: Callable[[Job], Built] = importlib.import_module(module).build
    built = build(job)
    # Options of the compiler are not in the text; some follow from the planned peak.
    own = [job["options"]] if "options" in job else []
    own += [built.plan.cost.memory_bytes] if built.plan else []
    about = [built.lowered.as_text(), job["topology"], codegen, _versions(job["topology"]), *own]
    place = folder / f"program-{_digest(json.dumps(about))}.json.gz"
    if place.exists():
        text, peak = json.loads(gzip.decompress(place.read_bytes()))
    else:
        text, peak = (
            compile_gpu(built.lowered) if is_gpu(job["topology"]) else compile_program(built.lowered, scratch / "dump", codegen=codegen)
        )
        place.write_bytes(gzip.compress(json.dumps([text, peak]).encode()))
    judgement = judge_text(text, links_of(job["topology"], built.devices), peak)
    planned = describe_plan(built.plan, text) if built.plan else {}
    if built.kinds is not None:
        machine = preset(machine_of(job["topology"]))
        planned |= {"kinds": built.kinds, "judged_kinds": judged_by_kind(read_module(text), roofline_of(machine))}
    (scratch / RESULT).write_text(json.dumps({"judgement": judgement.to_dict(), "planned": planned, "error": ""}))


def compile_program(lowered: jax.stages.Lowered, dump: Path, *, codegen: bool) -> tuple[str, int]:
    """The scheduled program's text, and its peak of memory; without `codegen` a thread is left that still compiles."""
    dump.mkdir()
    finished: list[str | Exception] = []

    def compile_all() -> None:
        try:
            finished.append(lowered.compile(compiler_options={"xla_dump_to": str(dump)}).as_text() or "")
        except Exception as error:  # any failure of the compiler is the job's outcome
            finished.append(error)

    threading.Thread(target=compile_all, daemon=True).start()
    while not finished and (codegen or not _is_scheduled(dump)):
        time.sleep(POLL_S)
    if finished and isinstance(finished[0], Exception):
        raise finished[0]
    scheduled = _program(dump)
    peak = read_peak(_beside(scheduled, "after_optimizations-memory-usage-report.txt").read_text())
    return str(finished[0]) if codegen else scheduled.read_text(), peak


def compile_gpu(lowered: jax.stages.Lowered) -> tuple[str, int]:
    """The same for GPUs; a product that Triton's part of the compiler gives up on without a GPU is left to cuBLAS."""
    from spmdctx.audit import peak_bytes

    try:
        made = lowered.compile()
    except Exception as error:  # the compiler's own type differs between versions
        if "tile sizes" not in str(error):
            raise
        made = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    return made.as_text() or "", peak_bytes(made)


def _is_scheduled(dump: Path) -> bool:
    found = sorted(dump.glob(SCHEDULED))
    text = _program(dump).read_text() if found else ""
    # The entry is written last.
    return "\nENTRY " in text and text.rstrip().endswith("\n}")


def _program(dump: Path) -> Path:
    return max(dump.glob(SCHEDULED), key=lambda path: path.stat().st_size)


def _beside(scheduled: Path, ending: str) -> Path:
    return scheduled.with_name(scheduled.name.replace(SCHEDULED.removeprefix("*"), ending))


def read_peak(report: str) -> int:
    """Bytes that the compiler assigned in HBM, arguments included, from its memory usage report."""
    lines = report.splitlines()
    at = next(index for index, line in enumerate(lines) if "color=0" in line)
    return int(lines[at + 1].split(":")[1].split()[0])


def describe_plan(plan: Plan, hlo_text: str) -> dict[str, Any]:
    """What a plan foresees, and what the audit finds of it in the program."""
    from spmdctx.audit import audit_text
    from spmdctx.machine.xla.collectives.ways import WAYS

    report = audit_text(plan, hlo_text, WAYS)
    sums: dict[str, dict[str, float]] = {}
    mesh = plan.logical_mesh
    for one in plan.collectives:
        row = sums.setdefault(f"{one.kind} {mesh.num_slices(one.axes)}", {"count": 0, "payload_bytes": 0, "seconds": 0.0})
        row["count"] += one.repeats
        row["payload_bytes"] += one.payload_bytes * one.repeats
        row["seconds"] += one.time_s * one.repeats
    cost = {name: getattr(plan.cost, name) for name in ("compute_s", "communication_s", "total_s", "memory_bytes")}
    exact = sum(row.found_bytes for row in report.rows if abs(row.compiled_bytes - row.found_bytes) <= 0.1 * row.found_bytes)
    return {
        **cost,
        "mesh": dict(plan.mesh),
        "collectives": dict(sorted(sums.items())),
        "planned_bytes": report.planned_bytes,
        "compiled_bytes": report.compiled_bytes,
        "exact_bytes": exact,
        "found_share": report.found_share,
        "unplanned_bytes": report.unplanned_bytes,
        "unplanned": [f"{one.kind} {one.axes} {one.total_bytes} {one.source}" for one in report.unplanned][:12],
        "missing": [f"{one.kind} {one.axes} {one.payload_bytes * one.repeats} {one.source}" for one in report.missing][:12],
    }

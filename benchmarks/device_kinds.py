"""Where kernels' time goes on the one GPU at hand, by kind of op: beside the plan's seconds, and what the judge says of the program.

    JAX_PLATFORMS=cuda python -m benchmarks.device_kinds [--only REGEX] [--out FOLDER] [--limit-s SECONDS] [--workers N]

Programs are those of `fresh_programs` and `unseen_programs`, each in a process of its own; they plan and compile at once, and run one
after the other while nothing compiles. Each kind's three figures are milliseconds: planned, judged, measured by the profiler (command
buffers off). Below are the instructions that take longest over what the judge gives them. Memory is in GiB: the plan's peak, what the
compiler assigned, the allocator's peak. The last line has the rank correlation of planned and measured time. The folder gets every
instruction's figures, and the programs' text.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MODULE = "benchmarks.device_kinds"
CALLS, MOST_ROWS = 3, 4
GIB = 2**30
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
EACH_KERNEL = "--xla_gpu_enable_command_buffer="
_TIMES = re.compile(r"kernels ([\d.]+) judged [\d.]+ planned ([\d.]+) ms")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def programs() -> dict[str, Callable[[int], tuple[Any, ...]]]:
    """Every program's function of the number of devices."""
    from benchmarks import fresh_programs, unseen_programs

    return {**fresh_programs.PROGRAMS, **unseen_programs.PROGRAMS}


def measure(name: str, lock: Path, out: Path | None) -> str:
    """One program's rows."""
    import jax

    import spmdctx
    from benchmarks.fresh_programs import values_of
    from benchmarks.judge import roofline_of
    from benchmarks.judge_kinds import judged_instructions, planned_by_kind
    from spmdctx.audit import peak_bytes
    from spmdctx.audit.hlo import read_module

    device = jax.devices()[0]
    fn, shapes, limit = programs()[name](1)
    step = spmdctx.parallel(fn, parallel_mode="auto_parallel", devices=[device], donate_argnums=(0,))
    plan = step.plan(*shapes)
    entry = step._entry_of(shapes, {})
    topology = entry.environment.settings.topology
    planned = planned_by_kind((entry.planned, topology))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        start = time.perf_counter()
        compiled = jax.jit(fn, donate_argnums=(0,)).lower(*shapes).compile()
        first = time.perf_counter() - start
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.flock(file, fcntl.LOCK_EX)
        wall, kernels = _run(compiled, values_of(shapes, limit))
        allocated = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    text = compiled.as_text() or ""
    seconds = roofline_of(topology)
    rows = {
        one.instruction.name: {
            "kind": one.kind,
            "judged_s": seconds(one.work) * one.repeats,
            "bytes": one.work.hbm_bytes * one.repeats,
            "flops": one.work.flops * one.repeats,
            "repeats": one.repeats,
            "measured_s": kernels.get(one.instruction.name, 0.0),
            "shape": one.instruction.shape[:90],
            "op": "".join(_OP_NAME.findall(one.instruction.attributes)[:1]),
        }
        for one in judged_instructions(read_module(text))
    }
    lost = sum(spent for op, spent in kernels.items() if op not in rows)
    memory = [plan.cost.memory_bytes, peak_bytes(compiled), allocated]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figures = {"planned": planned, "total_s": plan.cost.total_s, "wall_s": wall, "lost_s": lost, "rows": rows}
        figures |= {"memory": memory}
        (out / f"{name}.json").write_text(json.dumps(figures))
        (out / f"{name}.hlo.gz").write_bytes(gzip.compress(text.encode()))
    return "\n".join(_report(name, plan.cost.total_s, planned, rows, {"wall": wall, "first": first, "lost": lost}, memory))


def _run(compiled: Callable[..., Any], arguments: Any) -> tuple[float, dict[str, float]]:
    """Seconds of a call, and of each instruction in one."""
    import jax

    from spmdctx.step.report.trace import read_events, spent, traces_in

    state, *batch = arguments

    def call(state: Any) -> Any:
        state = jax.block_until_ready(compiled(state, *batch))[0]
        return state

    walls = []
    for _ in range(5):
        start = time.perf_counter()
        state = call(state)
        walls.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(CALLS):
            state = call(state)
        jax.profiler.stop_trace()
        events = [event for path in traces_in(Path(folder)) for event in read_events(path)]
    kernels: dict[str, float] = defaultdict(float)
    for (_, op), one in spent(events, lambda _: 0).items():
        kernels[op] += one.own_s / CALLS
    return statistics.median(walls[1:]), kernels


def _report(
    name: str,
    planned_s: float,
    planned: Mapping[str, float],
    rows: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, float],
    memory: Sequence[int],
) -> list[str]:
    from benchmarks.judge_kinds import ORDER

    judged, measured, moved = (_sums(rows, key) for key in ("judged_s", "measured_s", "bytes"))
    every, kernels_s = sum(judged.values()), sum(measured.values()) + more["lost"]
    lines = [
        f"{name}: wall {more['wall'] * 1e3:.2f} kernels {kernels_s * 1e3:.2f} judged {every * 1e3:.2f} planned {planned_s * 1e3:.2f} ms"
        f"  planned/kernels {planned_s / kernels_s:.2f} judged/kernels {every / kernels_s:.2f}"
        f"  unnamed {more['lost'] * 1e3:.2f}  compile {more['first']:.0f} s"
        f"  memory {' '.join(f'{own / GIB:.2f}' for own in memory)}"
    ]
    kinds = [kind for kind in ORDER if planned.get(kind) or judged.get(kind) or measured.get(kind)]
    figures = [(planned.get(kind, 0.0), judged.get(kind, 0.0), measured.get(kind, 0.0)) for kind in kinds]
    lines.append(
        "  " + ", ".join(f"{kind} " + "/".join(f"{one * 1e3:.2f}" for one in own) for kind, own in zip(kinds, figures, strict=True))
    )
    lines.append("  TB/s: " + ", ".join(f"{kind} {moved[kind] / measured[kind] / 1e12:.2f}" for kind in kinds if measured.get(kind)))
    worst = sorted(rows.items(), key=lambda row: row[1]["judged_s"] - row[1]["measured_s"])[:MOST_ROWS]
    for op, row in worst:
        about = "/".join(row["op"].split("/")[-3:])[:60]
        lines.append(
            f"    {op[:34]} x{row['repeats']} {row['kind']} {row['measured_s'] * 1e3:.2f} for {row['judged_s'] * 1e3:.2f} ms, "
            f"{row['bytes'] / 2**20:.0f} MiB {row['shape'][:44]} {about}"
        )
    return lines


def _sums(rows: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in rows.values():
        found[row["kind"]] += row[key]
    return found


def main() -> int:
    """Runs the programs that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--workers", type=int, default=6, help="programs that compile at once")
    parser.add_argument("--one", default="", choices=("", *programs()), help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        try:
            print(measure(arguments.one, arguments.lock, arguments.out), flush=True)
        except Exception as error:  # it is the program's row
            print(f"{arguments.one}: {type(error).__name__} {error}"[:500], flush=True)
            return 1
        return 0
    import jax

    print(f"Python {platform.python_version()}, jax {jax.__version__}; planned/judged/measured ms", flush=True)
    names = [name for name in programs() if re.search(arguments.only, name)]
    with tempfile.TemporaryDirectory() as folder:
        return _run_all(names, Path(folder) / "lock", arguments.out, time.monotonic() + arguments.limit_s, arguments.workers)


def _run_all(names: Sequence[str], lock: Path, out: Path | None, end: float, workers: int) -> int:
    """Prints each program's rows as it ends, and says which did not within the time."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EACH_KERNEL}".strip()
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags}
    more = ["--out", str(out)] if out else []
    waiting, running, failed = list(names), dict[str, subprocess.Popen[str]](), 0
    ratios: list[tuple[float, float]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            command = [sys.executable, "-m", MODULE, "--one", name, "--lock", str(lock), *more]
            running[name] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        late = time.monotonic() > end
        for name, process in list(running.items()):
            if process.poll() is None and not late:
                continue
            process.kill()
            del running[name]
            said, _ = process.communicate()
            failed += bool(process.returncode)
            ratios += [(float(kernels), float(planned)) for kernels, planned in _TIMES.findall(said)]
            print(said.rstrip() or f"{name}: {'too late' if late else f'ended with {process.returncode}'}", flush=True)
        waiting = [] if late else waiting
        time.sleep(0.2)
    if len(ratios) > 2:
        from scipy.stats import spearmanr

        within = sum(abs(planned / kernels - 1) <= 0.15 for kernels, planned in ratios)
        rank = spearmanr(*zip(*ratios, strict=True)).statistic
        print(f"{len(ratios)} programs, planned within 15 % of kernels: {within}, rank correlation {rank:.3f}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

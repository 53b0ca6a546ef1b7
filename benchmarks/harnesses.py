"""JAX's harnesses in five ways of planning: `python -m benchmarks.harnesses --out FOLDER [--wrap vmap] [--count 500] [--part 1/4]`.

Every harness that runs on one CPU device, plain or under vmap, scan, checkpoint and grad, is planned in every way, and
each distinct program is run and compared with one device. A worker process runs them, so that an abort or a program without
end is one fault among the others. Rows go to a file of JSON lines per wrapping and part; a second run goes on where the first
one stopped. Exits with 1 where a program crashes or its numbers are wrong.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The optimization of machine code changes no sharding, and takes most of the time to compile.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import argparse
import json
import random
import re
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness_cases import WAYS, WRAPS, all_harnesses, run_case, shape_of

PROGRAMS_PER_WORKER = 400
"""A worker that has run so many makes room for a fresh one, since JAX keeps what it compiled."""

MOST_SHOWN = 40


def main() -> int:
    """Runs the harnesses that the arguments choose."""
    arguments = _parser().parse_args()
    if arguments.worker:
        return _work(arguments.ways, not arguments.plan_only)
    wraps = list(WRAPS) if arguments.wrap == "all" else arguments.wrap.split(",")
    rows: list[dict[str, Any]] = []
    for wrap in wraps:
        names = _chosen(arguments)
        rows += _run(wrap, names, arguments)
    return _summary(rows, wraps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where rows are kept; outside of the repository")
    parser.add_argument("--wrap", default="plain", help=f"some of {', '.join(WRAPS)}, or all (default: plain)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--only", default="", metavar="REGEX", help="harnesses whose name it matches")
    parser.add_argument("--count", type=int, default=0, help="a sample of so many (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--distinct", action="store_true", help="one of those that differ by the types of numbers alone")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts (default: 1/1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one program in all ways (default: 120)")
    parser.add_argument("--plan-only", action="store_true", help="plan and lower, but run nothing")
    parser.add_argument("--again", action="store_true", help="run again those that crashed or were wrong")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of some harnesses, the same ones for the same arguments."""
    names = sorted(name for name in all_harnesses() if re.search(arguments.only, name))
    random.Random(arguments.seed).shuffle(names)
    if arguments.distinct:
        names = list({shape_of(name): name for name in reversed(names)}.values())[::-1]
    index, total = (int(number) for number in arguments.part.split("/"))
    return names[: arguments.count or len(names)][index - 1 :: total]


def _run(wrap: str, names: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs what the folder has no row of, and returns the rows of all."""
    file = None if arguments.out is None else arguments.out / f"{wrap}-{arguments.part.replace('/', '-of-')}.jsonl"
    known: dict[str, dict[str, Any]] = {}
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = [line for path in sorted(arguments.out.glob(f"{wrap}-*.jsonl")) for line in path.read_text().splitlines()]
        known = {row["name"]: row for row in map(json.loads, lines)}
        if arguments.again:
            known = {name: row for name, row in known.items() if not _faults(row)}
    for row in _worked(wrap, [name for name in names if name not in known], arguments):
        known[row["name"]] = row
        if file is not None:
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        for way, one in _faults(row):
            print(f"{one['outcome']:<8} {wrap:<10} {way:<22} {row['name'][:150]}: {one.get('error', '')[:250]}", flush=True)
    return [known[name] for name in names]


def _worked(wrap: str, names: Iterable[str], arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Yields the row of each harness; a worker that dies or takes too long gives a fault, and another one goes on."""
    worker: _Worker | None = None
    for name in names:
        if worker is None:
            worker = _Worker(arguments)
        row = worker.run(name, wrap, arguments.limit)
        if isinstance(row, str):
            worker.stop()
            worker = None
            row = {"name": name, "wrap": wrap, "ways": {way: {"outcome": "crashed", "error": row} for way in arguments.ways.split(",")}}
        elif worker.count >= PROGRAMS_PER_WORKER:
            worker.stop()
            worker = None
        yield row
    if worker is not None:
        worker.stop()


class _Worker:
    """A process that runs harnesses one after another."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.harnesses", "--worker", "--ways", arguments.ways]
        command += ["--plan-only"] if arguments.plan_only else []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        self.count = 0

    def run(self, name: str, wrap: str, limit_s: float) -> dict[str, Any] | str:
        """Returns the row of a harness, or in words how the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.count += 1
        self._process.stdin.write(f"{wrap} {name}\n".encode())
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s + (60 if self.count == 1 else 0)):
                return f"ran longer than {limit_s:g} s"
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            last = next((text for text in reversed(self._errors.read().splitlines()) if text.strip()), "")
            return f"the process died with exit status {status}: {last[:300]}"
        row: dict[str, Any] = json.loads(line)
        return row

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _work(ways: str, run: bool) -> int:
    """Runs what standard input names; its own standard output is the last one, since programs print too."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        wrap, name = line.rstrip("\n").split(" ", 1)
        print(json.dumps(run_case(name, wrap, ways.split(","), run=run)), file=results, flush=True)
    return 0


def _faults(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(way, one) for way, one in row.get("ways", {}).items() if one["outcome"] in ("crashed", "wrong")]


def _summary(rows: Sequence[dict[str, Any]], wraps: Sequence[str]) -> int:
    print(f"\njax {jax.__version__}, {len(all_harnesses())} harnesses")
    print(f"{'wrap':<11} {'way':<22} {'ran':>6} {'split':>6} {'refused':>8} {'crashed':>8} {'wrong':>6}")
    for wrap in wraps:
        own = [row for row in rows if row["wrap"] == wrap]
        ran = [row for row in own if "ways" in row]
        for way in WAYS:
            found = [row["ways"][way] for row in ran if way in row["ways"]]
            if not found:
                continue
            count = Counter(one["outcome"] for one in found)
            split = sum(bool(one.get("split")) for one in found)
            cells = (count["ok"] + count["wrong"], split, count["refused"], count["crashed"], count["wrong"])
            print(f"{wrap:<11} {way:<22} {cells[0]:>6} {cells[1]:>6} {cells[2]:>8} {cells[3]:>8} {cells[4]:>6}")
        seconds, programs = sum(row["seconds"] for row in own if "seconds" in row), sum(row.get("programs", 0) for row in own)
        print(f"{wrap:<11} {len(own)} harnesses, {len(own) - len(ran)} that one device does not run, {programs} programs, {seconds:.0f} s")
    refusals = Counter(
        re.sub(r"\d+|'[^']*'", "_", one["error"]) for row in rows for one in row.get("ways", {}).values() if one["outcome"] == "refused"
    )
    for text, times in refusals.most_common(MOST_SHOWN):
        print(f"refused {times:>6} times: {text}")
    return 1 if any(_faults(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

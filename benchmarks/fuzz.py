"""Random programs, planned in random ways: right numbers, no error that is not documented, audits that hold, the same plan twice.

    python -m benchmarks.fuzz [--seed 0] [--count 100] [--only N] [--workers 1] [--show]

A program has 5 to 40 ops, odd sizes, narrow types, pins, loops and gradients (`benchmarks/fuzz_moves.py`). Each is planned in two ways,
drawn from all parallel modes, searches and more options (`benchmarks/fuzz_checks.py`), on eight CPU devices. Processes of their own run the
programs, so one that aborts its process is a fault like others. A failing program is printed as a script; `--only N` runs it again.
The total so far is printed every 50 programs, and when the run is interrupted or terminated.
Exits with 1 on any fault but audits, of which 1 % may fail.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 180.0
"""Seconds after which a program counts as hung."""
AUDITS = 0.99
CACHED = 40
"""Programs after which a process forgets what it has compiled."""
EVERY = 50
"""Programs after which the total is printed."""
XLA_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""Eight devices; LLVM, which is most of the time, does as little as it can. The partitioner and the passes behind it stay the same."""


@dataclass
class Tally:
    """What came of all programs."""

    programs: int = 0
    unfit: int = 0
    ways: int = 0
    split: int = 0
    audits: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, list[str], dict[str, str]]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: dict[str, Any]) -> None:
        """Counts one program."""
        with self.lock:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        self.programs += 1
        if row["outcomes"] is None:
            self.unfit += 1
            return
        for outcome in row["outcomes"]:
            self.ways += 1
            self.split += outcome["is_split"]
            self.audits += outcome["audited"]
            if outcome["refused"]:
                self.refused[outcome["refused"].split(":")[0]] += 1
            self.faults += [(row["number"], row["tags"], fault) for fault in outcome["faults"]]

    @property
    def passes(self) -> bool:
        """Returns whether all holds that must hold."""
        kinds = Counter(fault["kind"] for _, _, fault in self.faults)
        return self.ways > 0 and sum(kinds.values()) == kinds["audit"] <= (1 - AUDITS) * self.audits

    def lines(self) -> list[str]:
        """Returns the tally as text."""
        kinds = Counter(fault["kind"] for _, _, fault in self.faults)
        return [
            f"{self.programs} programs ({self.unfit} not finite on one device), {self.ways} plans, {self.split} of them split an argument",
            f"refused: {dict(self.refused) or 'none'}",
            f"faults: {dict(kinds) or 'none'}; audits that hold: {self.audits - kinds['audit']} of {self.audits}",
            f"{(time.monotonic() - self.since) / max(self.programs, 1):.2f} s a program",
        ]


def worker(seed: int, numbers: list[int]) -> None:
    """Runs programs and prints a line of JSON before and after each."""
    import jax

    from benchmarks.fuzz_checks import check
    from benchmarks.fuzz_moves import MOVES
    from benchmarks.fuzz_programs import make_program

    def say(**row: Any) -> None:
        print(json.dumps(row), flush=True)

    for count, number in enumerate(numbers, 1):
        say(start=number)
        if count % CACHED == 0:
            jax.clear_caches()
        program = make_program(f"{seed} {number}", MOVES)
        tags = sorted(program.tags)
        outcomes = check(program, random.Random(f"ways {seed} {number}"), lambda source: say(way=source, tags=tags))  # noqa: B023  called before the next number
        rows = outcomes and [{**one._asdict(), "faults": [fault._asdict() for fault in one.faults]} for one in outcomes]
        say(number=number, tags=tags, outcomes=rows)


class Worker:
    """A process that runs programs, and the program that it is at."""

    def __init__(self, seed: int, numbers: list[int]) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}
        command = [sys.executable, "-m", "benchmarks.fuzz", "--seed", str(seed), "--worker", ",".join(map(str, numbers))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.at, self.way, self.tags = numbers[0], "", list[str]()
        self.rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self.rows.put(json.loads(line))
        self.rows.put(None)

    def next_row(self) -> dict[str, Any] | None:
        """Returns the outcome of the next program, also of one that ends the process; None behind the last."""
        while True:
            try:
                row = self.rows.get(timeout=PATIENCE_S)
            except queue.Empty:
                self.process.kill()
                return self._ended("hang")
            if row is None:
                return None if self.process.wait() == 0 else self._ended("abort")
            self.at, self.way, self.tags = row.get("start", self.at), row.get("way", self.way), row.get("tags", self.tags)
            if "number" in row:
                return row

    def _ended(self, kind: str) -> dict[str, Any]:
        fault = {"kind": kind, "options": self.way, "text": f"exit status {self.process.wait()}"}
        outcome = {"faults": [fault], "refused": "", "audited": False, "is_split": False}
        return {"number": self.at, "tags": self.tags, "outcomes": [outcome], "ended": True}


def run(seed: int, numbers: list[int], tally: Tally, *, show: bool = True) -> None:
    """Runs the programs of some numbers, in a new process after each that ends early."""
    while numbers:
        made, done = Worker(seed, numbers), False
        while not done:
            row = made.next_row()
            if row is None:
                return
            tally.add(row)
            if show:
                show_faults(seed, row)
                if tally.programs % EVERY == 0:
                    print("so far: " + "; ".join(tally.lines()), flush=True)
            numbers = numbers[numbers.index(row["number"]) + 1 :]
            done = "ended" in row


def show_faults(seed: int, row: dict[str, Any]) -> None:
    """Prints the faults of a program and the program."""
    faults = [fault for outcome in row["outcomes"] or () for fault in outcome["faults"]]
    for fault in faults:
        print(f"--seed {seed} --only {row['number']}: {fault['kind']} {row['tags'] or ''} [{fault['options']}] {fault['text']}", flush=True)
    if any(fault["kind"] != "audit" for fault in faults):
        print(script(seed, row["number"], faults[0]["options"]), flush=True)


def script(seed: int, number: int, options: str) -> str:
    """Returns a program as a script."""
    from benchmarks.fuzz_moves import MOVES
    from benchmarks.fuzz_programs import make_program
    from benchmarks.split_checks import FREE_LINKS_SOURCE

    text = make_program(f"{seed} {number}", MOVES).script(options)
    return text.replace("\nargs = ", f"\nFREE_LINKS = {FREE_LINKS_SOURCE}\nargs = ") if "FREE_LINKS" in options else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the seed of all programs")
    parser.add_argument("--count", type=int, default=100, help="programs")
    parser.add_argument("--start", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", type=int, help="the number of a single program")
    parser.add_argument("--workers", type=int, default=1, help="processes at the same time")
    parser.add_argument("--show", action="store_true", help="print the program of --only although nothing is wrong")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.seed, [int(number) for number in args.worker.split(",")])
        return 0
    numbers = [args.only] if args.only is not None else list(range(args.start, args.start + args.count))
    if args.show:
        print(script(args.seed, numbers[0], ""))
    tally = Tally()
    shares = [share for share in (numbers[place :: args.workers] for place in range(args.workers)) if share]
    threads = [threading.Thread(target=run, args=(args.seed, share, tally), daemon=True) for share in shares]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        print("ended early")
    print("\n".join(tally.lines()))
    return 0 if tally.passes else 1


if __name__ == "__main__":
    sys.exit(main())

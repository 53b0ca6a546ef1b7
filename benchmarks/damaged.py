"""Damaged input of all kinds: each ends in a documented error or in what was written, in little time and memory.

    python -m benchmarks.damaged [--seed 0] [--count 100] [--only KIND] [--number N] [--workers 1]

Kinds are plan files, YAML contexts, topologies, MindSpore's strategy files, safetensors, folders of checkpoints, environments of launchers,
and options (`benchmarks/damaged_files.py`, `benchmarks/damaged_settings.py`). A process reads many inputs in turn; one that dies is a fault
of the input it was at. Faults are: an error that is not documented, more than 5 s, more than 500 MB, and values other than those written.
Exits with 1 on any fault; `--only KIND --number N` repeats one input.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S, PATIENCE_S, LIMIT_BYTES = 5.0, 60.0, 500 << 20
HARD_BYTES = 4 << 30
"""What an input may take before its process gets no more memory."""
KINDS = ("plan", "context", "topology", "mindspore", "safetensors", "ranks", "folder", "environment", "options")
EVERY = 500
"""Inputs after which a process prints how far it is."""


class TimeUp(BaseException):
    """Raised in an input that takes too long."""


def made_kinds(folder: Path, only: str | None = None) -> dict[str, Callable[[random.Random], tuple[str, Callable[[], str]]]]:
    """Returns for each kind what makes an input: its description, and what reads it and says what is wrong."""
    from benchmarks import damaged_files, damaged_settings

    made = {**damaged_files.KINDS, **damaged_settings.KINDS}
    found = {}
    for kind in [only] if only else KINDS:
        (folder / kind).mkdir()
        found[kind] = made[kind](folder / kind)
    return found


@contextmanager
def limited() -> Iterator[Callable[[], int]]:
    """Limits the time inside; gives the bytes that were taken at most."""

    def up(*_: object) -> None:
        raise TimeUp

    def status(name: str) -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    former = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield lambda: status("VmHWM") - before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return "".join(f"\n    {Path(frame.filename).name}:{frame.lineno} {(frame.line or '')[:120]}" for frame in frames)


def judged(read: Callable[[], str]) -> tuple[str, str]:
    """Reads one input; returns "right", "refused" or the kind of its fault, and what is to be said of that."""
    from spmdctx.errors import is_laid_out

    with limited() as taken:
        try:
            wrong = read()
            outcome = ("wrong", wrong) if wrong else ("right", "")
        except TimeUp as error:
            outcome = ("hang", f"more than {LIMIT_S:.0f} s{_place(error)}")
        except BaseException as error:
            if is_laid_out(error) or isinstance(error, FileNotFoundError):
                size = len(str(error))
                outcome = ("refused", "") if size < 20_000 else ("long", f"a message of {size} characters")
            else:
                outcome = ("raw", f"{type(error).__name__}: {str(error)[:160]}{_place(error)}")
        peak = taken()
    if peak > LIMIT_BYTES and outcome[0] in ("right", "refused"):
        return "memory", f"{peak >> 20} MB"
    return outcome


def worker(seed: int, start: int, stop: int, step: int, only: str | None) -> None:
    """Reads inputs and prints a line of JSON before and after each that is worth it."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        kinds = made_kinds(Path(scratch), only)
        names = list(kinds)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + HARD_BYTES, used + HARD_BYTES))
        counts: Counter[str] = Counter()
        for number in range(start, stop, step):
            kind = names[number % len(names)]
            chance = random.Random(f"{seed} {kind} {number}")
            description, read = kinds[kind](chance)
            print(json.dumps({"at": number, "kind": kind, "what": description}), flush=True)
            outcome, said = judged(read)
            counts[f"{kind} {outcome}"] += 1
            if outcome not in ("right", "refused"):
                print(json.dumps({"number": number, "kind": kind, "what": description, "fault": outcome, "said": said}), flush=True)
            if sum(counts.values()) % EVERY == 0:
                print(json.dumps({"far": number}), flush=True)
        print(json.dumps({"counts": counts}), flush=True)


def run(seed: int, numbers: range, only: str | None, show: Callable[[str], None]) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Runs processes until all inputs of one share are read; returns the outcomes by kind, and the faults."""
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    start = numbers.start
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONWARNINGS": "ignore"}
    while start < numbers.stop:
        share = f"{seed},{start},{numbers.stop},{numbers.step},{only or ''}"
        command = [sys.executable, "-m", "benchmarks.damaged", "--worker", share]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace", env=environment)
        at, is_done = {"at": start, "kind": "start", "what": ""}, False
        for line in _lines(made):
            row = json.loads(line) if line.startswith("{") else {}
            at = row if "at" in row else at
            if "fault" in row:
                faults.append(row)
                show(f"--seed {seed} --only {row['kind']} --number {row['number']}: {row['fault']} [{row['what'][:160]}] {row['said']}")
            if "far" in row:
                show(f"at {row['far']}, {len(faults)} faults")
            if "counts" in row:
                counts.update(row["counts"])
                is_done = True
        code = made.wait()
        if is_done:
            break
        faults.append({"number": at["at"], "kind": at["kind"], "what": at["what"], "fault": "abort", "said": f"exit status {code}"})
        show(f"--seed {seed} --only {at['kind']} --number {at['at']}: abort, exit status {code} [{at['what'][:200]}]")
        start = at["at"] + numbers.step
    return counts, faults


def _lines(made: subprocess.Popen[str]) -> Iterator[str]:
    """Gives what a process prints; one that says nothing for too long is ended."""
    rows: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert made.stdout is not None
        with made.stdout as lines:
            for line in lines:
                rows.put(line)
        rows.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = rows.get(timeout=PATIENCE_S)
        except queue.Empty:
            made.kill()
            return
        if not line:
            return
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="inputs")
    parser.add_argument("--only", choices=KINDS, help="one kind")
    parser.add_argument("--number", type=int, help="a single input of that kind")
    parser.add_argument("--workers", type=int, default=1, help="processes at the same time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        seed, start, stop, step, only = args.worker.split(",")
        worker(int(seed), int(start), int(stop), int(step), only or None)
        return 0
    since, lock = time.monotonic(), threading.Lock()
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []

    def share(numbers: range) -> None:
        found, wrong = run(args.seed, numbers, args.only, lambda text: print(text, flush=True))
        with lock:
            counts.update(found)
            faults.extend(wrong)

    first, last = (0, args.count) if args.number is None else (args.number, args.number + 1)
    threads = [threading.Thread(target=share, args=(range(first + place, last, args.workers),)) for place in range(args.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in KINDS:
        rows = {name.split()[1]: count for name, count in sorted(counts.items()) if name.split()[0] == kind}
        if rows:
            print(f"{kind:12} {rows}")
    print(f"{last - first} inputs, {len(faults)} faults {dict(Counter(row['fault'] for row in faults)) or ''}, ", end="")
    print(f"{(time.monotonic() - since) / max(last - first, 1) * 1000:.0f} ms an input")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""A training whose processes are killed at random moments goes on as if nothing had happened, and ends at once with a clear error.

    python -m benchmarks.faults [--kills 20] [--seed 0]

Runs `tests/processes/work_train.py` on two processes of two CPU devices: once undisturbed, then with kill -9 of a random process
again and again, in turn after a random number of steps, while a checkpoint is written, and at any time from the start on. The same
command is run again after each kill.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax

KINDS = ("step", "save", "any")
LIMIT_S, PATIENCE_S = 15.0, 300.0
_PID = re.compile(r"process (\d+) is (\d+)")


class Kill(NamedTuple):
    """One kill: its kind, the process, seconds until the job had ended, the error of the other one, and what was on disk."""

    kind: str
    process: int
    seconds: float
    error: str
    saving: bool
    last_checkpoint: int
    steps_seen: int


class Run:
    """One run of the training's command, its output read as it comes."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        command = "-m spmdctx launch -n 2 --devices-per-process 2 -m tests.processes.work_train"
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *command.split(), str(folder), str(num_steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self.new: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self.new.put(line)

    def pids(self) -> dict[int, int]:
        """Of the processes, waited for."""
        found: dict[int, int] = {}
        while len(found) < 2:
            match = _PID.search(self.new.get(timeout=PATIENCE_S))
            if match:
                found[int(match[1])] = int(match[2])
        return found

    def wait_for_steps(self, count: int) -> int:
        """Waits for so many steps, or the end; how many came."""
        seen = 0
        while seen < count and self.process.poll() is None:
            try:
                seen += "step " in self.new.get(timeout=0.2)
            except queue.Empty:
                continue
        return seen

    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way."""
        return any((self.folder / "checkpoints").glob("*.orbax-checkpoint-tmp"))

    def end(self) -> int:
        """Waits for the end; the exit code."""
        code = self.process.wait(PATIENCE_S)
        self.reader.join(5)
        return code


def checkpoints(folder: Path) -> list[int]:
    """The steps of the complete ones."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


def losses(folder: Path) -> list[tuple[int, str]]:
    """Step and loss, in the order in which they were written."""
    path = folder / "losses.txt"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), value) for step, value in rows]


def kill_once(folder: Path, num_steps: int, kind: str, chance: random.Random) -> Kill | None:
    """Runs the command and kills one of its processes; None where the training was done before."""
    run = Run(folder, num_steps)
    pids, process = run.pids(), chance.randrange(2)
    if kind == "any":
        time.sleep(chance.uniform(0, 10))
    else:
        run.wait_for_steps(chance.randint(1, 9))
        while kind == "save" and not run.is_saving() and run.process.poll() is None:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.04))
    before = len(losses(folder))
    start = time.monotonic()
    try:
        os.kill(pids[process], signal.SIGKILL)
    except ProcessLookupError:
        run.end()
        return None
    saving = run.is_saving()
    run.end()
    seconds = time.monotonic() - start
    said = [line for line in run.lines if line.startswith(f"[{1 - process}] error:")]
    complete = checkpoints(folder)
    return Kill(kind, process, seconds, said[0] if said else "", saving, complete[-1] if complete else 0, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        calm, disturbed = Path(scratch, "calm"), Path(scratch, "disturbed")
        calm.mkdir()
        disturbed.mkdir()
        if Run(calm, arguments.steps).end():
            print("the undisturbed training failed")
            return 1
        expected = dict(losses(calm))
        kills: list[Kill] = []
        while len(kills) < arguments.kills:
            kill = kill_once(disturbed, arguments.steps, KINDS[len(kills) % len(KINDS)], chance)
            if kill is None:
                break
            kills.append(kill)
            print(f"{len(kills):2}  {kill}", flush=True)
        code = Run(disturbed, arguments.steps).end()
        found = losses(disturbed)
    return report(kills, code, found, expected)


def report(kills: list[Kill], code: int, found: list[tuple[int, str]], expected: dict[int, str]) -> int:
    """Prints what was asked for; 0 where all of it holds."""
    starts = [found[index][0] for index in range(1, len(found)) if found[index][0] != found[index - 1][0] + 1]
    repeated = len(found) - len(dict(found))
    lost = [kill for kill in kills if not kill.error]
    same = all(expected.get(step) == value for step, value in found) and len(dict(found)) == len(expected)
    after = [found[kill.steps_seen :] for kill in kills]
    # The first loss after a kill that a rerun has written follows the last complete checkpoint.
    resumed = all(any(step == kill.last_checkpoint + 1 for step, _ in rows) for kill, rows in zip(kills, after, strict=True) if rows)
    print(f"{datetime.date.today()}, jax {jax.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{len(kills)} kills, {sum(kill.saving for kill in kills)} of them during a save; reruns began at steps {starts}")
    print(f"seconds until the job had ended: median {sorted(kill.seconds for kill in kills)[len(kills) // 2]:.1f}", end=", ")
    print(f"most {max(kill.seconds for kill in kills):.1f}; without a clear error on the other process: {len(lost)}")
    print(
        f"losses equal to the undisturbed ones bit for bit: {same}; steps run twice: {repeated}; resumed at the last checkpoint: {resumed}"
    )
    return 0 if same and resumed and not code and not lost and max(kill.seconds for kill in kills) < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())

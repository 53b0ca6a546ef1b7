"""Jobs of servers and workers, each in a process of its own: they are watched by their lines, and their processes killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0
_LINE = re.compile(r"\[ *(\d+)\] (STEP|STATE) (.*)")


class Running:
    """One `spmdctx launch`.

    Attributes:
        losses: by step, what workers have said of it.
        times: by step, the seconds of a clock at which a worker was first seen to have done it.
        states: what they have said of their last state.
        other: all other lines, of its errors too.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "spmdctx", "launch", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT, start_new_session=True
        )
        self.losses: dict[int, set[str]] = {}
        self.times: dict[int, float] = {}
        self.states: list[str] = []
        self.other: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "its output is a pipe"
        with self.process.stdout as lines:
            for line in lines:
                found = _LINE.match(line)
                with self._changed:
                    if found is None:
                        self.other.append(line.rstrip())
                    elif found[2] == "STEP":
                        step, loss = found[3].split()
                        self.losses.setdefault(int(step), set()).add(loss)
                        self.times.setdefault(int(step), time.monotonic())
                    else:
                        self.states.append(found[3])
                    self._changed.notify_all()

    @property
    def last(self) -> int:
        """The newest step that a worker has seen done."""
        return max(self.losses, default=-1)

    def gaps(self, first: int, last: int) -> list[float]:
        """Returns the times, in seconds, between the steps of a range that were done one after the other."""
        # A worker that was late may say an earlier step later, so the newest step counts.
        found, newest = [], self.times[first]
        for step in range(first + 1, last + 1):
            if step in self.times:
                found.append(max(0.0, self.times[step] - newest))
                newest = max(newest, self.times[step])
        return found

    def wait_for(self, step: int, seconds: float = PATIENCE_S) -> None:
        """Waits until a worker has seen a step done.

        Raises:
            TimeoutError: it does not come.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while self.last < step:
                left = end - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    raise TimeoutError(f"step {step} does not come after {self.last}: {self.other[-5:]}")
                self._changed.wait(min(left, 1))

    def finish(self, seconds: float = PATIENCE_S) -> int:
        """Waits for the end; returns the exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            self.stop()
            self._reader.join(10)

    def stop(self) -> None:
        """Ends the job, whatever it does; the processes of Ray end with it."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def pids(self, kind: str) -> list[int]:
        """Returns the processes of "Worker" or "Server", the oldest first; spare servers are none."""
        return actors(kind, self.process.pid)

    def kill(self, kind: str, index: int = 0) -> None:
        """Kills a process."""
        found = self.pids(kind)
        os.kill(found[index % len(found)], signal.SIGKILL)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def actors(kind: str, ancestor: int | None) -> list[int]:
    """Returns the processes of a kind of actor below another process, or all of them, the oldest first; spare servers are none."""
    found = [pid for pid in below(ancestor) if (_title(pid)).startswith(f"ray::{kind}")]
    return [pid for pid in found if kind != "Server" or _computes(pid)]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _computes(pid: int) -> bool:
    """Returns whether XLA has threads in a process: a server has none before it has loaded."""
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):
            if task.read_text().startswith("tf_XLA"):
                return True
    return False


def below(ancestor: int | None) -> list[int]:
    """Returns the processes below another one, or all, the oldest first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return sorted(pid for pid in parents if ancestor is None or (pid != ancestor and is_below(pid, ancestor, parents)))


def is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    """Returns whether a process descends from another."""
    while pid > 1 and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor

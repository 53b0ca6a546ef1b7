"""The processes of a job, which start and end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, NamedTuple

from spmdctx.communication.launch.environment import free_port, new_token, process_environment
from spmdctx.communication.launch.log_filter import ConnectionReports
from spmdctx.errors import PEER_LOST, SAVED, TIMED_OUT

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.05
_GRACE_S = 5.0
"""Seconds in which processes may end by themselves, after a failure and after SIGTERM."""


class Job(NamedTuple):
    """A Python script or module with its arguments, to be run `count` times.

    `devices` is the number of devices of each process; `timeout_s` is a hard limit, or None.
    """

    arguments: Sequence[str]
    num_processes: int
    devices: int = 1
    timeout_s: float | None = None


class Outcome(NamedTuple):
    """The exit code of a job, and what went wrong, empty where nothing did."""

    code: int
    trouble: str = ""


def run_job(job: Job, out: IO[str] | None = None, err: IO[str] | None = None) -> Outcome:
    """Runs a job to its end: the first process that fails stops the others, whose groups of processes are killed.

    Args:
        job: what to run.
        out: where standard output goes, each line with the number of its process; this process's own by default.
        err: where standard error goes.
    """
    processes = _Processes(job)
    try:
        with processes.signals_forwarded():
            processes.start(out or sys.stdout, err or sys.stderr)
            outcome = processes.wait()
    finally:
        processes.kill()
    return outcome


class _Processes:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._started = time.monotonic()
        self._interrupted: int | None = None
        self._all: list[subprocess.Popen[str]] = []

    def start(self, out: IO[str], err: IO[str]) -> None:
        """Starts all of them, or those before a signal that ends the job."""
        job, port, token = self._job, free_port(), new_token()
        for number in range(job.num_processes):
            made = subprocess.Popen(
                [sys.executable, *job.arguments],
                env=process_environment(os.environ, port, job.num_processes, number, job.devices, token),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._all.append(made)
            self._read(made.stdout, out, number)
            self._read(made.stderr, err, number)
            if self._interrupted is not None:
                self._signal(self._interrupted)  # it may have come before this process was known
                break

    def _read(self, pipe: IO[str] | None, sink: IO[str], number: int) -> None:
        assert pipe is not None, "both streams are pipes"
        reader = threading.Thread(target=self._copy, args=(pipe, sink, number), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _copy(self, pipe: IO[str], sink: IO[str], number: int) -> None:
        width = len(str(self._job.num_processes - 1))
        reports = ConnectionReports()
        with pipe:
            for line in pipe:
                if reports.has(line):
                    continue
                with self._lock:
                    sink.write(f"[{number:{width}}] {line if line.endswith(chr(10)) else line + chr(10)}")
                    sink.flush()

    def wait(self) -> Outcome:
        """Waits for the end of all processes, the first failure, or the time limit."""
        while any(code is None for code in self._codes()):
            if any(self._codes()):
                return self._failed()
            limit = self._job.timeout_s
            if limit is not None and time.monotonic() - self._started > limit:
                running = [str(number) for number, code in enumerate(self._codes()) if code is None]
                return Outcome(TIMED_OUT, f"The job took more than {limit:g} s: {_listed(running)} still ran, and all were stopped.")
            time.sleep(_POLL_S)
        return self._failed() if any(self._codes()) else Outcome(0)

    def _failed(self) -> Outcome:
        """Names the process that failed first; those that end because of it get the time to say so."""
        self._wait_for_all(_GRACE_S if any(code is None for code in self._codes()) else 0)
        codes = self._codes()
        first = min((number for number, code in enumerate(codes) if code), key=lambda number: (_is_consequence(codes[number]), number))
        code = codes[first] or 0
        if code == SAVED:
            return Outcome(SAVED, "The job was stopped by SIGTERM, and has saved; the same command run again goes on from there.")
        stopped = sum(one is None for one in codes)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._interrupted is not None and code < 0:
            return Outcome(128 - code, f"The job was stopped by {signal.Signals(self._interrupted).name}.")
        return Outcome(128 - code if code < 0 else code, f"Process {first} {how}{_others(stopped)}.")

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._all]

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(code is None for code in self._codes()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Ends what still runs, politely first, and everything that the processes have started."""
        if any(code is None for code in self._codes()):
            self._signal(signal.SIGTERM)
            self._wait_for_all(_GRACE_S)
        self._signal(signal.SIGKILL)
        for process in self._all:
            process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _signal(self, number: int) -> None:
        for process in self._all:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Forwards signals to all processes of the job inside the block; a second interrupt kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            again = self._interrupted is not None and number == signal.SIGINT
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._interrupted = number
            self._signal(signal.SIGKILL if again else number)

        previous: dict[int, Any] = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _is_consequence(code: int | None) -> bool:
    return code == PEER_LOST


def _others(count: int) -> str:
    return "" if count == 0 else f"; the other {'one was' if count == 1 else f'{count} were'} stopped"


def _listed(numbers: Sequence[str]) -> str:
    return f"process {numbers[0]}" if len(numbers) == 1 else f"processes {', '.join(numbers)}"

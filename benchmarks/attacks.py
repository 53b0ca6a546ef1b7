"""Attacks on the ports of a job of two processes, whose losses stay the undisturbed ones bit for bit.

    python -m benchmarks.attacks [--only REGEX]

Each attack has a job of its own, `tests/processes/work_attacked.py`. A process that is killed in the midst of an attack ends the other
with exit code 76 and one clear error within 15 s. Prints a table; exits with 1 on any fault. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.attack_moves import ATTACKS, Attack, Target
from spmdctx.communication.clusters import detect
from spmdctx.communication.launch.environment import free_port, new_token, process_environment
from spmdctx.communication.meeting.key import job_key

SCRIPT = "tests.processes.work_attacked"
NUM_STEPS, STEP_S, KILL_STEP = 60, 0.05, 40
PEER_LOST, KILLED = 76, -9
PATIENCE_S, LIMIT_S = 120.0, 15.0
_SQUATTED_S = 2.0


class Result(NamedTuple):
    """What became of a job: faults in words, its losses, the seconds of the attack and from the kill to the other's end."""

    faults: tuple[str, ...]
    losses: Mapping[int, str]
    attack_s: float
    ended_s: float | None


class Process:
    """One process of the job, its output read as it comes."""

    def __init__(self, environ: dict[str, str], arguments: list[str], limit: int, *, hard: bool) -> None:
        # A shell sets the limit: Python's own way forks, which JAX warns of.
        limited = ["sh", "-c", f'ulimit {"-n" if hard else "-Sn"} {limit} && exec "$0" "$@"'] if limit else []
        self._process = subprocess.Popen(
            [*limited, sys.executable, "-m", SCRIPT, *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self.ended = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
        self._process.wait()
        self.ended = time.time()

    def waits_for(self, found: Callable[[], object]) -> bool:
        """Whether something is found before the process ends, and in time."""
        until = time.monotonic() + PATIENCE_S
        while not found() and time.monotonic() < until and not self.ended:
            time.sleep(0.02)
        return bool(found())

    def end(self) -> int:
        """Waits for the end; the exit code, 0 for a process that had to be killed here."""
        self._reader.join(PATIENCE_S)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
            self.lines.append("HUNG")
            return 0
        return self._process.wait()

    def said(self, word: str) -> list[str]:
        """What it said after this word."""
        return [line.partition(" ")[2] for line in self.lines if line.split(" ")[0] == word]


def ports_of(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets})


def run(attack: Attack, step_s: float = STEP_S) -> Result:
    """Runs a job under attack, each of whose steps takes at least so many seconds."""
    port, token = free_port(), new_token()
    held: list[socket.socket] = []
    base = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environs = [process_environment(base, port, 2, number, 2, token) for number in range(2)]
    arguments = [str(NUM_STEPS), str(step_s), *([f"{attack.dies}:{KILL_STEP}"] if attack.dies >= 0 else [])]
    cluster = detect(environs[0])
    assert cluster is not None, "the environment is that of a launcher"
    key = job_key(environs[0], cluster).secret
    processes: list[Process] = []

    def start(number: int) -> None:
        processes.append(Process(environs[number], arguments, attack.limit, hard=attack.own_port))

    try:
        if attack.when == "meeting":
            seconds, faults = _in_the_meeting(attack, Target([port], key, held), start, processes, environs[1])
        else:
            start(0)
            start(1)
            seconds, faults = _while_it_runs(attack, port, key, held, processes, environs[1])
        codes = [process.end() for process in processes]
    finally:
        for one in held:
            one.close()
    return _judged(attack, processes, codes, seconds, faults)


def _in_the_meeting(
    attack: Attack, target: Target, start: Callable[[int], None], processes: list[Process], environ: dict[str, str]
) -> tuple[float, list[str]]:
    faults: list[str] = []
    if attack.actor == "squatter":
        begun = time.monotonic()
        with socket.create_server(("127.0.0.1", target.ports[0])) as squatter:
            start(1)
            squatter.settimeout(PATIENCE_S)
            for _ in range(3):
                made, _ = squatter.accept()
                with made:
                    made.sendall(b"spmdctx-2 " + b"0" * 32 + b"\n")
                    made.recv(1000)
                    made.sendall(b"welcome " + b"0" * 64 + b"\n")
        start(0)
        processes.reverse()
        return time.monotonic() - begun, faults
    start(0)
    if not processes[0].waits_for(lambda: target.ports[0] in ports_of(processes[0].pid)):
        faults.append("process 0 does not listen")
    begun = time.monotonic()
    if attack.actor == "stranger":
        faults += _refused(environ, "-")
    else:
        attack.move(target)
    seconds = time.monotonic() - begun
    start(1)
    return seconds, faults


def _while_it_runs(
    attack: Attack, port: int, key: bytes, held: list[socket.socket], processes: list[Process], environ: dict[str, str]
) -> tuple[float, list[str]]:
    first, second = processes
    if not (first.waits_for(lambda: first.said("loss")) and second.waits_for(lambda: second.said("loss"))):
        return 0.0, ["the job does not start"]
    begun = time.monotonic()
    if attack.actor == "late":
        faults = _refused(environ, environ["SPMDCTX_TOKEN"])
        return time.monotonic() - begun, faults
    attack.move(Target([port] if attack.own_port else ports_under_attack(processes, port), key, held))
    return time.monotonic() - begun, []


def ports_under_attack(processes: list[Process], port: int) -> list[int]:
    """The job's own port, on which nothing listens any more, and those that JAX has opened."""
    return [port, *(one for process in processes for one in ports_of(process.pid))]


def _refused(environ: dict[str, str], token: str) -> list[str]:
    """Has another process try to join as process 1; a fault if it does."""
    script = "from spmdctx import communication; communication.init(timeout_s=3)"
    own = {name: text for name, text in environ.items() if name not in ("SPMDCTX_TOKEN", "SPMDCTX_LAUNCHER")}
    if token != "-":
        own["SPMDCTX_TOKEN"] = token
    done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, timeout=PATIENCE_S)
    last = next((line for line in done.stderr.splitlines() if "CommunicationError" in line), "")
    return [] if done.returncode == 1 and last else [f"a stranger was not refused: {done.returncode} {done.stderr[-200:]}"]


def _judged(attack: Attack, processes: list[Process], codes: list[int], seconds: float, faults: list[str]) -> Result:
    losses = {int(step): value for step, value in (row.split() for row in processes[0].said("loss"))}
    others = {int(step): value for step, value in (row.split() for row in processes[1].said("loss"))}
    faults += [f"the processes differ at step {step}" for step in losses if step in others and losses[step] != others[step]][:1]
    ended = None
    if attack.dies < 0:
        expected = [0, 0]
        faults += [f"process {number} is not done" for number, process in enumerate(processes) if "done" not in process.lines]
        faults += [f"process {number} opens no file" for number, one in enumerate(processes) if "files can be opened" not in one.lines]
        faults += [f"{len(losses)} losses"] if len(losses) != NUM_STEPS else []
    else:
        expected = [KILLED if number == attack.dies else PEER_LOST for number in range(2)]
        other, killed = processes[1 - attack.dies], processes[attack.dies].said("killed")
        errors = [line for line in other.lines if line.startswith("error:")]
        clear = f"error: Process {attack.dies} is gone; process {1 - attack.dies} cannot go on without it and ends."
        faults += [] if errors == [clear] else [f"errors: {errors}"]
        ended = other.ended - float(killed[0]) if killed else LIMIT_S
        faults += [f"it took {ended:.1f} s to end"] if ended >= LIMIT_S else []
    if codes != expected:
        faults += [f"exit codes {codes}", *(line for process in processes for line in process.lines[-3:])]
    return Result(tuple(faults), losses, seconds, ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="attacks whose time and name match, such as '^meeting'")
    arguments = parser.parse_args()
    undisturbed = run(ATTACKS[0])
    print(f"{datetime.date.today()}, jax {jax.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    print("| when | attack | losses as undisturbed | seconds of the attack | end after the kill, s | faults |\n|---|---|---|---|---|---|")
    failed = 0
    for attack in (one for one in ATTACKS if re.search(arguments.only, f"{one.when}: {one.name}")):
        result = run(attack)
        same = sum(undisturbed.losses.get(step) == value for step, value in result.losses.items())
        faults = [*result.faults, *([] if same == len(result.losses) > KILL_STEP else ["other losses"])]
        failed += bool(faults)
        ended = "" if result.ended_s is None else f"{result.ended_s:.1f}"
        row = (attack.when, attack.name, f"{same} of {len(result.losses)}", f"{result.attack_s:.1f}", ended, "; ".join(faults) or "none")
        print("|", " | ".join(row), "|", flush=True)
    print(f"\n{failed} attacks had an effect")
    return int(failed or undisturbed.faults != ())


if __name__ == "__main__":
    sys.exit(main())

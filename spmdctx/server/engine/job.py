"""A job of servers and workers: it is started, scaled and waited for from one process."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from spmdctx.communication.launch.environment import xla_flags
from spmdctx.errors import TIMED_OUT, CommunicationError, message
from spmdctx.server import WORKER, scale
from spmdctx.server.engine.client import JOB, NUM_PARTS, NUM_WORKERS
from spmdctx.server.engine.display import Display
from spmdctx.server.engine.fleet import Job
from spmdctx.server.engine.own import start_scheduler
from spmdctx.server.engine.rays import NAMESPACE, answer, connect, first_line, ray
from spmdctx.server.engine.worker import Ended, Script, Worker
from spmdctx.server.state.folder import newest_state
from spmdctx.server.state.progress import Summary

_POLL_S = 0.5
_LOST_S = 30.0


class Launch(NamedTuple):
    """What is started: the job, its workers and their devices, and the script.

    `address` is that of a cluster of Ray, None for one of its own on this machine; `timeout_s` is a hard limit, or None.
    """

    job: Job
    num_workers: int
    script: Script
    devices: int = 1
    address: str | None = None
    timeout_s: float | None = None


class Outcome(NamedTuple):
    """The exit code of a job, what went wrong, empty where nothing did, and how far it came."""

    code: int
    trouble: str = ""
    summary: Summary | None = None


def run_served(launch: Launch, out: IO[str], err: IO[str]) -> Outcome:
    """Runs a script on workers, with servers, to its end.

    Raises:
        CheckpointError: the folder holds a state that is damaged.
        CommunicationError: no cluster at the address.
        UnsupportedError: Ray is not installed.
    """
    try:
        return _Running(launch, out, err).wait()
    finally:
        scale.end(Path(launch.job.folder))
        ray().shutdown()


class _Running:
    def __init__(self, launch: Launch, out: IO[str], err: IO[str]) -> None:
        self._launch, self._streams = launch, {"out": out, "err": err}
        self._start = time.monotonic()
        scale.begin(Path(launch.job.folder))
        found = newest_state(Path(launch.job.folder))
        # Parts of steps stay as the job has begun: so do the bits of its sums.
        self._num_parts = launch.num_workers if found is None else found.num_parts
        connect(launch.address, f"{NAMESPACE}-{secrets.token_hex(4)}")
        self._ray = ray()
        self._num_gpus = gpus_of_worker(os.environ, int(self._ray.cluster_resources().get("GPU", 0)), launch.num_workers, launch.devices)
        self._scheduler = start_scheduler(launch.job)
        self._runs: dict[Any, int] = {}
        self._said = self._added = 0
        self._num_workers = launch.num_workers
        self._display = Display(err)
        self._leaving: set[int] = set()
        self._has_ended = False
        for _ in range(launch.num_workers):
            self._add()

    def _add(self) -> None:
        number, self._added = self._added, self._added + 1
        environment = worker_environment(os.environ, number, self._num_workers, self._launch.devices)
        environment[NUM_PARTS] = str(self._num_parts)
        environment[JOB] = told(self._launch.job)
        resources = {"worker": 0.001} if self._ray.cluster_resources().get("worker") else {}
        actor = self._ray.remote(Worker).options(
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            num_gpus=self._num_gpus,
            resources=resources,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        run = actor.remote(number).run.remote(self._launch.script)
        self._runs[run] = number

    def wait(self) -> Outcome:
        """Returns how the job has ended."""
        limit, failed = self._launch.timeout_s, Outcome(0)
        while self._runs and not failed.code:
            ready, _ = self._ray.wait(list(self._runs), num_returns=1, timeout=0)
            self._write(0 if ready else _POLL_S)
            for run in ready:
                failed = self._ended(run, self._runs.pop(run))
            if not ready:
                self._fit()
                self._display.show(self._summary, time.monotonic())
            if self._has_ended and self._runs and self._is_waiting_for_lost():
                break
            if limit is not None and time.monotonic() - self._start > limit:
                failed = Outcome(TIMED_OUT, f"The job took more than {limit:g} s, and was stopped.")
        self._write(0)
        return failed._replace(summary=self._summary())

    def _ask(self, call: Any) -> Any:
        return answer(call, "The scheduler")

    def _summary(self) -> Summary | None:
        try:
            found: Summary = self._ask(self._scheduler.summary.remote())
        except CommunicationError:
            return None
        return found

    def _ended(self, run: Any, number: int) -> Outcome:
        try:
            ended: Ended = self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            self._ask(self._scheduler.lost.remote(number))
            if self._runs or self._has_ended:
                return Outcome(0)
            fix = "look at `ray status`, and at Ray's logs (session_latest/logs)"
            return Outcome(1, message(f"Worker {number} was lost, and cannot be started again.", got=first_line(error), fix=fix))
        self._has_ended |= number not in self._leaving
        if not ended.code:
            return Outcome(0)
        failure = self._ask(self._scheduler.failure.remote())
        return Outcome(ended.code, failure or f"Worker {number} ended with exit code {ended.code}.")

    def _fit(self) -> None:
        """Goes on with other numbers of servers and workers if somebody has asked; workers with the lowest numbers stay."""
        wanted = scale.taken(Path(self._launch.job.folder))
        if wanted is None:
            return
        if wanted.servers is not None:
            self._ask(self._scheduler.scale.remote(wanted.servers))
        if wanted.workers is not None:
            self._fit_workers(wanted.workers)

    def _fit_workers(self, wanted: int) -> None:
        self._num_workers = wanted
        staying = sorted(set(self._runs.values()) - self._leaving)
        for _ in range(wanted - len(staying)):
            self._add()
        for number in staying[wanted:]:
            self._leaving.add(number)
            self._scheduler.remove_worker.remote(number)

    def _is_waiting_for_lost(self) -> bool:
        """Returns whether all workers that have not ended are lost, and Ray does not start them again."""
        silence = self._ask(self._scheduler.silence.remote())
        return all(silence.get(number, 0) > _LOST_S for number in self._runs.values())

    def _write(self, seconds: float) -> None:
        rows = self._ask(self._scheduler.said.remote(self._said, seconds))
        self._said += len(rows)
        if rows:
            self._display.hide()
        width = len(str(self._added - 1))
        for worker, name, line in rows:
            self._streams[name].write(f"[{worker:{width}}] {line}\n")
            self._streams[name].flush()


def told(job: Job) -> str:
    """Returns a job as the options of the parameter server that would ask for it."""
    return json.dumps({"update_mode" if name == "mode" else name: value for name, value in job._asdict().items()})


def gpus_of_worker(environ: Mapping[str, str], num_gpus: int, num_workers: int, devices: int) -> int:
    """Returns how many GPUs of the cluster each worker has; none where JAX is told to use CPUs.

    Raises:
        CommunicationError: the cluster has GPUs, but too few; Ray would wait for more.
    """
    if num_gpus == 0 or environ.get("JAX_PLATFORMS", "") == "cpu":
        return 0
    if num_gpus < num_workers * devices:
        raise CommunicationError(
            "The cluster has fewer GPUs than the workers need.",
            got=f"{num_gpus}",
            need=f"{num_workers} workers with {devices} each",
            fix="fewer --workers or --devices-per-process, or JAX_PLATFORMS=cpu",
        )
    return devices


def worker_environment(environ: Mapping[str, str], number: int, count: int, devices: int) -> dict[str, str]:
    """Returns what a worker's environment has of its own."""
    return {
        WORKER: str(number),
        NUM_WORKERS: str(count),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": xla_flags(environ),
        **{name: environ[name] for name in ("JAX_PLATFORMS", "JAX_ENABLE_X64", "PYTHONPATH") if name in environ},
    }

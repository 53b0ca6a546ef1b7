"""Processes that are started one by one with MindSpore's MS_ROLE: the scheduler, servers, and workers, each by the same script."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from spmdctx.errors import CommunicationError, ContextError, shown
from spmdctx.server import WORKER, node, scale
from spmdctx.server.engine.client import JOB, NUM_PARTS, NUM_WORKERS
from spmdctx.server.engine.display import Display
from spmdctx.server.engine.fleet import Job
from spmdctx.server.engine.job import told
from spmdctx.server.engine.own import start_scheduler
from spmdctx.server.engine.rays import SCHEDULER, answer, connect, ray, use_own_tokens, use_tokens_of
from spmdctx.server.state.folder import newest_state
from spmdctx.server.state.presence import BEAT_S

ROLES = ("MS_SCHED", "MS_PSERVER", "MS_WORKER")
_NEEDED = ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_SERVER_NUM", "MS_WORKER_NUM")
_POLL_S = 0.5
_PATIENCE_S = 300.0
_LOST_S = 30.0
_GCS_S = "5"


class Role(NamedTuple):
    """What the variables of a process say: its role, where the scheduler is, how many servers and workers there are, and its name."""

    name: str
    host: str
    port: int
    num_servers: int
    num_workers: int
    node: str

    @property
    def address(self) -> str:
        """Of the cluster of Ray that the scheduler starts."""
        return f"{self.host}:{self.port}"


def role_of(environ: Mapping[str, str]) -> Role | None:
    """Returns the role of a process; None without MS_ROLE, or in a worker that `spmdctx launch` has started.

    Raises:
        ContextError: a variable that is missing or bad.
    """
    if "MS_ROLE" not in environ or WORKER in environ:
        return None
    if environ["MS_ROLE"] not in ROLES:
        raise ContextError("MS_ROLE is no role of a parameter server.", got=shown(environ["MS_ROLE"]), need=", ".join(ROLES))
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        fix = "set them in each process; or start all at once, without MS_ROLE: spmdctx launch --servers N --workers N SCRIPT"
        raise ContextError("A process with MS_ROLE needs more variables.", got=f"no {', '.join(missing)}", fix=fix)
    _, port, servers, workers = (_number(name, environ[name]) if name != _NEEDED[0] else 0 for name in _NEEDED)
    return Role(environ["MS_ROLE"], environ["MS_SCHED_HOST"], port, servers, workers, environ.get("MS_NODE_ID", ""))


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ContextError(f"{name} is a number from 1.", got=shown(text))
    return int(text)


def take_role(role: Role, job: Job) -> None:
    """Does what a role asks for: a worker joins the job, and goes on with its script; scheduler and server end with the job.

    Args:
        role: of this process.
        job: what the context says; the numbers of servers and workers are the role's.

    Raises:
        CommunicationError: the scheduler is not there, or another one has its place.
        ContextError: machines that differ have no folder in common.
        SystemExit: the job is over, in the scheduler and in servers.
    """
    if role.name == "MS_WORKER":
        _join(role)
    elif role.name == "MS_PSERVER":
        _await_scheduler(role)
        with Node(role, ["--address", role.address, "--resources", json.dumps({"ps": 1})]) as own:
            own.wait()
        raise SystemExit(0)
    else:
        _check_folder(role, job)
        folder = job.folder or tempfile.mkdtemp(prefix="spmdctx-ps-")
        raise SystemExit(_schedule(role, job._replace(num_servers=role.num_servers, folder=folder)))


def _check_folder(role: Role, job: Job) -> None:
    if not job.folder and not ip_of(role.host).startswith("127."):
        raise ContextError(
            "On several machines, states need a folder that all of them see.",
            got=f"MS_SCHED_HOST={role.host}",
            fix='spmdctx.set_ps_context(folder="FOLDER")',
        )


def _schedule(role: Role, job: Job) -> int:
    """Runs the cluster and the scheduler until the job is over; returns the exit code."""
    ray()
    use_own_tokens()
    folder = Path(job.folder)
    options = ["--head", "--node-ip-address", ip_of(role.host), "--port", str(role.port), "--include-dashboard=false"]
    scale.begin(folder)
    try:
        with Node(role, options) as own:
            own.await_port()
            connect(role.address)
            _await(lambda: ray().cluster_resources().get("ps", 0) >= role.num_servers, f"{role.num_servers} processes with MS_PSERVER", own)
            trouble = _watched(start_scheduler(job), role, folder)
            ray().shutdown()
    finally:
        scale.end(folder)
    if trouble:
        sys.stderr.write(f"error: {trouble}\n")
    return int(bool(trouble))


def _watched(scheduler: Any, role: Role, folder: Path) -> str:
    """Waits until all workers have ended; returns why the job cannot go on, empty if it could."""
    display = Display(sys.stderr)
    while True:
        if (wanted := scale.taken(folder)) is not None and wanted.servers is not None:
            answer(scheduler.scale.remote(wanted.servers), "The scheduler")
        roll = answer(scheduler.roll.remote(), "The scheduler")
        if roll.failure:
            display.hide()
            time.sleep(_POLL_S)  # workers that wait learn of it
            return str(roll.failure)
        has_ended = roll.num_begun > len(roll.silence)
        is_lost = all(seconds > (_LOST_S if has_ended else _PATIENCE_S) for seconds in roll.silence.values())
        if roll.num_begun >= role.num_workers and is_lost:
            display.hide()
            return "" if has_ended else "All workers are lost."
        display.show(lambda: answer(scheduler.summary.remote(), "The scheduler"), time.monotonic())
        time.sleep(_POLL_S)


def _join(role: Role) -> None:
    """Makes this process a worker of the job."""
    _await_scheduler(role)
    if not _is_here(role.host):
        Node(role, ["--address", role.address, "--resources", json.dumps({"worker": 1})]).end_with_process()
    connect(role.address)
    scheduler = _await(_found_scheduler, "the scheduler")
    life = str(ray().get_runtime_context().get_worker_id())
    number = answer(scheduler.join.remote(role.node, life), "The scheduler")
    job: Job = answer(scheduler.job.remote(), "The scheduler")
    found = newest_state(Path(job.folder))
    parts = role.num_workers if found is None else found.num_parts
    os.environ.update({WORKER: str(number), NUM_WORKERS: str(role.num_workers), NUM_PARTS: str(parts), JOB: told(job)})
    threading.Thread(target=_beat, args=(scheduler, number, life), daemon=True).start()
    atexit.register(_leave, scheduler, number)


def _found_scheduler() -> Any:
    try:
        return ray().get_actor(SCHEDULER)
    except ValueError:  # Ray's, of a name that nobody has
        return None


def _beat(scheduler: Any, number: int, life: str) -> None:
    while ray().is_initialized():
        scheduler.beat.remote(number, life)
        time.sleep(BEAT_S)


def _leave(scheduler: Any, number: int) -> None:
    with suppress(CommunicationError):  # the job may be over
        answer(scheduler.lost.remote(number), "The scheduler")
    ray().shutdown()


def _await_scheduler(role: Role) -> None:
    """Waits until the scheduler's cluster is there, and takes the token that it asks for."""
    ray()
    _await(lambda: _listens(role), f"a process with MS_ROLE=MS_SCHED at {role.address}")
    if _is_here(role.host):
        use_own_tokens()
    else:
        use_tokens_of(role.address)


def _await(found: Any, what: str, own: Node | None = None) -> Any:
    """Waits for something.

    Raises:
        CommunicationError: it does not come.
    """
    end = time.monotonic() + _PATIENCE_S
    while not (value := found()):
        if own is not None:
            own.check()
        if time.monotonic() > end:
            raise CommunicationError("A process of the parameter server has not come.", need=what, got=f"none in {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return value


def _listens(role: Role) -> bool:
    try:
        socket.create_connection((role.host, role.port), 1).close()
    except OSError:
        return False
    return True


def ip_of(host: str) -> str:
    """Returns the address of a machine by its name.

    Raises:
        ContextError: nobody knows it.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ContextError("MS_SCHED_HOST names no machine.", got=f"{host}: {error}") from error


def _is_here(host: str) -> bool:
    """Returns whether an address is one of this machine."""
    with socket.socket() as own:
        try:
            own.bind((ip_of(host), 0))
        except OSError:
            return False
    return True


class Node:
    """A node of Ray's that runs beside this process, and ends with it.

    Args:
        role: of this process.
        options: of `ray start`.
    """

    def __init__(self, role: Role, options: Sequence[str]) -> None:
        self._role = role
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed with the node
        command = [sys.executable, node.__file__, sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]
        environ = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": _GCS_S}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, env=environ, start_new_session=True
        )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end_with_process(self) -> None:
        """Ends the node when this process ends."""
        atexit.register(self.end)

    def end(self) -> None:
        """Ends the node."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._said.close()

    def wait(self) -> None:
        """Waits until the node ends, which it does with the cluster."""
        self._process.wait()

    def await_port(self) -> None:
        """Waits until the scheduler's node listens.

        Raises:
            CommunicationError: it does not.
        """
        _await(lambda: _listens(self._role), "Ray's head", self)

    def check(self) -> None:
        """Raises an error if the node has ended.

        Raises:
            CommunicationError: it has.
        """
        if self._process.poll() is not None:
            self._said.seek(0)
            lines = [line for line in self._said.read().splitlines() if line.strip()]
            raise CommunicationError("Ray cannot be started.", where=self._role.address, got=lines[-1] if lines else "nothing")

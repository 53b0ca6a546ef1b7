"""Ray, which is an extra: nothing of it is imported before a parameter server is asked for."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spmdctx.errors import CommunicationError, SpmdctxError, UnsupportedError

NAMESPACE = "spmdctx"
SCHEDULER = "spmdctx-scheduler"
_LOOK_S = 1.0
_MODE = "RAY_AUTH_MODE"
_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
_PROBE_S = 60.0


def ray() -> Any:
    """Returns the module.

    Raises:
        UnsupportedError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        importlib.import_module("flatbuffers")
        return importlib.import_module("ray")
    except ImportError as error:
        raise UnsupportedError(
            "A parameter server runs on Ray, which is not installed.", got=str(error), fix="pip install 'spmdctx[ps]'"
        ) from error


def answer(call: Any, who: str) -> Any:
    """Returns what an actor answers.

    Args:
        call: the answer to come.
        who: whose it is, such as "The scheduler".

    Raises:
        CommunicationError: the actor is gone or cannot be reached, or it has failed by an error that is none of ours.
        SpmdctxError: that the actor has raised.
    """
    own = ray()
    try:
        return own.get(call)
    except own.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SpmdctxError):
            raise cause from error
        raise CommunicationError(f"{who} of the parameter server has failed.", got=f"{type(cause).__name__}: {cause}") from error
    except own.exceptions.ActorUnavailableError as error:
        raise CommunicationError(
            f"{who} of the parameter server cannot be reached.",
            got=type(error).__name__,
            fix="look at the network and at `ray status`; then submit the job again: it goes on from its folder",
        ) from error
    except own.exceptions.RayError as error:
        raise CommunicationError(
            f"{who} of the parameter server is gone.", got=type(error).__name__, fix="submit the job again: it goes on from its folder"
        ) from error


def cause_of(error: Exception) -> str:
    """Returns the text of an error, or of the one that an actor has raised."""
    return str(getattr(error, "cause", None) or error)


def use_tokens_of(address: str) -> None:
    """Has this process and its children take the token of this machine to a cluster that does not answer without one.

    `ray start` asks for a token where the machine has one, which each local cluster of Ray leaves there. The environment may say
    RAY_AUTH_MODE, token or disabled, in place of this look.
    """
    if _MODE not in os.environ and has_token(os.environ):
        _set_mode("disabled" if _answers(address) else "token")


def use_own_tokens() -> None:
    """Has this process and its children take the token of this machine to a cluster that they start by `ray start`, if there is one."""
    if _MODE not in os.environ:
        _set_mode("token" if has_token(os.environ) else "disabled")


def _set_mode(mode: str) -> None:
    os.environ[_MODE] = mode
    inside = sys.modules.get("ray._raylet")
    if inside is not None and hasattr(inside, "Config"):
        inside.Config.initialize("")  # Ray has read the environment when it was imported


def has_token(environ: Mapping[str, str]) -> bool:
    """Returns whether Ray finds a token."""
    path = environ.get("RAY_AUTH_TOKEN_PATH", os.path.join(os.path.expanduser("~"), ".ray", "auth_token"))
    return "RAY_AUTH_TOKEN" in environ or os.path.isfile(path)


def _answers(address: str) -> bool:
    """Returns whether a cluster answers a process that has no token; it is another one, since Ray tries for long and says so."""
    environ = {**os.environ, _MODE: "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    with suppress(subprocess.TimeoutExpired):
        run = subprocess.run([sys.executable, "-c", _PROBE, address], env=environ, capture_output=True, timeout=_PROBE_S, check=False)
        return run.returncode == 0
    return False


def first_line(error: BaseException) -> str:
    """Returns the type of an error, and its first line: those of Ray have many."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def connect(address: str | None = None, namespace: str = NAMESPACE, resources: dict[str, float] | None = None) -> bool:
    """Connects this process to Ray: to the cluster at an address, to the one that this process belongs to, or to a new local one.

    The names of actors count in a namespace, of which each job has its own. Returns whether it was not connected before.

    Raises:
        CommunicationError: no cluster is there, or none can be started.
    """
    if address is not None:
        use_tokens_of(address)
    own = ray()
    if own.is_initialized():
        return False
    options: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"include_dashboard": False, "num_cpus": max(4, os.cpu_count() or 1), "object_store_memory": _STORE_BYTES}
        options |= {"resources": resources} if resources else {}
        # Actors have environments of their own, so that processes which Ray starts ahead would serve none of them.
        options["_system_config"] = {"prestart_worker_first_driver": False}
    with warnings.catch_warnings():
        # Ray starts its processes by a fork that runs another program at once.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        _silence()
        try:
            own.init(address=address or "local", **options)
        except (OSError, RuntimeError, ValueError, own.exceptions.RayError) as error:
            got = f"{type(error).__name__}: {error}"
            if address is None:
                fix = "free memory and disk space where Ray has its files (RAY_TMPDIR, else TMPDIR or /tmp)"
                raise CommunicationError("Ray cannot be started.", got=got, fix=fix) from error
            raise CommunicationError("There is no cluster of Ray.", got=f"{address}: {got}", fix="ray start --head") from error
    return True


def join_job(scheduler: str = SCHEDULER) -> tuple[Any, str]:
    """Returns the scheduler of this actor's job, and what tells this process from the next one of the actor.

    Ray does not make arguments of a constructor again but for the smallest, so the scheduler is found by its name.
    """
    own = ray()
    _end_with_ray()
    return found_scheduler(scheduler), str(own.get_runtime_context().get_worker_id())


def found_scheduler(name: str = SCHEDULER) -> Any:
    """Returns the scheduler of a name.

    Raises:
        CommunicationError: there is none any more.
    """
    try:
        return ray().get_actor(name)
    except ValueError as error:
        fix = "submit the job again: it goes on from its folder"
        raise CommunicationError("The scheduler of the parameter server is gone.", got=str(error), fix=fix) from error


def _end_with_ray() -> None:
    """Ends this process when the one of Ray that has started it is gone; without it, one that is busy goes on for a while."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _silence() -> None:
    """Keeps what Ray prints of processes that are lost out of the output of a job, which outlives them; Ray has no option for it."""
    inside = importlib.import_module("ray._private.worker")
    if hasattr(inside, "print_to_stdstream"):
        inside.print_to_stdstream = lambda *_, **__: None  # type: ignore[attr-defined]  # it is private


_STORE_BYTES = 512 << 20

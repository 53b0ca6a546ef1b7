"""A job of one process, which is its only worker and starts its servers itself."""

from __future__ import annotations

import atexit
import gc
import importlib
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from spmdctx.errors import CommunicationError, UnsupportedError
from spmdctx.server import scale
from spmdctx.server.engine.fleet import Job
from spmdctx.server.engine.rays import SCHEDULER, connect, ray
from spmdctx.server.engine.scheduler import Scheduler
from spmdctx.server.state.folder import newest_state


def start_scheduler(job: Job, name: str = SCHEDULER) -> Any:
    """Starts the scheduler of a job beside this process: a node that is lost elsewhere does not take it along."""
    own = ray()
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(own.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 1000, "name": name, "scheduling_strategy": here}
    return own.remote(Scheduler).options(**options).remote(job, name)


def start_own(job: Job, owner: object) -> Any:
    """Starts a job of this process alone, which ends with an object or with the process; returns its scheduler.

    Args:
        job: what it is told; without a folder it has a temporary one, which is removed when this process ends.
        owner: the object.

    Raises:
        CheckpointError: the folder holds a state that is damaged.
        CommunicationError: another job runs in the folder, or Ray cannot be started.
        UnsupportedError: Ray is not installed, or this process has a job in the folder.
    """
    ray()
    folder = Path(job.folder or tempfile.mkdtemp(prefix="spmdctx-ps-"))
    _take(folder)
    try:
        newest_state(folder)
        is_ours = connect()
        scheduler = start_scheduler(job._replace(folder=str(folder)), f"{SCHEDULER}-{secrets.token_hex(4)}")
    except BaseException:
        scale.release(folder)
        raise
    if not job.folder:
        atexit.register(_remove, folder, is_ours)
    weakref.finalize(owner, _end, scheduler, folder)
    return scheduler


def _take(folder: Path) -> None:
    try:
        scale.take(folder)
    except CommunicationError:
        # The job of a step that nobody has any more ends with it.
        gc.collect()
        if scale.has_taken(folder):
            raise UnsupportedError(
                "This process has a job in this folder already, whose servers hold the state of another step, or of other shapes.",
                where=str(folder),
                fix="delete that step and its state first (del step, state), or name another folder",
            ) from None
        scale.take(folder)


def _end(scheduler: Any, folder: Path) -> None:
    """Ends a job: the servers end with the scheduler, which has started them."""
    if ray().is_initialized():
        ray().kill(scheduler)
    scale.release(folder)


def _remove(folder: Path, is_ours: bool) -> None:
    """Removes a temporary folder at the end of this process, once nobody writes to it."""
    if is_ours:
        ray().shutdown()
    shutil.rmtree(folder, ignore_errors=True)

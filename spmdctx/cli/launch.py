"""`spmdctx launch`: runs a script as several processes on this machine, or with servers on a cluster."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from spmdctx.cli.output import Output
from spmdctx.communication.launch import Job, run_job
from spmdctx.context.servers import DEFAULT_SERVERS
from spmdctx.errors import ContextError
from spmdctx.server.engine.fleet import Job as ServedJob
from spmdctx.server.engine.job import Launch, run_served
from spmdctx.server.engine.worker import Script
from spmdctx.server.scale import scale
from spmdctx.server.state.folder import has_progress


def launch(arguments: argparse.Namespace, output: Output) -> int:
    """Runs a script as several processes; returns the exit code of the first one that failed, or 124 after a timeout."""
    if arguments.scale is not None or (arguments.servers is None and arguments.workers is None):
        _check_idle(arguments)
    if arguments.scale is not None:
        return _scale(arguments, output)
    if arguments.script is None:
        raise ContextError("launch needs a script.", need="spmdctx launch -n N SCRIPT, or --servers N --workers N SCRIPT")
    if arguments.servers is not None or arguments.workers is not None:
        return _launch_served(arguments, output)
    if arguments.num_processes is None:
        raise ContextError("launch needs a number of processes.", need="-n N, or --servers N --workers N")
    script = ["-m", arguments.script] if arguments.module else [arguments.script]
    job = Job([*script, *arguments.arguments], arguments.num_processes, arguments.devices_per_process, arguments.timeout)
    outcome = run_job(job, sys.stderr if output.as_json else None)
    if outcome.trouble:
        sys.stderr.write(f"error: {outcome.trouble}\n")
    output.finish_with("launch", {"exit_code": outcome.code, "trouble": outcome.trouble})
    return outcome.code


def _check_idle(arguments: argparse.Namespace) -> None:
    """Refuses options of a job with servers where none is started."""
    found = [f"--{name.replace('_', '-')}" for name in _OF_JOBS if getattr(arguments, name) is not None]
    if found:
        raise ContextError("Only a job with servers takes these options.", got=", ".join(found), need="--servers N --workers N SCRIPT")


_OF_JOBS = ("mode", "max_staleness", "save_every", "folder", "address")


def _scale(arguments: argparse.Namespace, output: Output) -> int:
    """Has a job that runs go on with other numbers of servers and workers."""
    if arguments.script is not None or (arguments.servers is None and arguments.workers is None):
        raise ContextError("--scale needs numbers, and no script.", need="spmdctx launch --scale FOLDER --servers N --workers N")
    scale(arguments.scale, servers=arguments.servers, workers=arguments.workers)
    output.finish_with("launch", {"exit_code": 0, "folder": os.path.abspath(arguments.scale)})
    return 0


def _launch_served(arguments: argparse.Namespace, output: Output) -> int:
    """Runs a script on workers, with servers."""
    if arguments.num_processes is not None or None in (arguments.servers, arguments.workers):
        raise ContextError("A job with servers needs both numbers, and no -n.", need="--servers N --workers N")
    if arguments.address is not None and arguments.folder is None:
        raise ContextError("On a cluster, states need a folder that all its machines see.", need="--folder FOLDER")
    if arguments.max_staleness is not None and arguments.mode != "async":
        raise ContextError("Workers that wait for each other are never late.", got="--max-staleness", need="--mode async")
    folder = os.path.abspath(arguments.folder) if arguments.folder else tempfile.mkdtemp(prefix="spmdctx-ps-")
    default = DEFAULT_SERVERS
    late, every = (
        own if given is None else given
        for given, own in ((arguments.max_staleness, default.max_staleness), (arguments.save_every, default.save_every))
    )
    job = ServedJob(arguments.servers, arguments.mode or default.update_mode, late, every, folder)
    script = Script(arguments.script, arguments.arguments, arguments.module, os.getcwd())
    started = Launch(job, arguments.workers, script, arguments.devices_per_process, arguments.address, arguments.timeout)
    try:
        outcome = run_served(started, sys.stderr if output.as_json else sys.stdout, sys.stderr)
    except BaseException:
        _tidy(arguments, folder)
        raise
    if outcome.trouble:
        sys.stderr.write(f"error: {outcome.trouble}\n")
    _tidy(arguments, folder, is_done=not outcome.code)
    done = outcome.summary
    staleness = {str(late): count for late, count in sorted(done.staleness.items())} if done is not None else {}
    updates = done.version if done is not None else 0
    output.finish_with(
        "launch", {"exit_code": outcome.code, "trouble": outcome.trouble, "folder": folder, "updates": updates, "staleness": staleness}
    )
    return outcome.code


def _tidy(arguments: argparse.Namespace, folder: str, *, is_done: bool = False) -> None:
    """Removes a temporary folder, unless a job that has failed can go on from what is in it."""
    if arguments.folder is None and (is_done or not has_progress(Path(folder))):
        shutil.rmtree(folder, ignore_errors=True)
    elif arguments.folder is None:
        sys.stderr.write(f"The job can be submitted again with --folder {folder}\n")

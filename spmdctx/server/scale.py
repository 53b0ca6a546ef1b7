"""Asks a job that runs for other numbers of servers and workers: by a file in its folder, which whoever has launched it looks for."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from spmdctx.checkpoint.files import read_json, write_json
from spmdctx.errors import CheckpointError, CommunicationError, ContextError

_JOB, _REQUEST, _LOCK = "job.json", "scale.json", "job.lock"
_locks: dict[Path, int] = {}
_PATIENCE_S, _POLL_S = 20.0, 0.05


class Wanted(NamedTuple):
    """The numbers that somebody has asked for; None where they stay."""

    servers: int | None
    workers: int | None


def scale(folder: str | os.PathLike[str], *, servers: int | None = None, workers: int | None = None) -> None:
    """Has a job that runs go on with other numbers of servers and workers; returns when the job has taken note.

    In "sync" the job comes to the same bits: parts of its steps stay as they were when it began.

    Args:
        folder: in which the job saves its states.
        servers: after the present step; None leaves them.
        workers: those with the lowest numbers stay, the others leave at their next step; None leaves them.

    Raises:
        ContextError: a number that is less than 1.
        CommunicationError: no job runs in the folder.
        CheckpointError: the request cannot be written.
    """
    for name, number in (("servers", servers), ("workers", workers)):
        if number is not None and number < 1:
            raise ContextError("A job has at least one of each.", got=f"{name}={number}", need=f"{name} >= 1")
    place = Path(folder)
    request = place / _REQUEST
    if not (place / _JOB).is_file():
        raise CommunicationError("No job runs here.", where=str(folder), got=f"no {_JOB}", fix="name the --folder of a job that runs")
    write_json(request, {"servers": servers, "workers": workers})
    end = time.monotonic() + _PATIENCE_S
    while request.exists():
        if time.monotonic() > end:
            request.unlink(missing_ok=True)
            raise CommunicationError("The job that ran here is gone.", where=str(folder), got=f"no answer in {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


def begin(folder: Path) -> None:
    """Says that a job runs in a folder, whose earlier requests are void; the folder is this process's until `end`, or until it ends.

    Raises:
        CommunicationError: another job runs there.
        CheckpointError: the folder cannot be written.
    """
    take(folder)
    (folder / _REQUEST).unlink(missing_ok=True)
    write_json(folder / _JOB, {"pid": os.getpid()})


def take(folder: Path) -> None:
    """Makes a folder this process's until `release`, or until it ends.

    Raises:
        CommunicationError: another job runs there, maybe one of this process.
        CheckpointError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError("The folder of the job cannot be written.", where=str(folder), got=error.strerror or str(error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CommunicationError(
            "Another job runs in this folder.", where=str(folder), fix="name another --folder, or wait for its end"
        ) from error
    except OSError:  # the file system has no locks
        pass
    _locks[folder.resolve()] = descriptor


def has_taken(folder: Path) -> bool:
    """Returns whether a folder is this process's."""
    return folder.resolve() in _locks


def release(folder: Path) -> None:
    """Gives a folder back."""
    descriptor = _locks.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def end(folder: Path) -> None:
    """Says that the job has ended, if it had begun."""
    if has_taken(folder):
        with suppress(OSError):
            (folder / _JOB).unlink(missing_ok=True)
        release(folder)


def taken(folder: Path) -> Wanted | None:
    """Returns what somebody has asked for, once; None if nobody has, or by a file that says nothing of it."""
    request = folder / _REQUEST
    if not request.exists():
        return None
    try:
        body = read_json(request)
    except CheckpointError:
        body = {}
    with suppress(OSError):
        request.unlink(missing_ok=True)
    servers, workers = (value if type(value) is int and value > 0 else None for value in (body.get("servers"), body.get("workers")))
    return Wanted(servers, workers)

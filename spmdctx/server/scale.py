"""Asks a job that runs for other numbers of servers and workers: by a file in its folder, which whoever has launched it looks for."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from spmdctx.checkpoint.files import read_json, write_json
from spmdctx.errors import CheckpointError, CommunicationError, ContextError

_JOB, _REQUEST = "job.json", "scale.json"
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
    """Says that a job runs in a folder, whose earlier requests are void.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    (folder / _REQUEST).unlink(missing_ok=True)
    write_json(folder / _JOB, {"pid": os.getpid()})


def end(folder: Path) -> None:
    """Says that the job has ended."""
    with suppress(OSError):
        (folder / _JOB).unlink(missing_ok=True)


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

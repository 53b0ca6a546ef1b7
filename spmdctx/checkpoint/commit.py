"""Files of one folder that appear together: a checkpoint in files per rank is never a mixture of two saves, whenever a process is killed.

Each file is first written beside its place, under another name. When all are there, a list of them is written: from then on, readers take
the new files. These get their names, and the list is removed. Where a save ended in between, the next one does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmdctx.checkpoint.files import read_json, write_json
from spmdctx.errors import CheckpointError, FileError
from spmdctx.wording.files import locked_folder, making_folder, sync_folder

_LIST, _NEXT, _NAMES = ".commit.json", ".next", "names"


def waiting_place(root: Path, name: str) -> Path:
    """Returns where a file lies until all are written; `name` is its path below the folder."""
    place = root / name
    return place.with_name(f".{place.name}{_NEXT}")


def waiting(root: Path) -> dict[str, Path]:
    """Returns the files that a save has completed but not renamed, by their paths below the folder.

    Raises:
        CheckpointError: the list of them is damaged.
    """
    if not (root / _LIST).exists():
        return {}
    names = read_json(root / _LIST).get(_NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) and _is_below(name) for name in names):
        raise CheckpointError("The list of a save's files is damaged.", where=str(root / _LIST), need="paths below the folder")
    places = {name: waiting_place(root, name) for name in names}
    return {name: place for name, place in places.items() if place.is_file()}


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


@contextmanager
def together(root: Path, names: Sequence[str], own: Sequence[str] | None = None) -> Iterator[None]:
    """Gives the files that are written inside their names, all of them or none; what is written there goes to `waiting_place`.

    Savers of other jobs wait for each other.

    Args:
        root: the folder.
        names: the files, as paths below the folder.
        own: those that this process writes, where all processes of a job enter this together; None where one does by itself.

    Raises:
        CheckpointError: a file of this process or of another one cannot be written; all files are then as they were.
    """
    if own is None:
        with _one_at_a_time(root):
            _finish_former(root)
            with _named(root, names, names, is_first=True, is_alone=True):
                yield
        return
    is_first = jax.process_index() == 0
    with _one_at_a_time(root) if is_first else nullcontext():
        if is_first:
            _finish_former(root)
        _meet(f"begins {root}")
        with _named(root, names, own, is_first=is_first, is_alone=jax.process_count() == 1):
            yield


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Makes the folder and locks it, on file systems that can; removes it again where nothing was written."""
    try:
        with making_folder(root), locked_folder(root):
            yield
    except FileError as error:
        raise CheckpointError("The folder cannot be written.", where=str(root), got=str(error.strerror)) from error


@contextmanager
def _named(root: Path, names: Sequence[str], own: Sequence[str], *, is_first: bool, is_alone: bool) -> Iterator[None]:
    error: CheckpointError | None = None
    try:
        try:
            yield
        except CheckpointError as failed:
            error = failed
        if error is not None and is_alone:
            raise error
        if not is_alone and _any(error is not None):
            raise error or CheckpointError("Another process could not write its files of the checkpoint.", where=str(root))
        if is_first:
            write_json(root / _LIST, {_NAMES: list(names)})
        if not is_alone:
            _meet(f"lists {root}")
    except BaseException:
        _remove(waiting_place(root, name) for name in own)
        raise
    _rename(root, own)
    if not is_alone:
        _meet(f"renames {root}")
    if is_first:
        _remove_list(root)


def _finish_former(root: Path) -> None:
    """Renames what a save has completed before it was killed; removes what it has not."""
    if (root / _LIST).exists():
        _rename(root, list(waiting(root)))
        _remove_list(root)
    _remove(path for folder in (root, *root.glob("rank_*")) for path in folder.glob(f".*{_NEXT}"))


def _rename(root: Path, names: Sequence[str]) -> None:
    try:
        for name in names:
            waiting_place(root, name).replace(root / name)
    except OSError as error:
        got = error.strerror or str(error)
        raise CheckpointError("A file of the checkpoint cannot be renamed.", where=str(root), got=got) from error
    for folder in {(root / name).parent for name in names}:
        sync_folder(folder)


def _remove_list(root: Path) -> None:
    try:
        (root / _LIST).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError("The list of a save's files cannot be removed.", where=str(root / _LIST), got=str(error.strerror)) from error


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()
        with suppress(OSError):
            path.parent.rmdir()  # made for it, if nothing else lies there


def _meet(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"spmdctx checkpoint {name}")


def _any(flag: bool) -> bool:
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))

"""Files of one folder that appear together: a checkpoint in files per rank is never a mixture of two saves, whenever a process is killed.

Each file is first written beside its place, under another name. When all are there, a list of them is written: from then on, readers take
the new files. These get their names, and the list is removed. Where a save ended in between, the next one does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
    is_alone = own is None or jax.process_count() == 1
    is_first = is_alone or jax.process_index() == 0
    with ExitStack() as stack:
        with _agreeing(root, is_alone):
            if is_first:
                stack.enter_context(_one_at_a_time(root))
                _finish_former(root)
        try:
            with _agreeing(root, is_alone):
                yield
            with _agreeing(root, is_alone):
                if is_first:
                    write_json(root / _LIST, {_NAMES: list(names)})
        except BaseException:
            if not (root / _LIST).exists():  # else the next save does the rest
                _remove(waiting_place(root, name) for name in (names if own is None else own))
            raise
        with _agreeing(root, is_alone):
            _rename(root, names if own is None else own)
        if is_first:
            _remove_list(root)


@contextmanager
def _agreeing(root: Path, is_alone: bool) -> Iterator[None]:
    """Meets the other processes of the job behind what is done inside.

    Raises:
        CheckpointError: it failed here or in another process.
    """
    error: CheckpointError | None = None
    try:
        yield
    except CheckpointError as failed:
        error = failed
    is_failed = error is not None if is_alone else bool(np.any(multihost_utils.process_allgather(np.bool_(error is not None))))
    if is_failed:
        raise error or CheckpointError("Another process could not write its files of the checkpoint.", where=str(root))


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Makes the folder and locks it, on file systems that can; removes it again where nothing was written."""
    try:
        with making_folder(root), locked_folder(root):
            yield
    except FileError as error:
        raise CheckpointError("The folder cannot be written.", where=str(root), got=str(error.strerror)) from error


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

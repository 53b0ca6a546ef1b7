"""Stores a state with orbax: its arrays, other contents, and checksums of every file, all in one commit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from spmdctx.checkpoint.files import CONTENTS, Seal, files_below, read_json, seal_all, write_json
from spmdctx.checkpoint.parts.handlers import with_parts
from spmdctx.checkpoint.tree import Stored
from spmdctx.errors import CheckpointError, shown

SEALS = "files.json"
"""The file of all seals, in the folder `state` of a step, besides orbax's arrays and the file of other contents."""

_PROCESS_FOLDER = "ocdbt.process_"
_GLOB = re.compile(r"[*?\[\]]")
_ARRAY_METADATA = (b".zarray", b"zarr.json")


class StateHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # orbax has no types
    """Stores arrays as orbax's PyTreeCheckpointHandler does; each process seals the files that it writes, process 0 the rest."""

    def __init__(self) -> None:
        self._arrays = ocp.PyTreeCheckpointHandler(**({"type_handler_registry": with_parts()} if jax.process_count() > 1 else {}))

    async def async_save(self, directory: Any, args: SaveState) -> list[Any]:
        """Begins to write; the returned futures end when this process's files are written and sealed."""
        folder = Path(directory)
        if jax.process_index() == 0:
            write_json(folder / CONTENTS, args.contents)
        write_json(folder / own_contents(jax.process_index()), args.own)
        writing = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.arrays)) or []
        return [_Sealed(writing, folder)]

    def save(self, directory: Any, args: SaveState) -> None:
        """Writes and waits."""
        ocp.AsyncCheckpointer(self).save(directory, args=args)

    def restore(self, directory: Any, args: RestoreState) -> Any:
        """Reads the arrays that `args` asks for."""
        wanted = ocp.args.PyTreeRestore(args.item, restore_args=args.how, partial_restore=True)
        return self._arrays.restore(directory, args=wanted)

    def finalize(self, directory: Any) -> None:
        """Joins what the processes wrote; process 0 alone, after all have written."""
        folder = Path(directory)
        with _without_patterns(folder) as plain:
            self._arrays.finalize(plain)
        _check_readable(folder)
        lists = sorted(folder.glob(f"{_own_seals('*')}"))
        seals: dict[str, Any] = {name: own for one in lists for name, own in read_json(one).items()}
        shared = [path for path in files_below(folder) if path.relative_to(folder).as_posix() not in seals and path not in lists]
        write_json(folder / SEALS, {**seals, **seal_all(folder, shared)})
        for one in lists:
            one.unlink()

    def close(self) -> None:
        """Ends the handler of the arrays."""
        self._arrays.close()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclass
class SaveState(ocp.args.CheckpointArgs):  # type: ignore[misc]  # orbax has no types
    """The contents to save: arrays as a nested dict, JSON of the job, and JSON of this process."""

    arrays: Any
    contents: Mapping[str, Any]
    own: Mapping[str, Any]


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclass
class RestoreState(ocp.args.CheckpointArgs):  # type: ignore[misc]  # orbax has no types
    """The arrays that are asked for, as a nested dict of shapes, and how each comes back."""

    item: Any
    how: Any


@contextmanager
def _without_patterns(folder: Path) -> Iterator[Any]:
    """Gives a path to the folder that orbax can glob below: its merge of files finds none below a path such as `run[1]`."""
    if not _GLOB.search(str(folder)):
        yield epath.Path(folder)
        return
    with TemporaryDirectory(prefix="spmdctx-") as scratch:
        link = Path(scratch) / "checkpoint"
        if _GLOB.search(str(link)):
            raise CheckpointError(
                "Checkpoints cannot be finished below this folder.",
                where=str(folder),
                got=f"the temporary path {link}",
                fix="set TMPDIR to a path without * ? [ ]",
            )
        link.symlink_to(folder, target_is_directory=True)
        yield epath.Path(link)


def _check_readable(folder: Path) -> None:
    """Reads back the list of arrays that the folder now holds, before the checkpoint is called complete.

    Raises:
        CheckpointError: an array is not in it.
    """
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    found = sum(key.rpartition(b"/")[2] in _ARRAY_METADATA for key in store.list().result())
    wanted = sum(Stored(tuple(shape), *kind).num_bytes > 0 for shape, *kind in read_json(folder / CONTENTS)["leaves"].values())
    if found != wanted:
        raise CheckpointError("A checkpoint was written, but cannot be read back.", where=str(folder), got=f"{found} of {wanted} arrays")


def own_contents(process: int) -> str:
    """Returns the name of the file with one process's contents."""
    return f"contents.{process}.json"


def read_seals(folder: Path) -> dict[str, Seal]:
    """Reads the seals of a step's files, by path below its folder.

    Raises:
        CheckpointError: the file of seals is damaged.
    """
    found = read_json(folder / SEALS)
    for name, own in found.items():
        is_seal = isinstance(own, list) and len(own) == 2 and all(type(part) is int and part >= 0 for part in own)
        if not is_seal or "\0" in name:
            raise CheckpointError("A file of the checkpoint is damaged.", where=str(folder / SEALS), got=f"{shown(name)}: {shown(own)}")
    if CONTENTS not in found:
        raise CheckpointError("A file of the checkpoint is damaged.", where=str(folder / SEALS), got=f"no {CONTENTS}")
    return {name: Seal(*own) for name, own in found.items()}


def _own_seals(process: int | str) -> str:
    return f"files.{process}.json"


class _Sealed:
    """Ends when others have ended and this process's files are sealed."""

    def __init__(self, writing: Sequence[Any], folder: Path) -> None:
        self._writing, self._folder = writing, folder

    def result(self, timeout: float | None = None) -> None:
        """Waits; a write that failed is raised when all have ended, since the folder may be removed then."""
        errors = []
        for one in self._writing:
            try:
                one.result(timeout=timeout)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        process = jax.process_index()
        own = [*files_below(self._folder / f"{_PROCESS_FOLDER}{process}"), self._folder / own_contents(process)]
        write_json(self._folder / _own_seals(process), seal_all(self._folder, own))

"""The folder in which a job saves its state: one file for each server, and a list when all are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdctx.checkpoint.files import read_json, write_json
from spmdctx.checkpoint.tensor_file import SUFFIX, Reads, Tensor, TensorFile, write_tensors
from spmdctx.errors import CheckpointError
from spmdctx.server.program.recipe import made_rows
from spmdctx.server.program.spec import ServerSpec
from spmdctx.server.state.row_files import Piece, read_rows
from spmdctx.wording.files import making_folder

_KEPT = 2
_LIST = "state.json"
_RESULTS = f"results{SUFFIX}"
WORKERS_FILE = f"workers{SUFFIX}"
"""The name of the file of what stays with workers."""


class Updates(NamedTuple):
    """Which parts of steps an asynchronous job has applied: all those before step `floor`, and some later ones by step and part."""

    floor: int
    done: tuple[tuple[int, int], ...]


class SavedState(NamedTuple):
    """A state that is complete: its version and folder, the step's fingerprint and number of parts, and the files of servers.

    `updates` is what it holds where a version is an update; None where it is a step.
    """

    version: int
    folder: Path
    fingerprint: str
    num_parts: int
    files: tuple[str, ...]
    updates: Updates | None = None

    def misfit(self, fingerprint: str, num_parts: int) -> str:
        """Says why a step cannot go on from this state, empty if it can."""
        if self.fingerprint == fingerprint:
            return ""
        where = f"{self.folder.parent}, version {self.version}"
        if self.num_parts != num_parts:
            need = f"set grad_accumulation_step={self.num_parts}, or name another folder"
            return f"The saved state is one of a step in {self.num_parts} parts, and not in {num_parts} (where: {where}; fix: {need})."
        return f"The saved state is that of another step (where: {where}; fix: name another folder)."


def state_folder(folder: Path, version: int) -> Path:
    """Returns where a version is saved."""
    return folder / f"state-{version:09d}"


def shard_name(server: int) -> str:
    """Returns the name of the file of a server."""
    return f"server-{server}{SUFFIX}"


def save_shard(folder: Path, version: int, server: int, values: Mapping[str, Any]) -> str:
    """Writes one server's arrays, by the path of the input that each one is; returns the name of the file.

    Raises:
        FileError: its folder cannot be made.
        CheckpointError: it cannot be written.
    """
    return save_arrays(folder, version, shard_name(server), values)


def save_arrays(folder: Path, version: int, name: str, values: Mapping[str, Any]) -> str:
    """Writes a file of arrays, by the path of the input that each one is; returns the name of the file.

    Raises:
        FileError: its folder cannot be made.
        CheckpointError: it cannot be written.
    """
    place = state_folder(folder, version)
    with making_folder(place):
        write_tensors(place / name, [_tensor(path, np.asarray(value)) for path, value in values.items()])
    return name


def complete(folder: Path, state: SavedState, results: Mapping[int, Mapping[int, Any]]) -> None:
    """Writes the list that makes a state count, and removes states that are older than the last ones.

    Args:
        folder: of the job.
        state: all files of its servers are written.
        results: of steps before it, by step and number.

    Raises:
        CheckpointError: it cannot be written.
    """
    with making_folder(state.folder):
        write_tensors(state.folder / _RESULTS, _result_tensors(results))
        body = {"version": state.version, "fingerprint": state.fingerprint, "num_parts": state.num_parts, "files": sorted(state.files)}
        body |= {} if state.updates is None else {"updates": [state.updates.floor, sorted(state.updates.done)]}
        write_json(state.folder / _LIST, body)
    kept = {one.folder for one in saved_states(folder)[-_KEPT:]}
    for old in folder.glob("state-*"):
        if old not in kept and old.name < state.folder.name:
            # Without its list it does not count, whatever happens while the rest is removed.
            (old / _LIST).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)


def saved_states(folder: Path) -> list[SavedState]:
    """Returns the states that are complete, the oldest first.

    Raises:
        CheckpointError: a list that is damaged.
    """
    places = sorted(folder.glob("state-*")) if folder.is_dir() else []
    return [_listed(place) for place in places if (place / _LIST).is_file()]


def has_progress(folder: Path) -> bool:
    """Returns whether a job has saved more than its first state."""
    return any(place.name != state_folder(folder, 0).name and (place / _LIST).is_file() for place in folder.glob("state-*"))


def newest_state(folder: Path) -> SavedState | None:
    """Returns the newest state that is complete, once its files are seen to be there as they were written; None if there is none.

    The arrays themselves are compared with their checksums when servers load them.

    Raises:
        CheckpointError: the list or a file is missing or damaged.
    """
    found = saved_states(folder)
    if not found:
        return None
    for name in (*found[-1].files, _RESULTS):
        TensorFile(found[-1].folder / name, Reads()).close()
    return found[-1]


def load_arrays(folder: Path, version: int, paths: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns arrays of a version by their paths, whichever servers have saved them.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    wanted, found = set(paths), {}
    place = state_folder(folder, version)
    files = files_of(folder, version)
    for file in files:
        with TensorFile(file, Reads()) as tensors:
            found.update({name: _whole(tensors, name) for name in wanted.intersection(tensors.tensors)})
    for path in wanted - found.keys():
        rows = read_rows(files, Piece(path, 0, 1))
        found |= {} if rows is None else {path: rows}
    if missing := sorted(wanted - found.keys()):
        raise CheckpointError("A saved state lacks arrays.", where=str(place), got=f"no {', '.join(missing[:3])}")
    return found


def files_of(folder: Path, version: int) -> list[Path]:
    """Returns the files of a version that servers have written.

    Raises:
        CheckpointError: its list is missing or damaged.
    """
    place = state_folder(folder, version)
    return [place / name for name in _listed(place).files]


def row_pieces(spec: ServerSpec) -> dict[str, Piece]:
    """Returns, by slot, what a server has of tables."""
    return {slot: Piece(path, spec.server, spec.num_servers) for table in spec.tables for slot, path in table.held.items()}


def load_held(folder: Path, version: int, spec: ServerSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Returns what a server holds in a version, by slot, whichever servers have saved it.

    Raises:
        CheckpointError: an array is missing or damaged.
    """
    arrays = load_arrays(folder, version, spec.held.values())
    found = {slot: arrays[path] for slot, path in spec.held.items()}
    recipes = {slot: recipe for table in spec.tables for slot, recipe in table.recipes.items()} if version == 0 else {}
    files = files_of(folder, version)
    for slot, piece in row_pieces(spec).items():
        rows = made_rows(recipes[slot], piece.server, piece.num_servers) if slot in recipes else read_rows(files, piece)
        if rows is None:
            raise CheckpointError("A saved state lacks an array.", where=str(state_folder(folder, version)), got=f"no {piece.path}")
        found[slot] = rows
    return found


def load_results(state: SavedState) -> dict[int, dict[int, Any]]:
    """Returns the results of the steps before a state, by step and number.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    found: dict[int, dict[int, Any]] = {}
    with TensorFile(state.folder / _RESULTS, Reads()) as tensors:
        for name in tensors.tensors:
            group, _, form = name.rpartition("/")
            if form == "values":
                steps = _whole(tensors, f"{group}/steps")
                for step, value in zip(steps.tolist(), _whole(tensors, name), strict=True):
                    found.setdefault(step, {})[int(group.partition("/")[0])] = np.asarray(value)
    return found


def _result_tensors(results: Mapping[int, Mapping[int, Any]]) -> list[Tensor]:
    """Returns one array for the values of each result that are of one type, and one of their steps."""
    groups: dict[tuple[int, Any, str], dict[int, np.ndarray[Any, Any]]] = {}
    for step, own in sorted(results.items()):
        for number, given in own.items():
            value = np.asarray(given)
            groups.setdefault((number, value.shape, str(value.dtype)), {})[step] = value
    found = []
    for index, ((number, _, _), values) in enumerate(groups.items()):
        found.append(_tensor(f"{number}/{index}/steps", np.asarray(list(values), np.int64)))
        found.append(_tensor(f"{number}/{index}/values", np.stack(list(values.values()))))
    return found


def _listed(place: Path) -> SavedState:
    body = read_json(place / _LIST)
    try:
        files = tuple(map(str, body["files"]))
        updates = None if "updates" not in body else _updates(*body["updates"])
        found = SavedState(int(body["version"]), place, str(body["fingerprint"]), int(body["num_parts"]), files, updates)
    except (KeyError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError("The list of a saved state is damaged.", where=str(place / _LIST), got=got) from error
    if place.name != f"state-{found.version:09d}" or any(os.path.basename(name) != name for name in files):
        raise CheckpointError("The list of a saved state is that of another.", where=str(place / _LIST), got=f"version {found.version}")
    return found


def _updates(floor: Any, done: Any) -> Updates:
    return Updates(int(floor), tuple((int(step), int(part)) for step, part in done))


def _tensor(name: str, value: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(name, tuple(value.shape), str(value.dtype), lambda: value)


def _whole(tensors: TensorFile, name: str) -> np.ndarray[Any, Any]:
    info = tensors.tensors[name]
    out = np.empty(info.shape, info.dtype)
    tensors.read(name, tuple((0, size) for size in info.shape), out)
    return out

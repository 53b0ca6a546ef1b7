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
from spmdctx.wording.files import making_folder

_KEPT = 2
_LIST = "state.json"


class Updates(NamedTuple):
    """Which parts of steps an asynchronous job has applied: all those before step `floor`, and some later ones by step and part."""

    floor: int
    done: tuple[tuple[int, int], ...]


class SavedState(NamedTuple):
    """A state that is complete: its version, its folder, the step's fingerprint, and the files of arrays.

    `updates` is what it holds where a version is an update; None where it is a step.
    """

    version: int
    folder: Path
    fingerprint: str
    files: tuple[str, ...]
    updates: Updates | None = None


def state_folder(folder: Path, version: int) -> Path:
    """Returns where a version is saved."""
    return folder / f"state-{version:09d}"


def save_shard(folder: Path, version: int, server: int, values: Mapping[str, Any]) -> str:
    """Writes one server's arrays, by the path of the input that each one is; returns the name of the file.

    Raises:
        FileError: it cannot be written.
    """
    place = state_folder(folder, version)
    with making_folder(place):
        name = f"server-{server}{SUFFIX}"
        write_tensors(place / name, [_tensor(path, np.asarray(value)) for path, value in values.items()])
    return name


def complete(
    folder: Path,
    version: int,
    fingerprint: str,
    files: Iterable[str],
    results: Mapping[int, Mapping[int, Any]],
    updates: Updates | None = None,
) -> None:
    """Writes the list that makes a state count, and removes states that are older than the last ones.

    Raises:
        FileError: it cannot be written.
    """
    place = state_folder(folder, version)
    rows = {f"{step}/{number}": np.asarray(value) for step, own in results.items() for number, value in own.items()}
    write_tensors(place / f"results{SUFFIX}", [_tensor(name, value) for name, value in rows.items()])
    body = {"version": version, "fingerprint": fingerprint, "files": sorted(files)}
    write_json(place / _LIST, body if updates is None else {**body, "updates": [updates.floor, sorted(updates.done)]})
    for old in saved_states(folder)[:-_KEPT]:
        shutil.rmtree(old.folder, ignore_errors=True)


def saved_states(folder: Path) -> list[SavedState]:
    """Returns the states that are complete, the oldest first.

    Raises:
        CheckpointError: a list that is damaged.
    """
    found = []
    for place in sorted(folder.glob("state-*")) if folder.is_dir() else []:
        if not (place / _LIST).is_file():
            continue
        body = read_json(place / _LIST)
        try:
            files = tuple(map(str, body["files"]))
            found.append(SavedState(int(body["version"]), place, str(body["fingerprint"]), files, _updates(body.get("updates"))))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("The list of a saved state is damaged.", where=str(place / _LIST), got=str(error)) from error
    return found


def _updates(found: Any) -> Updates | None:
    if found is None:
        return None
    floor, done = found
    return Updates(int(floor), tuple((int(step), int(part)) for step, part in done))


def load_arrays(folder: Path, version: int, paths: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns arrays of a version by their paths, whichever servers have saved them.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    wanted, found = set(paths), {}
    for file in sorted(state_folder(folder, version).glob(f"server-*{SUFFIX}")):
        with TensorFile(file, Reads()) as tensors:
            found.update({name: _whole(tensors, name) for name in wanted.intersection(tensors.tensors)})
    if missing := sorted(wanted - found.keys()):
        raise CheckpointError("A saved state lacks arrays.", where=str(state_folder(folder, version)), got=f"no {', '.join(missing[:3])}")
    return found


def load_results(state: SavedState) -> dict[int, dict[int, Any]]:
    """Returns the results of the steps before a state, by step and number."""
    found: dict[int, dict[int, Any]] = {}
    with TensorFile(state.folder / f"results{SUFFIX}", Reads()) as tensors:
        for name in tensors.tensors:
            step, _, number = name.partition("/")
            found.setdefault(int(step), {})[int(number)] = _whole(tensors, name)
    return found


def free_bytes(folder: Path) -> int:
    """Returns the bytes that are free where a folder lies."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _tensor(name: str, value: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(name, tuple(value.shape), str(value.dtype), lambda: value)


def _whole(tensors: TensorFile, name: str) -> np.ndarray[Any, Any]:
    info = tensors.tensors[name]
    out = np.empty(info.shape, info.dtype)
    tensors.read(name, tuple((0, size) for size in info.shape), out)
    return out

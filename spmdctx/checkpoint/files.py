"""Files of a checkpoint: their sizes and checksums are written with them and compared before they are read."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdctx.checkpoint.tree import Stored
from spmdctx.errors import CheckpointError, FileError, message, shown
from spmdctx.wording.files import is_inside, open_file, read_file, write_file
from spmdctx.wording.text_data import read_json_text

CONTENTS = "contents.json"
"""The file of all that is no array."""

_BLOCK_BYTES = 1 << 22
_BYTES, _NUMBER = "__bytes__", "__number__"
_UNFINISHED, _METADATA = ".orbax-checkpoint-tmp", "_CHECKPOINT_METADATA"  # names of orbax
_MOST_PROCESSES, _MOST_BYTES = 1 << 20, 1 << 62


class Seal(NamedTuple):
    """A file's size and the CRC-32 of what it holds."""

    num_bytes: int
    crc: int


def seal(path: Path) -> Seal:
    """Reads a file once, a block at a time."""
    size = crc = 0
    with os.fdopen(open_file(path), "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return Seal(size, crc)


def seal_all(root: Path, files: Iterable[Path]) -> dict[str, Seal]:
    """Returns seals by path below `root`, in order of the paths."""
    return {file.relative_to(root).as_posix(): seal(file) for file in sorted(files)}


def files_below(root: Path) -> list[Path]:
    """Returns all files of a folder and its subfolders."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def not_ordinary(root: Path) -> str:
    """Says which file in a folder is a pipe, a device or the like, or a link that leads out of it; returns an empty string if none is."""
    for path in root.rglob("*"):
        if path.is_symlink() and not is_inside(path, root):
            return f"{path} is a link that leads out of the folder"
        if not (path.is_file() or path.is_dir()):
            return f"{path} is neither a file nor a folder"
    return ""


def damage(root: Path, seals: Mapping[str, Seal], *, contents: bool) -> str:
    """Says what is wrong with the first file that has changed; returns an empty string if all files are as written.

    Args:
        root: the folder of the checkpoint.
        seals: the seals of the files to check.
        contents: whether to read the files, instead of only comparing their sizes.
    """
    for name, wanted in sorted(seals.items()):
        path = root / name
        if not is_inside(path, root):
            return f"{path} leads out of the folder of the checkpoint"
        try:
            size = path.stat().st_size if path.is_file() else -1
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if size < 0:
            return f"{path} is missing"
        if size != wanted.num_bytes:
            return f"{path} has {size} bytes instead of {wanted.num_bytes}"
        if contents and seal(path).crc != wanted.crc:
            return f"{path} does not hold what was written: its checksum differs"
    return ""


@contextmanager
def writing() -> Iterator[None]:
    """Turns the error of a file that cannot be written into that of a checkpoint.

    Raises:
        CheckpointError: the file system refuses; a former file is as it was.
    """
    try:
        yield
    except FileError as error:
        raise CheckpointError("A file of the checkpoint cannot be written.", where=str(error.filename), got=str(error.strerror)) from error


def remove_unfinished(directory: Path) -> None:
    """Removes the folders of saves that ended early.

    Raises:
        CheckpointError: one cannot be removed.
    """
    with reporting("What an unfinished save has left cannot be removed.", directory):
        for left in sorted(directory.glob(f"*{_UNFINISHED}")):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()


def check_steps(directory: Path) -> None:
    """Refuses a folder in which orbax would wait for a pipe: it reads a file of each step at once.

    Raises:
        CheckpointError: the step is named.
    """
    for path in directory.glob(f"*/{_METADATA}"):
        if not path.is_file():
            raise CheckpointError(
                "The checkpoint is damaged.",
                where=str(path.parent),
                got=f"{_METADATA} is no file",
                fix=f"remove the folder {path.parent.name}",
            )


def checked_directory(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a folder in which checkpoints can be kept, as far as this can be told without orbax.

    Raises:
        TypeError: it is no path.
        CheckpointError: it is a file, no path of this system, or holds a step that is damaged.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(message("The folder of checkpoints must be a path.", got=shown(directory)))
    with reporting("There can be no such folder of checkpoints.", ascii(directory)):
        found = Path(directory).resolve()
        os.fsencode(found)
        is_other = found.exists() and not found.is_dir()
    if is_other:
        raise CheckpointError("Checkpoints are kept in a folder, and this is a file.", where=str(found), need="a folder")
    if "\\" in str(found):  # its storage takes it for a slash, and writes to another folder
        raise CheckpointError("A folder of checkpoints cannot have a backslash in its path.", where=str(found), fix="rename the folder")
    check_steps(found)
    return found


@contextmanager
def reporting(summary: str, where: object) -> Iterator[None]:
    """Turns errors of orbax and of the file system into that of a checkpoint.

    Raises:
        CheckpointError: with the message of the other error.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(summary, where=str(where), got=str(error)[:1000]) from error


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Writes JSON, and reads it back before the file gets its name; a reader never sees half of it."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    with writing():
        write_file(path, text, read_json)


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_json` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        body = read_json_text(read_file(path))
    except OSError as error:
        raise CheckpointError("A file of the checkpoint cannot be read.", where=str(path), got=str(error)) from error
    except ValueError as error:
        raise CheckpointError("A file of the checkpoint is damaged: it holds no JSON text.", where=str(path), got=str(error)) from error
    if not isinstance(body, dict):
        raise CheckpointError("A file of the checkpoint is damaged.", where=str(path), got=type(body).__name__, need="a JSON object")
    return body


def read_contents(folder: Path, step: int) -> dict[str, Any]:
    """Reads what a checkpoint holds besides arrays: step, leaves (the fields of `Stored` by path), processes, and plan.

    Raises:
        CheckpointError: the file is damaged, or that of another step.
    """
    body = read_json(folder / CONTENTS)
    wrong = _wrong_contents(body)
    if wrong:
        raise CheckpointError("A file of the checkpoint is damaged.", where=str(folder / CONTENTS), got=wrong)
    if body["step"] != step:
        raise CheckpointError(
            "The folder has the name of another step.",
            where=str(folder.parent),
            got=f"step {body['step']}",
            fix="give the folder its name back",
        )
    return body


def _wrong_contents(body: Mapping[str, Any]) -> str:
    """Says what is no part of contents, or returns an empty string."""
    missing = sorted({"step", "leaves", "processes", "plan"} - set(body))
    if missing:
        return f"no {missing[0]}"
    if type(body["step"]) is not int or type(body["processes"]) is not int or not 1 <= body["processes"] <= _MOST_PROCESSES:
        return f"step {shown(body['step'])}, processes {shown(body['processes'])}"
    if not (body["plan"] is None or isinstance(body["plan"], str)) or not isinstance(body["leaves"], dict):
        return "no leaves, or a plan that is no text"
    return next((f"leaf {shown(path)}: {shown(form)}" for path, form in body["leaves"].items() if not _is_form(form)), "")


def _is_form(form: Any) -> bool:
    if not (isinstance(form, list) and len(form) == 3 and isinstance(form[0], list) and all(isinstance(text, str) for text in form[1:])):
        return False
    if any(type(size) is not int or not 0 <= size <= _MOST_BYTES for size in form[0]):
        return False
    try:
        return Stored(tuple(form[0]), *form[1:]).num_bytes <= _MOST_BYTES
    except (TypeError, ValueError):
        return False


def packed(value: Any) -> Any:
    """Converts a data position to JSON.

    Raises:
        TypeError: a value that JSON does not have, or keys that it cannot tell apart.
    """
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        found = {str(key): packed(item) for key, item in value.items()}
        if len(found) < len(value) or set(found) in ({_BYTES}, {_NUMBER}):
            raise TypeError(message("A data position has keys that JSON cannot tell apart.", got=shown(sorted(found))))
        return found
    if isinstance(value, list | tuple):
        return [packed(item) for item in value]
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(value)}  # JSON has none
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        message(
            "A data position holds JSON values and bytes.", got=type(value).__name__, fix="pass an iterator with get_state(), or a number"
        )
    )


def unpacked(value: Any) -> Any:
    """Returns the data position of what `packed` made.

    Raises:
        ValueError: it did not make this.
    """
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return float(value[_NUMBER]) if set(value) == {_NUMBER} else {key: unpacked(item) for key, item in value.items()}
    return [unpacked(item) for item in value] if isinstance(value, list) else value

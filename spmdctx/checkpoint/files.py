"""Files of a checkpoint: their sizes and checksums are written with them and compared before they are read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spmdctx.errors import CheckpointError, FileError
from spmdctx.wording.files import is_inside, open_file, read_file, write_file
from spmdctx.wording.text_data import read_json_text

_BLOCK_BYTES = 1 << 22


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
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
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

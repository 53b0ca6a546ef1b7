"""Reads rows of tables from files of servers, whichever number of them has written these."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdctx.checkpoint.tensor_file import Reads, TensorFile, TensorInfo
from spmdctx.errors import CheckpointError

_NAME = re.compile(r"(.*)#rows (\d+) of (\d+)", re.DOTALL)
_BLOCK_BYTES = 64 << 20


class Piece(NamedTuple):
    """The rows of an array that one of several servers has: row i is on server i modulo their number."""

    path: str
    server: int
    num_servers: int

    @property
    def name(self) -> str:
        """What the rows are called in a file."""
        return f"{self.path}#rows {self.server} of {self.num_servers}"


def piece_of(name: str) -> Piece:
    """Returns what an array in a file is: a whole one is the piece of one server."""
    found = _NAME.fullmatch(name)
    return Piece(name, 0, 1) if found is None else Piece(found[1], int(found[2]), int(found[3]))


def rows_of(array: Any, aval: Any, piece: Piece) -> np.ndarray[Any, Any]:
    """Returns the rows of a piece of an array, in the type that JAX gives it: NumPy's own may have more bits."""
    rows: np.ndarray[Any, Any] = np.asarray(array)[piece.server :: piece.num_servers].astype(aval.dtype, copy=False)
    return rows


def read_rows(files: Iterable[Path], piece: Piece) -> np.ndarray[Any, Any] | None:
    """Returns the rows of a piece; None if the files have no array of its path, or not all of it.

    Raises:
        CheckpointError: a file is damaged.
    """
    sources: dict[Piece, tuple[Path, str, TensorInfo]] = {}
    for file in files:
        with TensorFile(file, Reads()) as tensors:
            sources.update(
                {piece_of(name): (file, name, info) for name, info in tensors.tensors.items() if piece_of(name).path == piece.path}
            )
    if not sources or len(sources) != next(iter(sources)).num_servers:
        return None
    infos = [info for _, _, info in sources.values()]
    num_rows = sum(info.shape[0] for info in infos)
    out = np.empty((len(range(piece.server, num_rows, piece.num_servers)), *infos[0].shape[1:]), infos[0].dtype)
    for own, (file, name, _) in sources.items():
        with TensorFile(file, Reads()) as tensors:
            _copy(tensors, name, own, piece, out)
    return out


def _copy(tensors: TensorFile, name: str, own: Piece, piece: Piece, out: np.ndarray[Any, Any]) -> None:
    """Copies from a file what it has of a piece, a block of rows at a time."""
    info = tensors.tensors[name]
    count, rest = info.shape[0], info.shape[1:]
    step = max(1, _BLOCK_BYTES // max(1, math.prod(rest) * info.dtype.itemsize))
    crc = 0
    for start in range(0, count, step):
        stop = min(start + step, count)
        block = np.empty((stop - start, *rest), info.dtype)
        tensors.read(name, ((start, stop), *((0, size) for size in rest)), block)
        crc = zlib.crc32(block.reshape(-1).view(np.uint8).data, crc)
        rows = own.server + own.num_servers * np.arange(start, stop)
        wanted = rows % piece.num_servers == piece.server
        out[rows[wanted] // piece.num_servers] = block[wanted]
    if info.crc and crc != int(info.crc, 16):
        raise CheckpointError("Rows of a table are not what was written.", where=name, got=f"a checksum of {crc:08x}")

"""Safetensors files, read by ranges: reading a block of a tensor costs only its bytes, which are counted.

    8 bytes          length of the header, little-endian
    header           JSON: {"name": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}, "__metadata__": {...}}
    data             the tensors, row-major, little-endian, one after the other

The format is that of https://github.com/huggingface/safetensors. Tensors are written one at a time, so that memory holds no
second copy of a file's content, and in any dtype of JAX that the format has. The metadata holds a CRC-32 of each tensor, one of the
header with zeros in its own place, and the rank whose slices the file holds. Other programs' files without them can be read too. A
tensor that is read whole is compared with its checksum. This is not possible for a part of a tensor; `TensorFile.verify` reads everything.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spmdctx.checkpoint.blocks import Block, shape_of_block
from spmdctx.checkpoint.files import writing
from spmdctx.errors import CheckpointError, UnsupportedError, shown
from spmdctx.wording.files import open_file, replacing
from spmdctx.wording.text_data import read_json_text

SUFFIX = ".safetensors"
_METADATA = "__metadata__"
_SUM, _HEADER_SUM, _NO_SUM, _RANK = "crc32 of ", "crc32 of the header", "0" * 8, "spmdctx rank"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_DIMS, _MOST_NUMBER = 32, 1 << 62
_SHORT_RUN_BYTES = 256
"""Shorter runs are read together with the bytes between them, since a call costs more than the bytes that it would save."""
_SPAN_BYTES = 1 << 22

_DTYPE_OF_CODE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_CODES = {name: code for code, name in _DTYPE_OF_CODE.items()}


@dataclass
class Reads:
    """A count of bytes: `needed_bytes` of tensors were requested, `read_bytes` were read from files, including headers."""

    needed_bytes: int = 0
    read_bytes: int = 0
    num_files: int = 0

    def add(self, other: Reads) -> None:
        """Adds the bytes of another reader."""
        self.needed_bytes += other.needed_bytes
        self.read_bytes += other.read_bytes
        self.num_files += other.num_files


class TensorInfo(NamedTuple):
    """One tensor of a file; `start` is where its bytes begin in the file, `crc` the sum of them, empty where the file has none."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    crc: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file, open for reading.

    Args:
        path: the file.
        reads: counts what is read.

    Attributes:
        tensors: by name.
        rank: the rank whose slices they are, as text; empty where the file does not say.

    Raises:
        CheckpointError: the file is missing, cut, or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str], reads: Reads) -> None:
        self.path = Path(path)
        self._reads, self.rank = reads, ""
        try:
            self._file = open_file(self.path)
        except (OSError, ValueError) as error:
            got = getattr(error, "strerror", None) or str(error)
            raise CheckpointError("A file of the checkpoint cannot be read.", where=str(path), got=got) from error
        try:
            self.tensors: dict[str, TensorInfo] = self._header()
        except BaseException:
            self.close()
            raise
        reads.num_files += 1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(self, name: str, block: Block, out: np.ndarray) -> None:
        """Reads a block of a tensor into `out`, an array of the block's shape and the tensor's dtype, contiguous or not.

        Raises:
            CheckpointError: the file ends too early, or the block is the whole tensor and not what was written.
        """
        info = self.tensors[name]
        shape = shape_of_block(block)
        self._reads.needed_bytes += math.prod(shape) * info.dtype.itemsize
        if not math.prod(shape):
            return
        if shape == info.shape:
            if zlib.crc32(self._read_into(out, info.start)) != int(info.crc or "0", 16) and info.crc:
                raise self._changed(name)
            return
        split = len(shape)
        while split and shape[split - 1] == info.shape[split - 1]:
            split -= 1
        outer = max(split - 1, 0)
        strides = [math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize for dim in range(len(shape))]
        run = math.prod(shape[outer:]) * info.dtype.itemsize
        if outer and run < _SHORT_RUN_BYTES and shape[outer - 1] > 1:
            self._read_rows(info, block, out, outer - 1, strides)
            return
        base = info.start + sum(start * stride for (start, _), stride in zip(block, strides, strict=True))
        for index in np.ndindex(*shape[:outer]):
            self._read_into(out[index] if index else out, base + sum(i * stride for i, stride in zip(index, strides, strict=False)))

    def verify(self) -> None:
        """Reads the whole file, and compares each tensor with its sum.

        Raises:
            CheckpointError: a tensor is not what was written.
        """
        for name, info in self.tensors.items():
            crc = 0
            for start in range(0, info.num_bytes, _SPAN_BYTES):
                span = np.empty(min(_SPAN_BYTES, info.num_bytes - start), np.uint8)
                crc = zlib.crc32(self._read_into(span, info.start + start), crc)
            if info.crc and crc != int(info.crc, 16):
                raise self._changed(name)

    def _read_rows(self, info: TensorInfo, block: Block, out: np.ndarray, dim: int, strides: list[int]) -> None:
        """Reads whole rows of dimension `dim`, many at a time, and takes the block out of them."""
        shape = shape_of_block(block)
        rows = max(1, _SPAN_BYTES // max(1, strides[dim]))
        inner = tuple(slice(start, stop) for start, stop in block[dim + 1 :])
        base = info.start + sum(start * stride for (start, _), stride in zip(block[: dim + 1], strides, strict=False))
        for index in np.ndindex(*shape[:dim]):
            first = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
            for row in range(0, shape[dim], rows):
                count = min(rows, shape[dim] - row)
                span = np.empty((count, *info.shape[dim + 1 :]), info.dtype)
                self._read_into(span, first + row * strides[dim])
                out[(*index, slice(row, row + count))] = span[(slice(None), *inner)]

    def _read_into(self, out: np.ndarray, offset: int) -> memoryview:
        """Fills `out` with the bytes as they are in the file."""
        direct = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        view = direct.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file, [view[done:]], offset + done)
            except OSError as error:
                got = error.strerror or str(error)
                raise CheckpointError("A file of the checkpoint cannot be read.", where=str(self.path), got=got) from error
            if not count:
                raise CheckpointError("A file of the checkpoint ends too early.", where=str(self.path), got=f"no byte {offset + done}")
            done += count
        self._reads.read_bytes += len(view)
        if direct is not out:
            out[...] = direct
        return view

    def _header(self) -> dict[str, TensorInfo]:
        size = os.fstat(self._file).st_size
        if size < 8:
            raise self._damaged(f"{size} bytes, fewer than the length of a header takes")
        length = int.from_bytes(self._bytes(0, 8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise self._damaged(f"a header of {length} bytes in a file of {size}")
        text = self._bytes(8, length)
        try:
            header = read_json_text(text)
            sums = _metadata(header)
            found = {name: _info(entry, 8 + length, sums.get(_SUM + name, "")) for name, entry in header.items() if name != _METADATA}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        if any(name.startswith(_SUM) for name in sums) and not _is_intact(text, sums.get(_HEADER_SUM, "")):
            raise self._damaged("a header with another checksum than was written")
        self.rank = sums.get(_RANK, "")
        end = 8 + length
        for name, info in sorted(found.items(), key=lambda entry: (entry[1].start, entry[1].num_bytes)):
            if info.start != end:
                what = "overlaps the one before" if info.start < end else "does not follow the one before"
                raise self._damaged(f"{shown(name)} {what}: it begins at byte {info.start}, and not at {end}")
            end += info.num_bytes
        if end != size:
            raise self._damaged(f"{size} bytes, where the header tells of {end}")
        return found

    def _bytes(self, start: int, count: int) -> bytes:
        self._reads.read_bytes += count
        return os.pread(self._file, count, start)

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(
            "A file of the checkpoint is damaged.", where=str(self.path), got=f"'{name}' is not what was written: its checksum differs"
        )

    def _damaged(self, got: str) -> CheckpointError:
        return CheckpointError(
            "The file is no safetensors file, or it is damaged or encrypted.", where=str(self.path), got=got, need="a safetensors file"
        )


def _metadata(header: Any) -> Mapping[str, str]:
    """Returns the metadata of a header.

    Raises:
        ValueError: it does not map texts to texts, as the format wants.
    """
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    found = header.get(_METADATA) or {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"{_METADATA} is no mapping of texts")
    return found


def _info(entry: Mapping[str, Any], data_start: int, crc: str) -> TensorInfo:
    if entry["dtype"] not in _DTYPE_OF_CODE:
        raise ValueError(f"dtype {shown(entry['dtype'])}")
    dtype, shape, offsets = jnp.dtype(_DTYPE_OF_CODE[entry["dtype"]]), entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(shape) > _MOST_DIMS or len(offsets) != 2:
        raise ValueError(f"shape {shown(shape)} and data_offsets {shown(offsets)}")
    start, stop = offsets
    if any(type(number) is not int or not 0 <= number <= _MOST_NUMBER for number in (*shape, start, stop)):
        raise ValueError(f"a shape or an offset that is no whole number from 0 to {_MOST_NUMBER}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes for {entry['dtype']}{shape}")
    int(crc or "0", 16)
    return TensorInfo(dtype, tuple(shape), data_start + start, crc)


def _is_intact(header: bytes, stored: str) -> bool:
    return f"{zlib.crc32(header.replace(_sum_entry(stored), _sum_entry(_NO_SUM), 1)):08x}" == stored


def _sum_entry(crc: str) -> bytes:
    return f'"{_HEADER_SUM}":"{crc}"'.encode()


class Tensor(NamedTuple):
    """A tensor to be written, made only when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]


def write_tensors(path: str | os.PathLike[str], tensors: Iterable[Tensor], rank: int | None = None) -> None:
    """Writes a file of a rank, one tensor at a time, and reads its header back before it gets its name; a reader never sees half of it.

    Raises:
        UnsupportedError: a dtype that the format does not have.
        CheckpointError: the file cannot be written, or not be read back; a former one is as it was.
    """
    rows = list(tensors)
    with writing(), replacing(path, partial(_check_written, rows)) as file:
        file.write(_header_bytes(rows, [0] * len(rows), rank))
        sums = []
        for row in rows:
            # A view of bytes: numpy cannot hand bfloat16 to a file.
            view = np.ascontiguousarray(row.make()).reshape(-1).view(np.uint8).data
            sums.append(zlib.crc32(view))
            file.write(view)
            del view  # before the next one is made
        file.seek(0)
        file.write(_header_bytes(rows, sums, rank))  # as long as the one before


def _check_written(rows: Sequence[Tensor], path: Path) -> None:
    with TensorFile(path, Reads()) as file:
        found = {name: (info.shape, str(info.dtype)) for name, info in file.tensors.items()}
    if found != {row.name: (tuple(row.shape), row.dtype) for row in rows}:
        raise CheckpointError("A file was written, but cannot be read back.", where=str(path), got=f"{len(found)} of {len(rows)} tensors")


def _header_bytes(rows: Sequence[Tensor], sums: Sequence[int], rank: int | None) -> bytes:
    own = {_SUM + row.name: f"{crc:08x}" for row, crc in zip(rows, sums, strict=True)}
    if rank is not None:
        own[_RANK] = str(rank)
    header: dict[str, Any] = {_METADATA: {_HEADER_SUM: _NO_SUM, **own}}
    end = 0
    for row in rows:
        if row.dtype not in _CODES:
            raise UnsupportedError(f"Safetensors files hold no {row.dtype}.", where=row.name, need=", ".join(_CODES))
        start, end = end, end + math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
        header[row.name] = {"dtype": _CODES[row.dtype], "shape": list(row.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    text = text.replace(_sum_entry(_NO_SUM), _sum_entry(f"{zlib.crc32(text):08x}"), 1)
    return len(text).to_bytes(8, "little") + text

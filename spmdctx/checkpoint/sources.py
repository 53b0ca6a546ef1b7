"""A checkpoint in files per rank, read as one: any block of any tensor is assembled from the ranks that hold its parts."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from spmdctx.checkpoint.blocks import Block, block_of, overlap, shape_of_block, slices_of, whole, within
from spmdctx.checkpoint.commit import waiting
from spmdctx.checkpoint.layouts import Slicing
from spmdctx.checkpoint.tensor_file import SUFFIX, Reads, TensorFile
from spmdctx.errors import CheckpointError, message, shown
from spmdctx.plan.mindspore.file import ParameterLayout
from spmdctx.wording.files import is_inside

STRATEGY = "strategy.json"
"""The strategy file next to the folders of the ranks."""
_RANK_FOLDER = re.compile(r"rank_(0|[1-9][0-9]{0,8})")


class Piece(NamedTuple):
    """A part of a block: the ranks that hold it, the block that they hold, and what of it is wanted."""

    ranks: tuple[int, ...]
    held: Block
    wanted: Block


@functools.lru_cache(maxsize=4096)
def holders(layout: ParameterLayout, num_ranks: int) -> Mapping[Block, tuple[int, ...]]:
    """Returns the distinct blocks of a tensor, and the ranks that hold each, lowest first."""
    found: dict[Block, list[int]] = {}
    for rank in range(num_ranks):
        found.setdefault(block_of(layout, rank), []).append(rank)
    return {block: tuple(ranks) for block, ranks in found.items()}


def pieces(source: Slicing, name: str, shape: Sequence[int], block: Block) -> list[Piece]:
    """Returns the pieces from which a block of a tensor with that global shape is assembled."""
    layout = source.layouts.get(name)
    held = {whole(shape): tuple(range(source.num_ranks))} if layout is None else holders(layout, source.num_ranks)
    shared = ((own, ranks, overlap(own, block)) for own, ranks in held.items())
    return [Piece(ranks, own, wanted) for own, ranks, wanted in shared if wanted is not None]


class Sources:
    """The files of a checkpoint, opened as they are needed.

    Args:
        files: rank to file.
        source: how the checkpoint is split.
        verify: whether a file is read whole and compared with its sums before anything is taken from it.

    Raises:
        CheckpointError: a file that is missing, damaged, or does not fit the strategy; the message names it.
    """

    def __init__(self, files: Mapping[int, str | os.PathLike[str]], source: Slicing, verify: bool = False) -> None:
        self.source = source
        self._verify = verify
        self.reads = Reads()
        self._files = files
        self._open: dict[int, TensorFile] = {}
        self._stack = ExitStack()
        if not files:
            raise CheckpointError("There are no files to read.")
        if source.num_ranks == 1 and len(files) > 1:
            raise CheckpointError(
                "Several files need the strategy that they were saved with.",
                got=f"{len(files)} files",
                fix="name the source's strategy file",
            )
        extra = [rank for rank in files if rank >= source.num_ranks]
        if extra:
            raise CheckpointError("There are more files than ranks.", got=f"a file of rank {extra[0]}", need=f"{source.num_ranks} ranks")

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def names(self) -> tuple[str, ...]:
        """Returns the names of the checkpoint's tensors; every rank's file has all of them."""
        return tuple(self._file(min(self._files)).tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor."""
        layout = self.source.layouts.get(name)
        return self._file(min(self._files)).tensors[name].shape if layout is None else layout.shape

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor."""
        return str(self._file(min(self._files)).tensors[name].dtype)

    def read(self, name: str, block: Block, rank: int) -> np.ndarray:
        """Reads a block of a tensor; only the bytes of the block are read."""
        dtype = self._file(min(self._files)).tensors[name].dtype
        parts = [(piece, self._holder(piece, name, rank, dtype)) for piece in pieces(self.source, name, self.shape(name), block)]
        out = np.empty(shape_of_block(block), dtype)  # files hold the parts, so it is no larger than they are
        for piece, file in parts:
            file.read(name, within(piece.wanted, piece.held), out[slices_of(within(piece.wanted, block))] if block else out)
        return out

    def open_all(self) -> None:
        """Opens every file, and reads it where that was asked for."""
        for rank in self._files:
            self._file(rank)

    def _holder(self, piece: Piece, name: str, rank: int, dtype: np.dtype[Any]) -> TensorFile:
        """Returns the file from which to read a part: the rank's own if it holds the part, else the lowest rank's."""
        usable = [one for one in piece.ranks if one in self._files]
        if not usable:
            raise CheckpointError(
                f"The files hold only a part of '{name}'.",
                got=f"files of ranks {sorted(self._files)[:16]}",
                need=f"that of rank {' or '.join(map(str, piece.ranks[:8]))}",
            )
        own = rank % self.source.num_ranks
        file = self._file(own if own in usable else usable[0])
        info = file.tensors.get(name)
        if info is None or info.shape != shape_of_block(piece.held) or info.dtype != dtype:
            raise CheckpointError(
                f"A file does not hold '{name}' as the strategy says.",
                where=str(file.path),
                got="no such tensor" if info is None else f"{info.dtype}{list(info.shape)}",
                need=f"{dtype}{list(shape_of_block(piece.held))}",
            )
        return file

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._open:
            file = self._stack.enter_context(TensorFile(self._files[rank], self.reads))
            if file.rank not in ("", str(rank)):
                raise CheckpointError(
                    "A file holds the slices of another rank.", where=str(file.path), got=f"rank {shown(file.rank)}", need=f"rank {rank}"
                )
            if self._verify:
                file.verify()
            self._open[rank] = file
        return self._open[rank]


def rank_files(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Maps each rank to its file in a folder `directory/rank_0/a.safetensors`; the last by name if a rank has several.

    Raises:
        TypeError: the argument is not a path.
        CheckpointError: there is no such folder, or a rank's folder has no file.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(message("The folder of a checkpoint must be a path.", got=f"{directory!r} of type {type(directory).__name__}"))
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError("There is no such folder.", where=str(root))
    found: dict[int, Path] = {}
    new = waiting(root)
    for folder in root.iterdir():
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            files = {path.name: path for path in folder.glob(f"*{SUFFIX}")}
            files |= {place.name: path for name, path in new.items() for place in [root / name] if place.parent == folder}
            if not files:
                raise CheckpointError("A rank's folder has no file of its checkpoint.", where=str(folder), need=f"a file *{SUFFIX}")
            last = files[max(files)]
            check_inside(last, root)
            found[int(match[1])] = last
    if not found:
        raise CheckpointError("The folder holds no checkpoint in files per rank.", where=str(root), need=f"rank_0/*{SUFFIX}")
    return dict(sorted(found.items()))


def strategy_beside(directory: Path) -> Path | None:
    """Returns the strategy file in a folder of ranks, or None if there is none."""
    found = waiting(directory).get(STRATEGY, directory / STRATEGY)
    if not found.exists():
        return None
    check_inside(found, directory)
    return found


def check_inside(path: Path, folder: Path) -> None:
    """Refuses a file that a link has put into the folder.

    Raises:
        CheckpointError: the file lies elsewhere.
    """
    if not is_inside(path, folder):
        raise CheckpointError(
            "A link leads out of the folder of the checkpoint.", where=str(path), got=os.path.realpath(path), fix="give the files by name"
        )


def rank_file(rank: int, prefix: str) -> str:
    """Returns the path of a rank's file below the folder of its checkpoint.

    Raises:
        CheckpointError: the prefix would lead to another folder.
    """
    name = f"{prefix}{rank}{SUFFIX}"
    if Path(name).name != name or "\0" in name:
        raise CheckpointError("The prefix of a checkpoint's files is part of a name, and no path.", got=shown(prefix))
    return f"rank_{rank}/{name}"


def check_no_more_ranks(directory: Path, num_ranks: int) -> None:
    """Refuses a folder with files of ranks that a checkpoint of so many ranks does not have: it could not be loaded.

    Raises:
        CheckpointError: the folder of such a rank is named.
    """
    for folder in sorted(directory.glob("rank_*")):
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match and int(match[1]) >= num_ranks and any(folder.glob(f"*{SUFFIX}")):
            raise CheckpointError(
                "The folder holds a checkpoint of more ranks.",
                where=str(folder),
                need=f"{num_ranks} ranks",
                fix="remove it, or name another folder",
            )


def check_complete(files: Mapping[int, str | os.PathLike[str]], num_ranks: int, where: str) -> None:
    """Refuses a checkpoint with files missing.

    Raises:
        CheckpointError: the lowest rank without a file is named.
    """
    missing = sorted(set(range(num_ranks)) - set(files))
    if missing:
        raise CheckpointError(
            f"The checkpoint has no file of rank {missing[0]}.", where=where, got=f"ranks {list(files)[:16]}", need=f"{num_ranks} files"
        )

"""MindSpore's functions on files per rank: they convert one split to another without a whole tensor in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdctx.checkpoint.blocks import Block, shape_of_block, slices_of
from spmdctx.checkpoint.commit import together, waiting_place
from spmdctx.checkpoint.files import writing
from spmdctx.checkpoint.layouts import Slicing, Strategy, slicing
from spmdctx.checkpoint.sources import (
    STRATEGY,
    Sources,
    check_complete,
    check_no_more_ranks,
    pieces,
    rank_file,
    rank_files,
    strategy_beside,
)
from spmdctx.checkpoint.tensor_file import SUFFIX, Reads, Tensor, write_tensors
from spmdctx.errors import CheckpointError, UnsupportedError, message
from spmdctx.plan.mindspore.file import ParameterLayout, mindspore_name, write_layouts


class Parameter(NamedTuple):
    """A named array, as MindSpore's Parameter: a whole one, or one rank's slice."""

    data: Any
    name: str


def merge_sliced_parameter(sliced_parameters: Sequence[Any], strategy: Mapping[str, ParameterLayout] | None = None) -> Any:
    """Puts the slices of a parameter together.

    Args:
        sliced_parameters: the ranks' slices in their order: `Parameter`s, or arrays where the strategy has one entry or is None.
        strategy: layouts by name; without it slices are joined along dimension 0. Where ranks hold the same block, the last
            one's is taken.

    Returns:
        What the slices are: a Parameter or an array.

    Raises:
        TypeError: no list of arrays, or no strategy.
        CheckpointError: no slices, names that differ, or shapes that do not fit the strategy.
    """
    if not isinstance(sliced_parameters, list | tuple):
        raise TypeError(message("sliced_parameters must be a list.", got=type(sliced_parameters).__name__))
    if strategy is not None and not isinstance(strategy, Mapping):
        raise TypeError(message("strategy must be a dict of layouts by name.", got=type(strategy).__name__))
    if not sliced_parameters:
        raise CheckpointError("There are no slices to merge.")
    names = [one.name if isinstance(one, Parameter) else None for one in sliced_parameters]
    if len(set(names)) > 1:
        raise CheckpointError("The slices are of different parameters.", got=", ".join(sorted({str(name) for name in names})))
    arrays = [one.data if isinstance(one, Parameter) else one for one in sliced_parameters]
    for array in arrays:
        if not isinstance(array, np.ndarray | jax.Array):
            raise TypeError(message("Slices are arrays or Parameters.", got=type(array).__name__))
    merged = np.concatenate(arrays) if strategy is None else _merged(names[0], [np.asarray(array) for array in arrays], strategy)
    result = merged if isinstance(arrays[0], np.ndarray) else jax.numpy.asarray(merged)
    return result if names[0] is None else Parameter(result, names[0])


def _merged(name: str | None, arrays: Sequence[np.ndarray], strategy: Mapping[str, ParameterLayout]) -> np.ndarray:
    known = slicing(strategy)
    if name is None and len(known.layouts) != 1:
        raise CheckpointError("Slices without a name need a strategy of one entry.", got=f"{len(known.layouts)} entries")
    key = next(iter(known.layouts)) if name is None else mindspore_name(name)
    if key not in known.layouts:
        raise CheckpointError(f"The strategy has no '{name}'.", got=", ".join(list(known.layouts)[:4]))
    layout = known.layouts[key]
    if len(arrays) != known.num_ranks:
        raise CheckpointError(f"'{key}' needs the slices of {known.num_ranks} ranks.", got=f"{len(arrays)} slices")
    out = np.empty(layout.shape, arrays[0].dtype)
    for rank, array in enumerate(arrays):
        block = known.block(key, layout.shape, rank)
        if array.shape != shape_of_block(block):
            raise CheckpointError(
                f"The slice of rank {rank} does not fit the strategy.", where=key, got=f"{array.shape}", need=f"{shape_of_block(block)}"
            )
        out[slices_of(block)] = array
    return out


def rank_list_for_transform(
    rank_id: int, src_strategy_file: Strategy | None = None, dst_strategy_file: Strategy | None = None
) -> list[int]:
    """Returns, in order, the ranks of a checkpoint whose files one rank of another split needs.

    Args:
        rank_id: the rank of the target.
        src_strategy_file: how the checkpoint is split; None means not at all.
        dst_strategy_file: how the target is split; None means not at all.

    Raises:
        TypeError: `rank_id` is not an int, or a strategy has a wrong type.
        CheckpointError: there is no such rank, or a tensor has another shape in the target.
        PlanFormatError: a file is not a strategy file.
    """
    source, target = _pair(rank_id, src_strategy_file, dst_strategy_file)
    parts = []
    for name, layout in source.layouts.items():
        if name in target.layouts or not target.layouts:
            parts += pieces(source, name, layout.shape, _target_block(target, name, layout.shape, rank_id))
    own, found = rank_id % source.num_ranks, set[int]()
    # What few ranks hold decides; of what many hold, copies lie in the files that are needed anyway.
    for piece in sorted(parts, key=lambda piece: len(piece.ranks)):
        if found.isdisjoint(piece.ranks):
            found.add(own if own in piece.ranks else piece.ranks[0])
    return sorted(found) or [own]


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str | os.PathLike[str]],
    save_checkpoint_file_name: str | os.PathLike[str],
    src_strategy_file: Strategy | None = None,
    dst_strategy_file: Strategy | None = None,
) -> Reads:
    """Writes the file of one rank of another split; memory holds one tensor of it at a time.

    For a file in a folder `rank_<rank_id>` the strategy is also written, as `strategy.json` in the folder above. There
    `load_distributed_checkpoint` finds it when all ranks are written. Tensors that only the source's strategy names are left out;
    those that no strategy names are copied as they are.

    Args:
        rank_id: the rank of the target.
        checkpoint_files_map: the files of the checkpoint by rank; those of `rank_list_for_transform` are enough.
        save_checkpoint_file_name: the file to write, *.safetensors.
        src_strategy_file: how the checkpoint is split; None means not at all.
        dst_strategy_file: how the target is split; None means not at all.

    Returns:
        How much was read.

    Raises:
        TypeError: an argument has a wrong type.
        CheckpointError: a file is missing, damaged or does not match the strategy, or does not have a tensor.
        UnsupportedError: the file name has another suffix.
    """
    if not isinstance(checkpoint_files_map, Mapping):
        raise TypeError(message("checkpoint_files_map must be a dict of files by rank.", got=type(checkpoint_files_map).__name__))
    _check_suffix(save_checkpoint_file_name)
    source, target = _pair(rank_id, src_strategy_file, dst_strategy_file)
    with Sources(checkpoint_files_map, source) as sources:
        write_tensors(save_checkpoint_file_name, _tensors(sources, target, rank_id), rank_id)
        folder = Path(save_checkpoint_file_name).parent
        if folder.name == f"rank_{rank_id}":
            _write_strategy(folder.parent / STRATEGY, sources, target)
        return sources.reads


def transform_checkpoints(  # noqa: PLR0913  # MindSpore's arguments
    src_checkpoints_dir: str | os.PathLike[str],
    dst_checkpoints_dir: str | os.PathLike[str],
    ckpt_prefix: str,
    src_strategy_file: Strategy | None = None,
    dst_strategy_file: Strategy | None = None,
    process_num: int = 1,
    output_format: str = "safetensors",
    *,
    verify: bool = False,
) -> Reads:
    """Writes a checkpoint in another split: `src/rank_0/*.safetensors` to `dst/rank_0/<prefix>0.safetensors`, for all ranks.

    Beside the folders comes `dst/strategy.json`, so that `load_distributed_checkpoint` can be given the folder alone.

    Args:
        src_checkpoints_dir: folder of the checkpoint; of several files of a rank, the last by name is taken.
        dst_checkpoints_dir: folder to write, made where it is not there.
        ckpt_prefix: of the names of the new files.
        src_strategy_file: how the checkpoint is split; None is as `strategy.json` in its folder says where it has several ranks,
            else not at all.
        dst_strategy_file: how it is to be split; None is not at all.
        process_num: ranks that are written at the same time.
        output_format: only "safetensors".
        verify: read every file whole first, and compare its checksums.

    Returns:
        How much was read.

    Raises:
        TypeError: an argument of a wrong type.
        CheckpointError: a folder or file that is missing, or as for `transform_checkpoint_by_rank`.
        UnsupportedError: another format.
    """
    if output_format != "safetensors":
        raise UnsupportedError("Checkpoints are written as safetensors.", got=f"output_format {output_format!r}")
    if isinstance(process_num, bool) or not isinstance(process_num, int) or not isinstance(ckpt_prefix, str):
        raise TypeError(message("process_num is an int and ckpt_prefix a string.", got=f"{process_num!r} and {ckpt_prefix!r}"))
    files = rank_files(src_checkpoints_dir)
    if src_strategy_file is None and len(files) > 1:
        src_strategy_file = strategy_beside(Path(src_checkpoints_dir))
    source, target = slicing(src_strategy_file), slicing(dst_strategy_file)
    check_complete(files, source.num_ranks, str(src_checkpoints_dir))

    root, names = Path(dst_checkpoints_dir), [rank_file(rank, ckpt_prefix) for rank in range(target.num_ranks)]
    check_no_more_ranks(root, target.num_ranks)

    def one(rank: int) -> Reads:
        with Sources(files, source) as sources:
            write_tensors(waiting_place(root, names[rank]), _tensors(sources, target, rank), rank)
            return sources.reads

    total = Reads()
    with together(root, [*names, STRATEGY]):
        with Sources(files, source, verify) as sources:
            if verify:
                sources.open_all()
            _write_strategy(waiting_place(root, STRATEGY), sources, target)
            total.add(sources.reads)
        with ThreadPoolExecutor(max(1, process_num)) as pool:
            for reads in pool.map(one, range(target.num_ranks)):
                total.add(reads)
    return total


def _pair(rank_id: int, source: Strategy | None, target: Strategy | None) -> tuple[Slicing, Slicing]:
    if isinstance(rank_id, bool) or not isinstance(rank_id, int):
        raise TypeError(message("rank_id must be an int.", got=f"{rank_id!r} of type {type(rank_id).__name__}"))
    found = slicing(source), slicing(target)
    if not 0 <= rank_id < found[1].num_ranks:
        raise CheckpointError("The target has no such rank.", got=f"rank_id {rank_id}", need=f"0 to {found[1].num_ranks - 1}")
    return found


def _check_suffix(path: str | os.PathLike[str]) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(message("save_checkpoint_file_name must be a path.", got=f"{path!r} of type {type(path).__name__}"))
    if Path(path).suffix != SUFFIX:
        raise UnsupportedError(f"Checkpoints are written as {SUFFIX} files.", got=Path(path).name)


def _tensors(sources: Sources, target: Slicing, rank: int) -> Iterator[Tensor]:
    """Yields the tensors in the file of a target's rank; each is read when it is written."""
    names = sources.names()
    missing = [name for name in target.layouts if name not in names]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no '{missing[0]}'.", got=", ".join(names[:4]), need="the tensors of the target's strategy"
        )
    for name in _kept(sources, target):
        block = _target_block(target, name, sources.shape(name), rank)
        yield Tensor(name, shape_of_block(block), sources.dtype(name), partial(sources.read, name, block, rank))


def _kept(sources: Sources, target: Slicing) -> list[str]:
    """Returns the checkpoint's tensors that the target takes: those that its strategy names, and those that neither names."""
    return [name for name in sources.names() if name in target.layouts or name not in sources.source.layouts or not target.layouts]


def _write_strategy(path: Path, sources: Sources, target: Slicing) -> None:
    """Says how the ranks' files are split, as `save_distributed_checkpoint` does."""
    shapes = {name: sources.shape(name) for name in _kept(sources, target)}
    whole = {name: ParameterLayout((target.num_ranks,), ((),) * len(shape), shape) for name, shape in shapes.items()}
    with writing():
        write_layouts({**whole, **target.layouts}, path)


def _target_block(target: Slicing, name: str, shape: tuple[int, ...], rank: int) -> Block:
    layout = target.layouts.get(name)
    if layout is not None and layout.shape != shape:
        raise CheckpointError(f"'{name}' has another shape in the target's strategy.", got=str(list(layout.shape)), need=str(list(shape)))
    return target.block(name, shape, rank)

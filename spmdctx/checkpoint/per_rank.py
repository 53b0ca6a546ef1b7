"""Saves a state to files per rank and loads such files into a state; each device's block is read separately."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx.checkpoint.blocks import Block, layout_sharding, shape_of_block
from spmdctx.checkpoint.commit import together, waiting_place
from spmdctx.checkpoint.files import writing
from spmdctx.checkpoint.layouts import Layouts, Slicing, Strategy, rank_devices, slicing, state_layouts
from spmdctx.checkpoint.parts.leaves import shared_leaves
from spmdctx.checkpoint.sources import STRATEGY, Sources, check_complete, check_no_more_ranks, rank_file, rank_files, strategy_beside
from spmdctx.checkpoint.tensor_file import SUFFIX, Reads, Tensor, write_tensors
from spmdctx.checkpoint.tree import StateTree, Stored, from_stored, stored_form, to_stored
from spmdctx.context.layers import current_context
from spmdctx.errors import CheckpointError, UnsupportedError, message
from spmdctx.plan.mindspore.file import ParameterLayout, mindspore_name, write_layouts


class Loaded(NamedTuple):
    """A network with its parameters loaded, and how much was read."""

    network: Any
    reads: Reads


def save_distributed_checkpoint(
    network: Any, directory: str | os.PathLike[str], ckpt_prefix: str = "checkpoint", *, enc_key: bytes | None = None
) -> Layouts:
    """Writes what each device holds: `directory/rank_0/<prefix>0.safetensors`, and `directory/strategy.json`, which says what that is.

    A rank is a device, in the order of the arrays' mesh. Each process writes the files of its devices; all return together. The files
    get their names when all are complete: a checkpoint that the folder held stays until then, and needs its space.
    A dict by the names of a step's arguments gives tensors the names that they have in its plans and strategy files.

    Args:
        network: arrays in nnx objects, pytrees or both.
        directory: made where it is not there.
        ckpt_prefix: of the names of the files.
        enc_key: must be None.

    Returns:
        The layouts by name.

    Raises:
        UnsupportedError: `enc_key` is set, an array is on no mesh, or a dtype that safetensors files do not hold.
        CheckpointError: arrays on different devices, or a file that cannot be written; the file of that name is as it was.
    """
    _refuse_encryption("enc_key", enc_key)
    tree, layouts = StateTree(network), state_layouts(network)
    root = Path(directory)
    forms = [stored_form(path, leaf) for path, leaf in zip(tree.paths, tree.leaves, strict=True)]
    arrays = [to_stored(leaf, is_shared=own) for leaf, own in zip(tree.leaves, shared_leaves(tree), strict=True)]
    num_ranks = slicing(layouts).num_ranks if layouts else 1
    check_no_more_ranks(root, num_ranks)
    devices = rank_devices(getattr(array, "sharding", None) for array in arrays)[:num_ranks]
    names = [rank_file(rank, ckpt_prefix) for rank in range(num_ranks)]
    own = {name: device for name, device in zip(names, devices, strict=True) if device.process_index == jax.process_index()}
    first = [STRATEGY] if jax.process_index() == 0 else []
    with together(root, [*names, STRATEGY], [*own, *first]):
        for rank, name in enumerate(names):
            if name not in own:
                continue
            device = own[name]
            rows = [_tensor(path, form, array, device) for path, form, array in zip(tree.paths, forms, arrays, strict=True)]
            write_tensors(waiting_place(root, name), rows, rank)
        if first:
            with writing():
                write_layouts(layouts, waiting_place(root, STRATEGY))
    return layouts


def _tensor(path: str, form: Stored, array: Any, device: Any) -> Tensor:
    own = {shard.device: shard.data for shard in array.addressable_shards} if isinstance(array, jax.Array) else {}
    block = own.get(device, array)  # what lies on one device alone is whole
    return Tensor(mindspore_name(path), tuple(block.shape), form.dtype, partial(np.asarray, block))


def load_distributed_checkpoint(  # noqa: PLR0913  # MindSpore's arguments
    network: Any,
    checkpoint_filenames: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    predict_strategy: Strategy | None = None,
    train_strategy_filename: Strategy | None = None,
    strict_load: bool = False,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    format: str = "safetensors",
    *,
    verify: bool = False,
) -> Loaded:
    """Loads files per rank into a network that is split differently; each device's block is read by itself, and only its bytes.

    Args:
        network: the target of the load: nnx objects, which take the values over, or pytrees; of arrays or shapes.
        checkpoint_filenames: the files in the order of the ranks, or the folder of `rank_0`, `rank_1`, ...
        predict_strategy: how the network is split: the result of `infer_predict_layout`, or a strategy file. Tensors that it does
            not name are whole on each device. Without it, tensors are placed like the network's own.
        train_strategy_filename: how the checkpoint is split; by default strategy_ckpt_load_file of the context, else
            `strategy.json` in the folder.
        strict_load: whether names and dtypes must be the same. If not, a name may be the end of another, such as that of a model
            that was saved with its optimizer. Floating numbers then convert to floating ones, and whole numbers to whole ones.
        dec_key: must be None.
        dec_mode: without effect.
        format: only "safetensors".
        verify: first read every needed file as a whole and compare its checksums. Without it only tensors that are read whole are
            compared, and not those of which a part is needed.

    Raises:
        UnsupportedError: `dec_key` is set, or the format is another one.
        CheckpointError: a file is missing or damaged, or has no fitting tensor; the message names it.
        TypeError: an argument has a wrong type.
    """
    _refuse_encryption("dec_key", dec_key)
    if format != "safetensors":
        raise UnsupportedError("Checkpoints are read from safetensors files.", got=f"format {format!r}", fix="save them as safetensors")
    files, source = complete_files(checkpoint_filenames, train_strategy_filename)
    tree = StateTree(network)
    target = None if predict_strategy is None else slicing(predict_strategy)
    with Sources(files, source, verify) as sources:
        leaves = []
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            form = stored_form(path, leaf)
            name = _found(mindspore_name(path), sources.names(), strict_load)
            _check(name, sources, form, strict_load)
            sharding = getattr(leaf, "sharding", None) if target is None else _target(target, mindspore_name(path), form.shape, strict_load)
            leaves.append(from_stored(leaf, _array(sources, name, form, sharding), form, sharding))
        return Loaded(tree.filled(leaves), sources.reads)


def complete_files(
    names: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], train_strategy: Strategy | None
) -> tuple[dict[int, str | os.PathLike[str]], Slicing]:
    """Returns the file of each rank, and how they are split; arguments as for `load_distributed_checkpoint`.

    Raises:
        CheckpointError: a file is missing, or the strategy cannot be read.
        TypeError: an argument has a wrong type.
    """
    files, beside = _files(names)
    source = slicing(train_strategy or current_context().strategy_ckpt_load_file or beside or None)
    check_complete(files, source.num_ranks, str(next(iter(files.values()))))
    return files, source


def _refuse_encryption(name: str, key: object) -> None:
    if key is not None:
        raise UnsupportedError(
            f"Encrypted checkpoints are not supported: {name} must be None.", fix="encrypt the file system, or decrypt the files first"
        )


def _files(given: Any) -> tuple[dict[int, Any], str]:
    """Returns the file of each rank, and the strategy file in their folder, if there is one."""
    if isinstance(given, str | os.PathLike) and Path(given).suffix != SUFFIX:
        files, beside = rank_files(given), strategy_beside(Path(given))
        return dict(files), "" if beside is None else str(beside)
    names = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | os.PathLike) for name in names):
        raise TypeError(message("checkpoint_filenames must be a list of paths, or a folder.", got=repr(given)[:80]))
    return dict(enumerate(names)), ""


def _target(target: Slicing, name: str, shape: tuple[int, ...], strict: bool) -> Any:
    """Returns the sharding of a tensor; one that the strategy does not name is whole on each of its devices."""
    fitting = _called(name, target.layouts, strict)
    layout = target.layouts[fitting[0]] if len(fitting) == 1 else ParameterLayout((target.num_ranks,), ((),) * len(shape), shape)
    if layout.shape != shape:
        raise CheckpointError(f"predict_strategy has another '{name}'.", got=str(list(layout.shape)), need=str(list(shape)))
    return layout_sharding(layout, jax.devices())


def _found(name: str, known: Sequence[str], strict: bool) -> str:
    fitting = _called(name, known, strict)
    if len(fitting) == 1:
        return fitting[0]
    last = name.rpartition(".")[2]
    near = fitting or [own for own in known if own.rpartition(".")[2] == last] or list(known)
    raise CheckpointError(f"The checkpoint has {'several' if fitting else 'no'} '{name}'.", got=", ".join(near[:4]))


def _called(name: str, known: Iterable[str], strict: bool) -> list[str]:
    """Returns the entry of that name; if not strict, the shortest entries that end with the name or are its end."""
    own = list(known)
    if name in own or strict:
        return [name] if name in own else []
    ends = [one for one in own if one.endswith(f".{name}") or name.endswith(f".{one}")]
    return [one for one in ends if len(one) == min(map(len, ends))]


def _check(name: str, sources: Sources, form: Stored, strict: bool) -> None:
    shape, dtype = sources.shape(name), sources.dtype(name)
    kinds = [jnp.dtype(dtype), jnp.dtype(form.dtype)]
    alike = any(all(jnp.issubdtype(kind, family) for kind in kinds) for family in (jnp.floating, jnp.integer))
    if shape != form.shape or (dtype != form.dtype and (strict or not alike or bool(form.key))):
        raise CheckpointError(f"The checkpoint holds another '{name}'.", got=f"{dtype}{list(shape)}", need=str(form))


def _array(sources: Sources, name: str, form: Stored, sharding: Any) -> Any:
    """Reads the tensor: to the host if it has no sharding, else as an array whose blocks are read one after the other."""
    if sharding is None or form.key:
        return sources.read(name, tuple((0, size) for size in form.shape), 0).astype(form.dtype, copy=False)
    wanted: dict[Block, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(form.shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index, form.shape, strict=True)]
        wanted.setdefault(tuple(bounds), []).append(device)
    ranks = {device: rank for rank, device in enumerate(rank_devices([sharding]))}
    placed: Mapping[Any, Any] = {}
    for block, devices in wanted.items():
        value = sources.read(name, block, ranks.get(devices[0], 0)).astype(form.dtype, copy=False)
        assert value.shape == shape_of_block(block)
        placed = {**placed, **{device: jax.device_put(value, device) for device in devices}}
    return jax.make_array_from_single_device_arrays(form.shape, sharding, list(placed.values()))

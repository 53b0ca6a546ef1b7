"""What one instruction of a compiled program does: FLOPs of its matrix products, bytes to and from HBM, the compiler's cycles."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from benchmarks.judge_library import kind_of, library_bytes, library_flops, library_kind
from spmdctx.audit.hlo import Computation, Instruction, Module, read_leaves
from spmdctx.ir.graph import item_bytes

_ARRAY = re.compile(r"\b[a-z][a-z0-9]*\[[\d,]*\](?:\{[^}]*\})?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")
_PICKING = ("dynamic-slice", "slice", "gather")

_NAMES = "parameter constant bitcast tuple get-tuple-element after-all partition-id replica-id opt-barrier add-dependency custom-call"
FREE = frozenset({*_NAMES.split(), "fusion-done"})
"""Opcodes that take no time of their own, but calls of libraries (custom calls of a scheduled TPU program join or mark buffers)."""


class Work(NamedTuple):
    """Of one execution on one device.

    `wide_flops` are those of `flops` on operands of four bytes or more, `kind` is of `judge_kinds`. `lane_flops` are not among them: what
    keeps the vector unit of a TPU as busy, at its full rate, as its convolutions of single channels do.
    """

    flops: float
    hbm_bytes: float
    cycles: float
    wide_flops: float = 0.0
    kind: str = ""
    lane_flops: float = 0.0


class _Products(NamedTuple):
    flops: float = 0.0
    wide: float = 0.0
    lanes: float = 0.0


def work_of(instruction: Instruction, computation: Computation, module: Module) -> Work:
    """What an instruction does; nothing for those that only name buffers."""
    if _is_ragged_product(instruction):
        own = (_ragged_flops(instruction, computation), _hbm_bytes(instruction, computation, None, module))
        return Work(*own, 0.0, kind="product")
    if library_kind(instruction):
        operands = [leaf for name in instruction.operands for leaf in computation.instructions[name].leaves]
        flops = library_flops(instruction, operands, _convolution_flops)
        wide = flops if _is_wide(operands[0].dtype) else 0.0
        return Work(flops, library_bytes(instruction, operands), 0.0, wide, kind_of(instruction, module))
    if instruction.opcode in FREE:
        return Work(0.0, 0.0, 0.0)
    found = _CYCLES.search(instruction.attributes)
    called = _called(instruction, module)
    if instruction.opcode == "fusion-start" and called and called.root:
        # GPUs run it beside others; its own shape lists the operands, too.
        instruction = instruction._replace(shape=called.root.shape)
    made = _products(called, module) if called else _product(instruction, computation)
    cycles = float(found.group(1)) if found else 0.0
    moved = _hbm_bytes(instruction, computation, called, module)
    return Work(made.flops, moved, cycles, made.wide, kind_of(instruction, module), made.lanes)


def _is_wide(dtype: str) -> bool:
    return item_bytes(dtype) > 2


def _product(one: Instruction, computation: Computation) -> _Products:
    lanes = _lane_flops(one, computation) if one.opcode == "convolution" else 0.0
    flops = 0.0 if lanes else _product_flops(one, computation)
    wide = flops if flops and _is_wide(computation.instructions[one.operands[0]].leaves[0].dtype) else 0.0
    return _Products(flops, wide, lanes)


_LANES = 128
_IMAGE_SHARE, _KERNEL_SHARE = 0.24, 0.85
"""The part of the vector unit's rate that the compiler's cycles give convolutions of single channels, and gradients of their kernels.

Of 14 shapes on v5e, v5p and v6e, the padding counted: 0.20 to 0.25, and 0.73 to 0.96 (kernels of 3: 0.4 to 1.08). Strides: about 0.1.
"""


def _lane_flops(one: Instruction, computation: Computation) -> float:
    """Those of a convolution whose groups have one feature each; the unit multiplies padding as well, and whole lanes of channels."""
    labels, groups = _LABELS.search(one.attributes), _GROUPS.search(one.attributes)
    if labels is None or groups is None:
        return 0.0
    kernel, out = (read_leaves(shape)[0].shape for shape in (computation.instructions[one.operands[1]].shape, one.shape))
    _, kernel_labels, out_labels = labels.groups()
    channels = out[out_labels.index("f")]
    one_each = kernel[kernel_labels.index("i")] == 1 if groups.group(1) == "feature" else channels == int(groups.group(2))
    window = math.prod(kernel) / kernel[kernel_labels.index("o")]
    share = _IMAGE_SHARE if groups.group(1) == "feature" else _KERNEL_SHARE
    return 2.0 * math.prod(out) / channels * -(-channels // _LANES) * _LANES * window / share if one_each else 0.0


def _is_ragged_product(one: Instruction) -> bool:
    """The kernel of `jax.lax.ragged_dot`, whose name is the compiler's."""
    return one.opcode == "custom-call" and one.name.startswith("ragged-dot") and not one.name.startswith("ragged-dot-metadata")


def _ragged_flops(one: Instruction, computation: Computation) -> float:
    """Each row, of the left operand, meets the matrix of one group; these are the right operand, and the last one."""
    left, right = (read_leaves(computation.instructions[name].shape)[0].shape for name in one.operands[-2:])
    return 2.0 * left[0] * math.prod(right[1:])


def hbm_size(shape: str) -> int:
    """Bytes of a shape's arrays that lie in HBM; memory spaces other than 0 are on the chip."""
    return sum(_size(text) for text in _ARRAY.findall(shape) if "S(" not in text)


def full_size(shape: str) -> int:
    """Bytes of a shape's arrays, wherever they are."""
    return sum(_size(text) for text in _ARRAY.findall(shape))


def _size(text: str) -> int:
    return sum(leaf.num_bytes for leaf in read_leaves(text))


def _called(instruction: Instruction, module: Module) -> Computation | None:
    names = instruction.callees("calls") if instruction.opcode in ("fusion", "fusion-start") else ()
    return module.computations.get(names[0]) if names else None


def _hbm_bytes(instruction: Instruction, computation: Computation, called: Computation | None, module: Module) -> float:
    updated = _update(called)
    if updated is not None:
        return 2.0 * updated
    reads = [_read(position, instruction, computation, called, module) for position in range(len(instruction.operands))]
    if instruction.opcode in _PICKING:
        reads = [hbm_size(instruction.shape)]
    scattered = _scattered(instruction, computation, called)
    if scattered is not None:
        # A scatter adds to its first operand in place: it reads and writes the rows that it meets.
        place, size = scattered
        return sum(reads[:place] + reads[place + 1 :]) + 2.0 * min(size, hbm_size(instruction.shape))
    return sum(reads) + _written(instruction, called)


def _read(position: int, instruction: Instruction, computation: Computation, called: Computation | None, module: Module) -> float:
    operand = computation.instructions.get(instruction.operands[position])
    if operand is None or operand.shape.startswith("("):
        return 0.0
    whole = hbm_size(operand.shape)
    return min(whole, _picked(called, position, module)) if called and whole else whole


def _scattered(instruction: Instruction, computation: Computation, called: Computation | None) -> tuple[int, int] | None:
    """The operand into which a scatter, or a fusion that ends in one, adds, and the bytes of what it adds."""
    one, home = (called.root, called) if called and called.root else (instruction, computation)
    if one.opcode != "scatter" or len(one.operands) != 3:
        return None
    if called and one.operands[0] not in called.parameters:
        return None
    size = full_size(home.instructions[one.operands[2]].shape)
    return called.parameters.index(one.operands[0]) if called else 0, size


def _written(instruction: Instruction, called: Computation | None) -> float:
    """Bytes of the results, of a part written in place only the part; those of a collective inside, or passed through it, are its own."""
    if called is None or called.root is None:
        return hbm_size(instruction.shape)
    root = called.root
    made = [called.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    results = _ARRAY.findall(instruction.shape)
    if len(results) != len(made):
        return 0 if _is_collective(root) else hbm_size(instruction.shape)
    apart = any(map(_is_collective, called.instructions.values()))
    kept = [not (apart and (_is_collective(one) or one.opcode == "parameter")) for one in made]
    return sum(min(hbm_size(shape), _part(called, one)) for shape, one, own in zip(results, made, kept, strict=True) if own)


def _part(called: Computation, one: Instruction) -> float:
    """Bytes of the update, where a result is a buffer into which a part is written."""
    source = _behind_names(called, one.name)
    update = called.instructions.get(source.operands[1]) if source.opcode == "dynamic-update-slice" else None
    return full_size(update.shape) if update else math.inf


def _is_collective(one: Instruction) -> bool:
    return one.opcode.startswith(_COLLECTIVES) or "AsyncCollective" in one.attributes


def _picked(called: Computation, position: int, module: Module) -> float:
    """Bytes that a fusion reads of an operand: those of the slices, where it, or a fusion inside, only takes slices of it.

    None of a collective's, and of a buffer into which it writes a part.
    """
    parameters = called.parameters
    if position >= len(parameters):
        return math.inf
    return _picked_as(parameters[position], called, module)


def _picked_as(name: str, called: Computation, module: Module) -> float:
    users = [one for one in called.instructions.values() if name in one.operands]
    if any(map(_is_collective, called.instructions.values())):
        users = [one for one in users if not _is_collective(one) and one.opcode != "tuple"]
        if not users:
            return 0.0
    return sum(_picked_by(one, name, called, module) for one in users) if users else math.inf


def _picked_by(user: Instruction, name: str, home: Computation, module: Module) -> float:
    if user.opcode == "bitcast" and not user.is_root:
        return _picked_as(user.name, home, module)
    if user.opcode == "dynamic-update-slice" and name not in user.operands[1:]:
        return 0.0
    inner = _called(user, module)
    if inner is not None:
        return sum(_picked(inner, place, module) for place, operand in enumerate(user.operands) if operand == name)
    return float(full_size(user.shape)) if user.opcode in _PICKING and user.operands[0] == name else math.inf


def _update(called: Computation | None) -> int | None:
    """Bytes of the updates, where a fusion writes into parts of buffers in place."""
    if called is None or called.root is None:
        return None
    root = called.root
    made = [_behind_names(called, name) for name in root.operands] if root.opcode == "tuple" else [_behind_names(called, root.name)]
    if any(one.opcode != "dynamic-update-slice" for one in made):
        return None
    updates = [called.instructions.get(one.operands[1]) for one in made]
    return sum(full_size(one.shape) for one in updates if one) if all(updates) else None


def _behind_names(called: Computation, name: str) -> Instruction:
    """The instruction that makes a value, behind those that only name it otherwise."""
    one = called.instructions[name]
    while one.opcode == "bitcast":
        one = called.instructions[one.operands[0]]
    return one


def _products(computation: Computation, module: Module) -> _Products:
    """The products of a fusion, added up."""
    total = _Products()
    for one in computation.instructions.values():
        inner = _called(one, module)
        own = _products(inner, module) if inner else _product(one, computation)
        total = _Products(*(first + second for first, second in zip(total, own, strict=True)))
    return total


def _product_flops(one: Instruction, computation: Computation) -> float:
    """2 per multiplication that meets no padding; the TPU compiler writes every matrix product as a convolution."""
    if one.opcode == "dot":
        return _dot_flops(one, computation)
    labels = _LABELS.search(one.attributes)
    if one.opcode != "convolution" or labels is None:
        return 0.0
    shapes = [read_leaves(computation.instructions[name].shape)[0].shape for name in one.operands]
    flops = _convolution_flops(shapes[0], shapes[1], read_leaves(one.shape)[0].shape, labels.groups(), one.attributes)
    is_apart = "conv_general" in one.attributes and max(_read_window(one.attributes)["lhs_dilate"], default=1) > 1
    return flops * _BESIDE_ZEROS if is_apart else flops


_BESIDE_ZEROS = 2.0
"""How often the compiler's cycles count what meets no zero, where a convolution puts elements apart (gradients behind a stride).

Of 18 shapes (strides of 2 to 4, kernels of 2 to 7): 1.2 to 2.6, half of them 2.0 to 2.2, once four. Products of a batch are written so,
too, and multiply no zeros.
"""


def _dot_flops(one: Instruction, computation: Computation) -> float:
    """2 per multiplication of a product that is written as such, as on GPU."""
    contracted = _CONTRACTED.search(one.attributes)
    left = read_leaves(computation.instructions[one.operands[0]].shape)[0].shape
    dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
    return 2.0 * math.prod(read_leaves(one.shape)[0].shape) * math.prod(left[dim] for dim in dims)


def _convolution_flops(left: Sequence[int], right: Sequence[int], out: Sequence[int], labels: Sequence[str], attributes: str) -> float:
    left_labels, right_labels, out_labels = labels
    flops = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * right[right_labels.index("i")]
    window = _read_window(attributes)
    for place, label in enumerate(sorted(label for label in out_labels if label.isdigit())):
        sizes = (left[left_labels.index(label)], right[right_labels.index(label)], out[out_labels.index(label)])
        flops *= _valid(*sizes, *(window[key][place] if place < len(window[key]) else default for key, default in _DEFAULTS))
    return flops


_DEFAULTS = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))


def _read_window(attributes: str) -> dict[str, list[int]]:
    window: dict[str, list[int]] = {key: [] for key, _ in _DEFAULTS}
    found = _WINDOW.search(attributes)
    for word in found.group(1).split() if found else ():
        key, _, value = word.partition("=")
        if key in window:
            # Only the padding before the first element shifts positions.
            window[key] = [int(part.split("_")[0]) for part in value.split("x")]
    return window


@lru_cache(maxsize=4096)
def _valid(left: int, right: int, out: int, stride: int, pad: int, left_step: int, right_step: int) -> int:
    """Pairs of output and kernel positions that meet a true element of the input."""
    starts = np.arange(out, dtype=np.int64) * stride - pad
    reach = (left - 1) * left_step
    total = 0
    for kernel in range(right):
        places = starts + kernel * right_step
        total += int(((places >= 0) & (places <= reach) & (places % left_step == 0)).sum())
    return total

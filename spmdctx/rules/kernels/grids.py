"""The rule of a Pallas kernel: devices share the steps of a grid axis if its blocks are independent, and the kernel cannot tell them apart.

A grid axis can be shared if the kernel never asks which of its steps it runs, if every index that depends on it depends on nothing else,
and if equal parts of its steps read and write equal parts of each tensor: then a part runs as the whole does, on a smaller grid. Batch
and heads of an attention kernel are such axes, and so is each axis that `jax.vmap` adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spmdctx.ir.rule import DimFactors, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, replicate
from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.rules.kernels.index_maps import axes_of_indices, indices_along
from spmdctx.rules.registry import rule

_ASKS_FOR_STEP = frozenset({"program_id", "num_programs"})

_HAS_STATE = frozenset({"prng_seed", "prng_random_bits", "debug_print", "debug_callback"})
"""Primitives by which steps of a grid depend on each other, or act outside of the kernel."""


class SharedAxis(NamedTuple):
    """A grid axis whose steps devices can share."""

    axis: int
    """The axis of the grid."""
    parts: int
    """The most equal parts of its steps."""
    dims: tuple[int | None, ...]
    """For each operand and result, in order, the dimension that is split with the steps; None where all of it is read."""


class _Window(NamedTuple):
    """How one dimension of a tensor is cut into the blocks that a step of the grid sees."""

    size: int
    """Of the dimension."""
    stride: int
    """Elements from one index to the next."""
    extent: int
    """Elements of a block."""


@rule("pallas_call")
def pallas_call(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Gives each shared axis of the grid a factor; factor `i` splits the `i`-th of `shared_axes`."""
    shared = shared_axes(params)
    if not shared:
        return replicate(operands, results, "has no grid axis of which devices can run parts; wrap it in shard_map to split it")
    builder = RuleBuilder()
    factors = [builder.factor(own.parts) for own in shared]
    tensors: list[list[DimFactors]] = []
    for place, shape in enumerate((*operands, *results)):
        dims: list[DimFactors] = [()] * len(shape)
        for factor, own in zip(factors, shared, strict=True):
            dim = own.dims[place]
            if dim is not None:
                dims[dim] = factor + builder.factor(shape[dim] // own.parts, blocked=True)
        tensors.append(dims)
    return builder.build(tensors[: len(operands)], tensors[len(operands) :])


def shared_axes(params: Mapping[str, Any]) -> list[SharedAxis]:
    """Returns the grid axes of a `pallas_call` whose steps devices can share, outermost first."""
    grid = params["grid_mapping"]
    if not all(isinstance(size, int) for size in grid.grid) or grid.grid_names is not None or params.get("mesh") is not None:
        return []
    asked = _asked_axes(opened(params["jaxpr"]), _visible_axes(grid))
    if asked is None:
        return []
    found = []
    for axis, size in enumerate(grid.grid):
        own = _shared(grid, axis, params["input_output_aliases"]) if axis not in asked and size > 1 else None
        if own is not None:
            found.append(own)
        elif grid.scratch_avals and size > 1:
            # Scratch memory lives from step to step: only the steps of outer axes start with nothing that they may read.
            break
    return found


def _visible_axes(grid: Any) -> list[int]:
    """Returns the grid axes that a kernel can ask for, in the order in which it counts them."""
    return [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]


def _asked_axes(kernel: Any, visible: Sequence[int]) -> set[int] | None:
    """Returns the grid axes whose step a kernel asks for; None if its steps depend on each other in another way."""
    asked: set[int] = set()
    for eqn in _equations(kernel):
        if eqn.primitive.name in _HAS_STATE:
            return None
        if eqn.primitive.name in _ASKS_FOR_STEP:
            axis = eqn.params["axis"]
            # An axis out of range belongs to a grid inside of the kernel.
            asked.update(visible[axis : axis + 1])
    return asked


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn.params):
            yield from _equations(opened(body))


def _shared(grid: Any, axis: int, aliases: Sequence[tuple[int, int]]) -> SharedAxis | None:
    """Returns how devices share an axis, in as many parts as all blocks allow; None if they cannot."""
    dims: list[int | None] = [None] * grid.num_index_operands
    starts: list[tuple[_Window, list[int]]] = []
    for mapping in grid.block_mappings:
        read = [dim for dim, axes in enumerate(axes_of_indices(opened(mapping.index_map_jaxpr), len(grid.grid))) if axis in axes]
        if len(read) > 1:
            return None
        dims.append(read[0] if read else None)
        if read:
            found = _starts(mapping, read[0], axis, grid.grid)
            if found is None:
                return None
            starts.append(found)
    results = dims[len(dims) - grid.num_outputs :]
    paired = all(dims[operand] == results[result] for operand, result in aliases)
    if None in results or not paired:
        return None
    size = grid.grid[axis]
    parts = next((parts for parts in range(size, 1, -1) if size % parts == 0 and all(_fits(*own, parts) for own in starts)), 1)
    return SharedAxis(axis, parts, tuple(dims)) if parts > 1 else None


def _starts(mapping: Any, dim: int, axis: int, grid: Sequence[int]) -> tuple[_Window, list[int]] | None:
    """Returns the window of a dimension, and the first element of its block at each step of the one axis that it depends on."""
    jaxpr = opened(mapping.index_map_jaxpr)
    if len(jaxpr.outvars) != len(mapping.block_shape) or axes_of_indices(jaxpr, len(grid))[dim] != {axis}:
        return None
    window = _window(mapping.block_shape[dim], mapping.array_aval.shape[dim])
    indices = indices_along(jaxpr, dim, axis, grid[axis])
    if window is None or indices is None:
        return None
    return window, [index * window.stride for index in indices]


def _window(block: Any, size: int) -> _Window | None:
    """Returns the window of a dimension, by the kind of its block; kinds whose blocks have no fixed place have none."""
    match type(block).__name__:
        case "Squeezed":
            return _Window(size, 1, 1)
        case "Blocked":
            return _Window(size, block.block_size, block.block_size)
        case "Element" if tuple(block.padding) == (0, 0):
            return _Window(size, 1, block.block_size)
    return None


def _fits(window: _Window, starts: Sequence[int], parts: int) -> bool:
    """Returns whether each part of the steps sees the same blocks within an equal part of the dimension."""
    if window.size % parts:
        return False
    steps, elements = len(starts) // parts, window.size // parts
    first = starts[:steps]
    if not all(start >= 0 and start + window.extent <= elements for start in first):
        return False
    return all(start == first[step % steps] + elements * (step // steps) for step, start in enumerate(starts))


def kernel_flops(params: Mapping[str, Any]) -> int:
    """Returns the operations of a kernel over its whole grid: what its author says, or those of its body at each step."""
    estimate = params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    steps = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return steps * _body_flops(opened(params["jaxpr"]))


def _body_flops(jaxpr: Any) -> int:
    """Counts the operations of a body: its dearest branches, and each loop once where its length is not known."""
    total = 0
    for eqn in jaxpr.eqns:
        bodies = [_body_flops(opened(body)) for body in bodies_of(eqn.params)]
        if bodies:
            total += eqn.params.get("length", 1) * (max(bodies) if eqn.primitive.name == "cond" else sum(bodies))
        elif eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name not in _WITHOUT_ARITHMETIC:
            total += max((math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape")), default=0)
    return total


_WITHOUT_ARITHMETIC = frozenset(
    {"get", "swap", "load", "masked_load", "masked_swap", "broadcast_in_dim", "reshape", "convert_element_type", "transpose"}
)
"""Primitives of kernels that move data and compute nothing."""

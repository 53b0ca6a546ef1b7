"""Rules of gather and scatter: batch, index, offset, window and looked-up dimensions.

XLA's partitioner handles a split of each as follows (seen in compiled programs; `tests/rules/test_indexing.py` repeats it):

* index dimensions and batching dimensions of a gather, and full windows of gathers and scatters: no communication;
* the looked-up dimension of a gather (a vocabulary-parallel embedding): each device looks up what it holds and masks the
  rest; one all-reduce of the result's block, for every such dimension;
* the written-into dimension of a scatter: each device drops the updates of other devices; no communication;
* the updates of a scatter-add, -mul, -min, -max (an embedding's gradient over a split batch): one all-reduce of the
  result's block, for every such dimension. XLA all-gathers the updates of a plain scatter and a scatter-sub first, so
  they stay whole, as do windows that cover a part of their dimension.

One exception: a scatter of a single update into a split dimension becomes a dynamic-slice. XLA may merge it with the one
that cut the operand and drop a clamp; devices that should write nothing then write a wrong row (openxla/xla#49121, seen
with jax 0.10.2). There the written-into dimensions stay whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import RuleFn, rule

COMBINER_OF_SCATTER = {"scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max"}
"""The combiner of the updates of one element, for the scatters whose updates can be split."""


@rule("gather")
def gather(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Looks up `[index, coordinates]` in `[looked up, offset]`, which gives `[index, offset]`; both have the batching dimensions."""
    numbers, windows = params["dimension_numbers"], params["slice_sizes"]
    operand, indices = operands[0], operands[1]
    builder = RuleBuilder()
    index = builder.factors(indices[:-1])
    batching = _paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims, index)
    outside = {*numbers.collapsed_slice_dims, *batching}
    source: list[DimFactors] = []
    offsets: list[DimFactors] = []
    for dim, (size, window) in enumerate(zip(operand, windows, strict=True)):
        own, offset = (batching[dim], ()) if dim in batching else _looked_up(builder, size, window)
        source.append(own)
        if dim not in outside:
            offsets.append(offset)
    result = _interleaved(len(results[0]), numbers.offset_dims, offsets, index)
    return builder.build([source, [*index, _coordinates(builder, indices)]], [result])


def _looked_up(builder: RuleBuilder, size: int, window: int) -> tuple[DimFactors, DimFactors]:
    """Returns the factors of an operand dimension and of its offset dimension in the result.

    They depend on how much of the dimension a window covers.
    """
    if window == size:
        shared = builder.factor(size)
        return shared, shared
    if window == 1:
        return builder.factor(size, FactorKind.REDUCTION), ()
    return builder.factor(size, FactorKind.NEED_REPLICATION), builder.factor(window, FactorKind.NEED_REPLICATION)


@rule("scatter", "scatter-sub")
def scatter(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Keeps updates whole that overwrite or subtract; the operand may be split where it is written into."""
    return _scatter(operands, params, FactorKind.NEED_REPLICATION, "add")


def _combining(combiner: str) -> RuleFn:
    def combining(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
        """Lets updates split over devices, which gives partial results."""
        return _scatter(operands, params, FactorKind.REDUCTION, combiner)

    return combining


for _primitive, _combiner in COMBINER_OF_SCATTER.items():
    rule(_primitive)(_combining(_combiner))


def _scatter(operands: tuple[Shape, ...], params: Mapping[str, Any], updates_kind: FactorKind, combiner: str) -> OpRule:
    """Writes updates `[index, window]` at `[index, coordinates]` into `[written into, window]`; the result has the shape of the last."""
    numbers = params["dimension_numbers"]
    operand, indices, updates = operands
    builder = RuleBuilder()
    into_index = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    index = [builder.factor(size, FactorKind.PASS_THROUGH if dim in into_index else updates_kind) for dim, size in enumerate(indices[:-1])]
    batching = _paired(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, index)
    window_sizes = iter([updates[dim] for dim in sorted(numbers.update_window_dims)])
    written_kind = FactorKind.NEED_REPLICATION if prod(indices[:-1]) == 1 else FactorKind.PASS_THROUGH
    target: list[DimFactors] = []
    windows: list[DimFactors] = []
    for dim, size in enumerate(operand):
        if dim in batching:
            target.append(batching[dim])
        elif dim in numbers.inserted_window_dims:
            target.append(builder.factor(size, written_kind))
        else:
            own, window = _window(builder, size, next(window_sizes))
            target.append(own)
            windows.append(window)
    update = _interleaved(len(updates), numbers.update_window_dims, windows, index)
    return builder.build([target, [*index, _coordinates(builder, indices)], update], [target], combiner=combiner)


def _window(builder: RuleBuilder, size: int, window: int) -> tuple[DimFactors, DimFactors]:
    """Returns the factors of an operand dimension and of its window in the updates; a window that can move keeps both whole."""
    if window == size:
        shared = builder.factor(size)
        return shared, shared
    return builder.factor(size, FactorKind.NEED_REPLICATION), builder.factor(window, FactorKind.NEED_REPLICATION)


def _paired(operand_dims: Sequence[int], index_dims: Sequence[int], index: Sequence[DimFactors]) -> dict[int, DimFactors]:
    """Returns the batching dimensions of the operand with the factors of their partners in the indices."""
    return {int(dim): index[partner] for dim, partner in zip(operand_dims, index_dims, strict=True)}


def _coordinates(builder: RuleBuilder, indices: Shape) -> DimFactors:
    """Returns the factors of the last dimension of the indices: the coordinates of one index, which stay together."""
    return builder.factor(indices[-1], FactorKind.NEED_REPLICATION)


def _interleaved(rank: int, own_positions: Collection[int], own: Sequence[DimFactors], rest: Sequence[DimFactors]) -> list[DimFactors]:
    """Returns `own` at `own_positions`, with the rest in order around them."""
    own_left, rest_left = iter(own), iter(rest)
    return [next(own_left) if dim in own_positions else next(rest_left) for dim in range(rank)]

"""Rules of primitives that move elements without looking at them: broadcast, transpose, slice, join, pad, tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule

Params = Mapping[str, Any]
Shapes = tuple[Shape, ...]


class _Whole:
    """The factors along one axis, one per size, so that only dimensions of equal size are related."""

    def __init__(self, builder: RuleBuilder, kind: FactorKind) -> None:
        self._builder = builder
        self._kind = kind
        self._of_size: dict[int, DimFactors] = {}

    def __call__(self, size: int) -> DimFactors:
        if size not in self._of_size:
            self._of_size[size] = self._builder.factor(size, self._kind)
        return self._of_size[size]


@rule("broadcast_in_dim")
def broadcast_in_dim(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Leaves new dimensions free to split; a dimension that is broadcast has no factor in the operand."""
    builder = RuleBuilder()
    dims = builder.factors(results[0])
    source = _picked(dims, operands[0], results[0], params["broadcast_dimensions"])
    return builder.build([source, *[()] * (len(operands) - 1)], [dims])


@rule("broadcast_to")
def broadcast_to(operands: Shapes, results: Shapes, _params: Params) -> OpRule:
    """Aligns dimensions at the last one, as NumPy broadcasts."""
    builder = RuleBuilder()
    dims = builder.factors(results[0])
    new = len(results[0]) - len(operands[0])
    return builder.build([_picked(dims, operands[0], results[0], range(new, len(results[0])))], [dims])


def _picked(dims: Sequence[DimFactors], source: Shape, full: Shape, positions: Sequence[int]) -> list[DimFactors]:
    return [dims[position] if size == full[position] else () for size, position in zip(source, positions, strict=True)]


@rule("transpose")
def transpose(operands: Shapes, _results: Shapes, params: Params) -> OpRule:
    """Relates result dimension i to operand dimension `permutation[i]`."""
    builder = RuleBuilder()
    dims = builder.factors(operands[0])
    return builder.build([dims], [[dims[source] for source in params["permutation"]]])


@rule("squeeze")
def squeeze(operands: Shapes, _results: Shapes, params: Params) -> OpRule:
    """Drops dimensions of size 1."""
    builder = RuleBuilder()
    rank = len(operands[0])
    dropped = {dim % rank for dim in params["dimensions"]}
    dims = builder.factors(operands[0])
    return builder.build([dims], [[dims[dim] for dim in range(rank) if dim not in dropped]])


@rule("rev")
def rev(operands: Shapes, _results: Shapes, params: Params) -> OpRule:
    """Keeps reversed dimensions whole: devices would have to swap their blocks."""
    builder = RuleBuilder()
    kinds = [FactorKind.PERMUTATION if dim in params["dimensions"] else FactorKind.PASS_THROUGH for dim in range(len(operands[0]))]
    dims = [builder.factor(size, kind) for size, kind in zip(operands[0], kinds, strict=True)]
    return builder.build([dims], [dims])


@rule("iota", "empty")
def fill(operands: Shapes, results: Shapes, _params: Params) -> OpRule:
    """Lets every dimension of the result split: each device makes its own block."""
    builder = RuleBuilder()
    return builder.build([()] * len(operands), [builder.factors(results[0])])


@rule("tile")
def tile(operands: Shapes, _results: Shapes, params: Params) -> OpRule:
    """Makes repeated dimensions compound: the repetitions are major, the operand's dimension minor."""
    builder = RuleBuilder()
    sizes = operands[0]
    dims = [(builder.factor(count), builder.factor(size)) for count, size in zip(params["reps"], sizes, strict=True)]
    return builder.build([[own for _, own in dims]], [[count + own for count, own in dims]])


@rule("concatenate")
def concatenate(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Keeps the joined dimension whole."""
    return _along(operands, results, params["dimension"], FactorKind.NEED_REPLICATION)


@rule("split")
def split(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Keeps the cut dimension whole: like a slice, it would move elements between neighbours."""
    return _along(operands, results, params["axis"], FactorKind.PERMUTATION)


def _along(operands: Shapes, results: Shapes, axis: int, kind: FactorKind) -> OpRule:
    """Relates all tensors in every dimension but `axis`; with one operand and one result, in that one too."""
    builder = RuleBuilder()
    trivial = len(operands) == len(results) == 1
    whole = _Whole(builder, FactorKind.PASS_THROUGH if trivial else kind)
    shared = [() if dim == axis else builder.factor(size) for dim, size in enumerate(operands[0])]

    def dims(shape: Shape) -> list[DimFactors]:
        return [whole(size) if dim == axis else shared[dim] for dim, size in enumerate(shape)]

    return builder.build([dims(shape) for shape in operands], [dims(shape) for shape in results])


@rule("stack")
def stack(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Keeps the new dimension whole, as `concatenate` does with the joined one."""
    builder = RuleBuilder()
    axis = params["axis"]
    joined = builder.factor(results[0][axis], FactorKind.NEED_REPLICATION)
    dims = builder.factors(operands[0])
    return builder.build([dims] * len(operands), [[*dims[:axis], joined, *dims[axis:]]])


@rule("unstack")
def unstack(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Keeps the dimension that is taken apart whole, as `slice` does with one that is cut."""
    builder = RuleBuilder()
    axis = params["axis"]
    cut = builder.factor(operands[0][axis], FactorKind.PERMUTATION)
    dims = builder.factors(results[0])
    return builder.build([[*dims[:axis], cut, *dims[axis:]]], [dims] * len(results))


@rule("slice")
def slice_(operands: Shapes, results: Shapes, _params: Params) -> OpRule:
    """Keeps dimensions that are cut whole; a dimension of unchanged size was not cut."""
    touched = [size != kept for size, kept in zip(operands[0], results[0], strict=True)]
    return _partial(operands, results, touched, FactorKind.PERMUTATION)


@rule("dynamic_slice")
def dynamic_slice(operands: Shapes, results: Shapes, _params: Params) -> OpRule:
    """Keeps dimensions that are cut whole: no device knows beforehand which one holds the slice."""
    touched = [size != kept for size, kept in zip(operands[0], results[0], strict=True)]
    return _partial(operands, results, touched, FactorKind.NEED_REPLICATION)


@rule("pad")
def pad(operands: Shapes, results: Shapes, params: Params) -> OpRule:
    """Keeps padded dimensions whole, even where padding and cropping cancel: that is a shift between neighbours."""
    touched = [any(config) for config in params["padding_config"]]
    return _partial(operands, results, touched, FactorKind.PERMUTATION)


def _partial(operands: Shapes, results: Shapes, touched: Sequence[bool], kind: FactorKind) -> OpRule:
    """Relates the first operand to the result, with whole dimensions where they are `touched`; further operands are scalars."""
    builder = RuleBuilder()
    source: list[DimFactors] = []
    target: list[DimFactors] = []
    for size, kept, cut in zip(operands[0], results[0], touched, strict=True):
        whole = _Whole(builder, kind if cut else FactorKind.PASS_THROUGH)
        source.append(whole(size))
        target.append(whole(kept))
    return builder.build([source, *[()] * (len(operands) - 1)], [target])


@rule("dynamic_update_slice")
def dynamic_update_slice(operands: Shapes, _results: Shapes, _params: Params) -> OpRule:
    """Lets dimensions split that are written one element at a time: the owner writes, the other devices keep what they have.

    Longer updates may straddle two blocks. XLA then gathers the whole operand, so the dimension stays whole, though
    Shardy would let it pass.
    """
    builder = RuleBuilder()
    target: list[DimFactors] = []
    update: list[DimFactors] = []
    for size, written in zip(operands[0], operands[1], strict=True):
        free = written in (1, size)
        whole = _Whole(builder, FactorKind.PASS_THROUGH if free else FactorKind.NEED_REPLICATION)
        target.append(whole(size))
        update.append(whole(written))
    return builder.build([target, update, *[()] * (len(operands) - 2)], [target])

"""Rules of kernels whose dimensions are known: custom_partitioning with a rule from the user, scaled matmuls, and cuDNN's attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, replicate
from spmdctx.rules.registry import rule

_LEADING = "\N{HORIZONTAL ELLIPSIS}"
"""The first character of a mapping's entry that stands for all leading dimensions."""


@rule("custom_partitioning")
def custom_partitioning(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Translates the rule that the user gave in Shardy's notation.

    A rule that is a function of MLIR types can't be called here: nothing is split then.
    """
    given = params.get("sharding_rule")
    if given is None or callable(given):
        return replicate(operands, results, "custom_partitioning without a sharding_rule in einsum notation")
    sides = [
        [_expanded(mapping, len(shape)) for mapping, shape in zip(mappings, shapes, strict=True)]
        for mappings, shapes in ((given.operand_mappings, operands), (given.result_mappings, results))
    ]
    sizes = dict(given.factor_sizes)
    for names, shape in zip((*sides[0], *sides[1]), (*operands, *results), strict=True):
        sizes.update({dim[0]: size for dim, size in zip(names, shape, strict=True) if len(dim) == 1})
    builder = RuleBuilder()
    factors = {name: builder.factor(size, _kind(given, name)) for name, size in sizes.items()}
    operand_dims, result_dims = ([[_joined(factors[name] for name in dim) for dim in names] for names in side] for side in sides)
    return builder.build(operand_dims, result_dims)


def _expanded(mapping: Sequence[Any], rank: int) -> list[tuple[str, ...]]:
    """Returns the names of the factors of each dimension, with the leading dimensions written out."""
    dims = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in mapping]
    if not dims or not dims[0][0].startswith(_LEADING):
        return dims
    return [(f"{dims[0][0]}/{index}",) for index in range(rank - len(dims) + 1)] + dims[1:]


def _joined(factors: Iterable[DimFactors]) -> DimFactors:
    return tuple(factor for own in factors for factor in own)


def _kind(given: Any, name: str) -> FactorKind:
    for kind in (FactorKind.REDUCTION, FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION):
        if name in getattr(given, f"{kind.value}_factors"):
            return kind
    return FactorKind.PASS_THROUGH


@rule("scaled_matmul", "scaled_matmul_wrapper")
def scaled_matmul(operands: tuple[Shape, ...], _results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Multiplies `[batch, m, k]` by `[batch, n, k]` into `[batch, m, n]`.

    The contracted dimension has scales of its own and stays whole.
    """
    builder = RuleBuilder()
    batch, rows = builder.factors(operands[0][:2])
    columns = builder.factor(operands[1][1])
    depth = builder.factor(operands[0][2], blocked=True)
    scales = builder.factor(operands[2][2], blocked=True)
    left, right = [batch, rows], [batch, columns]
    return builder.build([[*left, depth], [*right, depth], [*left, scales], [*right, scales]], [[batch, rows, columns]])


_ATTENTION = tuple(
    f"dot_product_attention{kind}_{direction}{suffix}"
    for kind in ("", "_fp8")
    for direction in ("fwd", "bwd")
    for suffix in ("", "_wrapper")
)
_BATCH_HEADS_SEQ_DIM = 1
_BIAS, _OFFSETS, _PAGES = 3, 6, 8


@rule(*_ATTENTION)
def attention(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Lets batch and heads pass through. Query heads are (key heads, group), and a group stays with its key head.

    Packed and paged sequences mix the batch, so it stays whole there. In the fp8 kernels the operands after the values are scalars.
    """
    heads_dim = 1 if params["layout"] == _BATCH_HEADS_SEQ_DIM else 2
    query, key = operands[:2]
    packed = "variadic_args" in params and (operands[_OFFSETS][1:] > (2,) or len(operands[_PAGES]) > 1)
    builder = RuleBuilder()
    batch = builder.factor(query[0], blocked=packed)
    key_heads = builder.factor(key[heads_dim])
    heads = key_heads + builder.factor(query[heads_dim] // key[heads_dim], blocked=True)

    def dims(shape: Shape, position: int) -> list[DimFactors]:
        own: list[DimFactors] = [()] * len(shape)
        if shape and shape[0] == query[0]:
            own[0] = batch
        at = heads_dim if len(shape) == len(query) and position != _BIAS else 1
        if len(shape) > len(query) - 2 and shape[at] in (query[heads_dim], key[heads_dim]):
            own[at] = heads if shape[at] == query[heads_dim] else key_heads
        return own

    return builder.build([dims(s, i) for i, s in enumerate(operands)], [dims(s, i) for i, s in enumerate(results)])

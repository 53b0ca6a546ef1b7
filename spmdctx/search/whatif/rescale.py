"""The same step with a batch of another size, derived without tracing the step again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from spmdctx.ir.graph import Graph, Op, Role, Value
from spmdctx.ir.rule import DimFactors, OpRule

Dims = frozenset[int]
"""The dimensions of one value that the batch leads."""

_NONE: Dims = frozenset()


def batch_size(graph: Graph) -> int:
    """Returns the size of the batch dimension of the first batch leaf; 0 if there is no batch."""
    return next((graph.values[value].shape[0] for value in graph.inputs if _is_batch(graph.values[value])), 0)


def with_batch(graph: Graph, scale: Fraction) -> Graph | None:
    """Returns the graph with the batch `scale` times as large.

    Every dimension that the batch leads is scaled, with the factors behind it and the FLOPs of their ops. Returns None if there is no
    batch, a size would not be a whole number, or an op needs the batch to have its present size (a slice of it, say).
    """
    dims = _batch_dims(graph)
    if not dims:
        return None
    values = [_scaled_value(value, dims.get(value.id, _NONE), scale) for value in graph.values]
    rules: dict[tuple[int, tuple[int, ...]], OpRule | None] = {}
    ops = []
    for op in graph.ops:
        factors = _factors(op, [dims.get(value, _NONE) for value in (*op.operands, *op.results)])
        if not factors:
            ops.append(op)
            continue
        key = (id(op.rule), factors)
        if key not in rules:
            rules[key] = _scaled_rule(op.rule, factors, scale)
        rule = rules[key]
        if rule is None or not _fits(op, rule, graph.values, values):
            return None
        ops.append(op._replace(rule=rule, flops=int(op.flops * scale ** len(factors))))
    whole = tuple([value for value in values if value is not None])
    return replace(graph, values=whole, ops=tuple(ops)) if len(whole) == len(values) else None


def _batch_dims(graph: Graph) -> dict[int, Dims]:
    """Returns for each value its dimensions that share a leading factor with the batch.

    It follows the ops forwards and backwards until nothing changes.
    """
    found = {value: frozenset((0,)) for value in graph.inputs if _is_batch(graph.values[value])}
    tied: dict[int, list[int]] = {}
    for left, right in graph.ties:
        tied.setdefault(left, []).append(right)
        tied.setdefault(right, []).append(left)
    memo: dict[tuple[object, ...], tuple[Dims, ...]] = {}
    grows = bool(found)
    while grows:
        grows = False
        for ops in (graph.ops, reversed(graph.ops)):
            for op in ops:
                tensors = (*op.operands, *op.results)
                known = tuple([found.get(value, _NONE) for value in tensors])
                if not any(known):
                    continue
                key = (id(op.rule), known)
                if key not in memo:
                    memo[key] = _grown(op.rule, known)
                for value, old, new in zip(tensors, known, memo[key], strict=True):
                    if new != old:
                        grows = True
                        found[value] = found.get(value, _NONE) | new
                        for other in tied.get(value, ()):
                            found[other] = found.get(other, _NONE) | new
    return found


def _grown(rule: OpRule, known: Sequence[Dims]) -> tuple[Dims, ...]:
    sides = (*rule.operands, *rule.results)
    leaders = {dims[dim][0] for dims, own in zip(sides, known, strict=True) for dim in own if dims[dim]}
    return tuple(
        own | {dim for dim, factors in enumerate(dims) if factors and factors[0] in leaders} for dims, own in zip(sides, known, strict=True)
    )


def _factors(op: Op, known: Sequence[Dims]) -> tuple[int, ...]:
    """Returns the factors of an op that lead a batch dimension of one of its tensors, each once, in order."""
    sides = (*op.rule.operands, *op.rule.results)
    return tuple(sorted({dims[dim][0] for dims, own in zip(sides, known, strict=True) for dim in own if dims[dim]}))


def _is_batch(value: Value) -> bool:
    return value.role is Role.BATCH and bool(value.shape)


def _scaled_value(value: Value, dims: Dims, scale: Fraction) -> Value | None:
    if not dims:
        return value
    sizes = [size * scale if dim in dims else Fraction(size) for dim, size in enumerate(value.shape)]
    return value._replace(shape=tuple(map(int, sizes))) if all(size.denominator == 1 for size in sizes) else None


def _scaled_rule(rule: OpRule, factors: tuple[int, ...], scale: Fraction) -> OpRule | None:
    sizes = [size * scale if factor in factors else Fraction(size) for factor, size in enumerate(rule.sizes)]
    return replace(rule, sizes=tuple(map(int, sizes))) if all(size.denominator == 1 for size in sizes) else None


def _fits(op: Op, rule: OpRule, before: Sequence[Value], after: Sequence[Value | None]) -> bool:
    """Returns whether every dimension is still as large as its factors say, if it was so before."""
    for value, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
        new = after[value] if value >= 0 else None
        if new is None:
            continue
        for size, scaled, factors in zip(before[value].shape, new.shape, dims, strict=True):
            if (scaled == size) != (_product(factors, rule) == _product(factors, op.rule)) or (
                scaled != size and scaled != _product(factors, rule)
            ):
                return False
    return True


def _product(factors: DimFactors, rule: OpRule) -> int:
    return math.prod(rule.sizes[factor] for factor in factors)

"""The same step with a batch of another size, without tracing it again."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from spmdctx.ir import LITERAL, Graph, Op, OpRule, Role, Value
from spmdctx.search.batch import batch_dims


def batch_size(graph: Graph) -> int:
    """The size of the batch dimension of the first batch leaf; 0 where there is no batch."""
    return next((graph.values[value].shape[0] for value in graph.inputs if _is_batch(graph.values[value])), 0)


def with_batch(graph: Graph, scale: Fraction) -> Graph | None:
    """The graph with the batch `scale` times as large.

    Every dimension led by the batch and every factor behind it are scaled, and the FLOPs of the ops that have such a factor.
    None where there is no batch, or a dimension would not be a whole number.
    """
    dims = batch_dims(graph, [value for value in graph.inputs if _is_batch(graph.values[value])])
    if not dims or any((graph.values[value].shape[dim] * scale).denominator != 1 for value, dim in dims.items()):
        return None
    values = tuple([_scaled(value, dims[value.id], scale) if value.id in dims else value for value in graph.values])
    rules: dict[tuple[int, tuple[int, ...]], OpRule] = {}
    ops = []
    for op in graph.ops:
        factors = _batch_factors(op, dims)
        if not factors:
            ops.append(op)
            continue
        key = (id(op.rule), factors)
        if key not in rules:
            sizes = [size * scale if factor in factors else Fraction(size) for factor, size in enumerate(op.rule.sizes)]
            if any(size.denominator != 1 for size in sizes):
                return None
            rules[key] = replace(op.rule, sizes=tuple(int(size) for size in sizes))
        ops.append(op._replace(rule=rules[key], flops=int(op.flops * scale)))
    return replace(graph, values=values, ops=tuple(ops))


def _is_batch(value: Value) -> bool:
    return value.role is Role.BATCH and bool(value.shape)


def _scaled(value: Value, dim: int, scale: Fraction) -> Value:
    shape = value.shape
    return value._replace(shape=(*shape[:dim], int(shape[dim] * scale), *shape[dim + 1 :]))


def _batch_factors(op: Op, dims: dict[int, int]) -> tuple[int, ...]:
    """Factors of an op that lead a batch dimension of one of its tensors, each once, in order."""
    found = set()
    for value, tensor in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True):
        dim = None if value == LITERAL else dims.get(value)
        if dim is not None and tensor[dim]:
            found.add(tensor[dim][0])
    return tuple(sorted(found))

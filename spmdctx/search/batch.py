"""Where the batch goes: which dimension of which value traces back to dimension 0 of a batch leaf."""

from __future__ import annotations

from collections.abc import Iterable

from spmdctx.ir import AxisNames, FactorKind, Graph, Op
from spmdctx.mesh import LogicalMesh


def batch_dims(graph: Graph, leaves: Iterable[int]) -> dict[int, int]:
    """Value id to the dimension whose major factor is the batch; loop carries are followed until nothing changes."""
    found = {value: 0 for value in leaves if graph.values[value].shape}
    tied: dict[int, list[int]] = {}
    for left, right in graph.ties:
        tied.setdefault(left, []).append(right)
        tied.setdefault(right, []).append(left)
    memo: dict[tuple[int, ...], tuple[int | None, ...]] = {}
    # Ops are in execution order, so that only what a tie carries back must be followed once more.
    again = True
    while again:
        again = False
        for op in graph.ops:
            if found.keys().isdisjoint(op.operands):
                continue
            positions = tuple([found.get(value, -1) for value in op.operands])
            key = (id(op.rule), *positions)
            dims = memo.get(key)
            if dims is None:
                dims = memo[key] = _result_dims(op, positions)
            for value, dim in zip(op.results, dims, strict=True):
                if dim is not None and value not in found:
                    found[value] = dim
                    for other in tied.get(value, ()):
                        again = again or other not in found
                        found.setdefault(other, dim)
    return found


def _result_dims(op: Op, positions: tuple[int, ...]) -> tuple[int | None, ...]:
    """Per result the dimension led by the factor that leads an operand's batch dimension."""
    rule = op.rule
    leaders = {dims[position][0] for dims, position in zip(rule.operands, positions, strict=True) if position >= 0 and dims[position]}
    leaders = {factor for factor in leaders if rule.kinds[factor] is FactorKind.PASS_THROUGH and factor not in rule.blocked}
    return tuple(next((index for index, factors in enumerate(dims) if factors and factors[0] in leaders), None) for dims in rule.results)


def dividing_axes(size: int, axes: AxisNames, mesh: LogicalMesh) -> AxisNames:
    """The longest leading part of `axes` that divides `size`."""
    taken: AxisNames = ()
    for name in axes:
        if size % mesh.num_slices((*taken, name)):
            break
        taken = (*taken, name)
    return taken

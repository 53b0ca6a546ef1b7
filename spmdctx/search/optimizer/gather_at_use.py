"""Split weights that their readers gather late: after they are converted to a narrow type, and one layer of a scan at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.mesh import axes_of
from spmdctx.ir.primitives import RENAMES, SCAN_ENTER
from spmdctx.ir.projection import FactorAxes, project
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.search.setup.request import Setup


def readers_of(graph: Graph) -> dict[int, list[Op]]:
    """Returns the ops that read each value, in order, by value id."""
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(op.operands):
            if value != LITERAL:
                readers.setdefault(value, []).append(op)
    return readers


def is_slice(graph: Graph, op: Op) -> bool:
    """Returns whether an op takes one layer of a value that a scan runs over."""
    return op.primitive == SCAN_ENTER and len(graph.values[op.results[0]].shape) < len(graph.values[op.operands[0]].shape)


def enters_whole(graph: Graph, op: Op) -> bool:
    """Returns whether an op hands a value to all iterations of a scan as it is."""
    return op.primitive == SCAN_ENTER and not is_slice(graph, op)


def layer_dim(graph: Graph, readers: Mapping[int, list[Op]], value: int) -> int:
    """Returns the first dimension that counts no layers of a scan, also of one inside of a loop that reads the value whole."""
    for op in readers.get(value, []):
        if is_slice(graph, op) and len(graph.values[value].shape) > 1:
            return 1 + layer_dim(graph, readers, op.results[0])
        passes_on = op.primitive in RENAMES or enters_whole(graph, op)
        if passes_on and (deeper := layer_dim(graph, readers, op.results[0])):
            return deeper
    return 0


def keep_at_rest(
    graph: Graph, assignment: Assignment, weights: Mapping[int, TensorSharding], setup: Setup
) -> tuple[Assignment, frozenset[int]]:
    """Lets ops that rename, narrow or slice a split weight pass the split on, so that it is gathered as late as possible.

    A loop over micro-batches gets stacks of layers as they lie, since a loop inside it gathers one layer at a time; all else it gets whole.

    Returns:
        The assignment with those ops and their results split as the weights will be, and the ids of the ops.
    """
    values, ops = list(assignment.values), list(assignment.ops)
    readers, tied = readers_of(graph), {value for pair in graph.ties for value in pair} | set(graph.outputs)
    waiting = list(weights.items())
    moved: set[int] = set()
    while waiting:
        value, sharding = waiting.pop()
        for op in readers.get(value, []):
            if not op.results:
                continue  # a callback that returns nothing
            result = op.results[0]
            if enters_whole(graph, op) and not layer_dim(graph, readers, result):
                continue  # gathered once, and not in each iteration
            axes = _passed_on(graph, op, sharding)
            if axes is None or result in tied or result in setup.pins or op.id in setup.forced:
                continue
            moved.add(op.id)
            ops[op.id] = OpSharding(axes)
            values[result] = project(op.rule.results[0], axes)
            waiting.append((result, values[result]))
    return replace(assignment, ops=tuple(ops), values=tuple(values)), frozenset(moved)


def _passed_on(graph: Graph, op: Op, sharding: TensorSharding) -> FactorAxes | None:
    """Returns the split of an op that hands on the whole split of its operand.

    Returns None if the op does more than rename or slice its operand or hand it to a scan, or widens it.
    """
    if op.primitive != SCAN_ENTER and (op.primitive not in RENAMES or len(op.operands) != 1):
        return None
    before, after = (item_bytes(graph.values[value].dtype) for value in (op.operands[0], op.results[0]))
    axes: list[tuple[str, ...]] = [()] * len(op.rule.sizes)
    for factors, names in zip(op.rule.operands[0], sharding, strict=True):
        if factors:
            axes[factors[0]] = names
    if after > before or axes_of(project(op.rule.results[0], tuple(axes))) != axes_of(sharding):
        return None
    return tuple(axes)

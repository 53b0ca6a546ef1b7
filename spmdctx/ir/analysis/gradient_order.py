"""The gradients of a step: the sums over the batch that make up each, in the order of first use in the forward pass.

Both follow from the graph alone. A parameter is an input that comes out changed. Its gradient is found on the way back from its new value,
through ops that keep every element (arithmetic of optimizers, casts, transpositions, loop boundaries): it is made up of the sums that
this way ends in. If a step returns its gradients and changes nothing, the way starts at its results. Their order is then the reverse of
that in which the step makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Graph, Op, Role
from spmdctx.ir.primitives import ADDITIONS, CUTTING, LAYOUT, SCAN_ENTER, SCAN_EXIT, VIEWS, Boundary
from spmdctx.ir.rule import FactorKind

_UNUSED = VIEWS | {SCAN_ENTER}
"""Ops that only prepare a parameter, and do not count as its use."""

_REDUCED_BEHIND = LAYOUT | ADDITIONS | {"convert_element_type"}
"""Ops behind which the compiler may move a reduction."""

_KEEPING = CUTTING | {SCAN_EXIT}
"""Ops that join tensors, or take a part of one, and change no element."""


class Gradient(NamedTuple):
    """The gradient of the parameter at `path`; `sums` are the values that are partial where the batch is split."""

    path: str
    sums: tuple[int, ...]


def gradient_order(graph: Graph) -> tuple[Gradient, ...]:
    """Returns the gradients of a step; the index of a gradient is its place in the tuple."""
    updated = [(before, after) for before, after in graph.ties if _is_parameter(graph, before) and after != before]
    if updated:
        sums = _sums(graph, [after for _, after in updated])
        first = _first_uses(graph, [before for before, _ in updated])
        found = [(first[number], before, sums[number]) for number, (before, _) in enumerate(updated) if sums[number]]
    else:
        made = graph.producers
        results = [value for value in dict.fromkeys(graph.outputs) if value in made and graph.values[value].shape]
        sums = _sums(graph, results)
        found = [(-max(made[one] for one in sums[number]), value, sums[number]) for number, value in enumerate(results) if sums[number]]
    return tuple(Gradient(graph.values[value].path, own) for _, value, own in sorted(found))


def carriers(graph: Graph, sums: Iterable[int]) -> dict[int, int]:
    """Returns for each sum the last value on which its reduction may be done: each linear op on the way is the only reader."""
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in op.operands:
            readers.setdefault(value, []).append(op)
    outputs = frozenset(graph.outputs)
    found = {}
    for start in sums:
        value = start
        while value not in outputs:
            after = readers.get(value, [])
            if len(after) != 1 or after[0].primitive not in _REDUCED_BEHIND:
                break
            value = after[0].results[0]
        found[start] = value
    return found


def _is_parameter(graph: Graph, value: int) -> bool:
    return value in graph.inputs and graph.values[value].role is Role.PARAMETER


def _sums(graph: Graph, results: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns for each result the sums that it is computed from, in the order of the graph; one sum may be cut into several results."""
    fixed = {value: frozenset([number]) for number, value in reversed(list(enumerate(results)))}
    labels = dict(fixed)
    found: list[set[int]] = [set() for _ in results]
    entered = {op.results[0] for op in graph.ops if op.boundary is Boundary.ENTER}
    carried = [(before, after) for before, after in graph.ties if before in entered]
    while True:
        for op in reversed(graph.ops):
            for value in op.results:
                own = labels.get(value)
                if own is None:
                    continue
                if FactorKind.REDUCTION in op.rule.kinds:
                    for number in own:
                        found[number].add(value)
                    continue
                for operand in op.operands:
                    if operand != LITERAL and operand not in fixed and _keeps(graph, op, operand, value):
                        labels[operand] = labels.get(operand, own) | own
        # What a loop starts from is what its last iteration hands on.
        more = [
            (after, labels[before]) for before, after in carried if not labels.get(before, frozenset()) <= labels.get(after, frozenset())
        ]
        if not more:
            return [tuple(sorted(own)) for own in found]
        labels.update({after: labels.get(after, own) | own for after, own in more})


def _keeps(graph: Graph, op: Op, operand: int, result: int) -> bool:
    """Returns whether each element of the result comes from one of the operand, or from zeros around it; a loop stacks such elements."""
    if op.primitive in _KEEPING:
        return True
    shapes = graph.values[operand].shape, graph.values[result].shape
    return math.prod(shapes[0]) == math.prod(shapes[1]) and all(kind is FactorKind.PASS_THROUGH for kind in op.rule.kinds)


def _first_uses(graph: Graph, parameters: Sequence[int]) -> list[int]:
    """Returns for each parameter the first op that computes with it."""
    name: dict[int, int] = {value: number for number, value in enumerate(parameters)}
    first = [len(graph.ops)] * len(parameters)
    for op in graph.ops:
        for value in op.operands:
            number = name.get(value)
            if number is None:
                continue
            if op.primitive in _UNUSED:
                name.setdefault(op.results[0], number)
            else:
                first[number] = min(first[number], op.id)
    return first

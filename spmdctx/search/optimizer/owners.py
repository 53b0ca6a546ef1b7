"""Which state belongs to which parameter, and which inputs are stored like weights."""

from __future__ import annotations

from spmdctx.ir.graph import Graph, Role, Value
from spmdctx.machine.xla.overlap import overlap_candidates

WHOLE_NUMBERS = ("int", "uint", "bool")
"""How the types begin of state that the model reads as weights."""


def is_weight(known: Value) -> bool:
    """Returns whether an input is a weight: a parameter, or whole numbers that the model reads, such as quantized weights."""
    return known.role is Role.PARAMETER or (known.role is Role.STATE and bool(known.shape) and known.dtype.startswith(WHOLE_NUMBERS))


def owners(graph: Graph) -> dict[int, list[int]]:
    """Returns the state of each parameter, by parameter in the order of the arguments.

    A state belongs to the parameter of its shape with the most similar path. Optimizer state and weights of whole numbers that belong to
    none own themselves.
    """
    inputs = [graph.values[value] for value in graph.inputs]
    owned: dict[int, list[int]] = {known.id: [] for known in inputs if known.role is Role.PARAMETER}
    by_shape: dict[tuple[int, ...], list[Value]] = {}
    for value in owned:
        by_shape.setdefault(graph.values[value].shape, []).append(graph.values[value])
    carried = {before for before, _ in graph.ties}
    terminal = overlap_candidates(graph).terminal
    for known in inputs:
        if known.role not in (Role.OPTIMIZER, Role.STATE) or not known.shape:
            continue
        alike = by_shape.get(known.shape, [])
        owner = max(alike, key=lambda other: _common(other.path, known.path), default=None)
        named = owner is not None and _common(owner.path, known.path) > 0
        is_copy = named and known.id in carried and bool(terminal[known.id])
        if owner is not None and (is_copy or (known.role is Role.OPTIMIZER and (named or len(alike) == 1))):
            owned[owner.id].append(known.id)
        elif known.role is Role.OPTIMIZER:
            owned[known.id] = [known.id]
        elif is_weight(known):
            owned[known.id] = []
    return owned


def _common(first: str, second: str) -> int:
    """Counts the names that two paths have in common at their ends."""
    count = 0
    for own, other in zip(reversed(first.split("/")), reversed(second.split("/")), strict=False):
        if own != other:
            break
        count += 1
    return count

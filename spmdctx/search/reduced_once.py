"""Lets the gradients of micro-batches wait for their sum, so that each is reduced once per step.

`grad_accumulation_step` promises one reduction per step. A search leaves out plans that would reduce a gradient in every iteration.
Whatever chose the plan, this file stores the sums of its loops whole over the axes over which their terms are partial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from spmdctx.ir.analysis.loop_sums import LoopSum, held_axes, loop_sums, partial_over
from spmdctx.ir.graph import Graph
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding, TensorSharding
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.search.setup.request import Coupling, Setup


class Mended(NamedTuple):
    """An assignment whose sums wait for their reduction, except those whose totals the user has `fixed`."""

    assignment: Assignment
    fixed: tuple[int, ...]


def sums_of_gradients(graph: Graph, couplings: Iterable[Coupling]) -> tuple[LoopSum, ...]:
    """Returns the sums that the loops of a step add up and no matrix product reads.

    Coupled sums, which must be split in every iteration, are left out.
    """
    coupled = frozenset(one.value for one in couplings if one.how != "within")
    terminal = overlap_candidates(graph).terminal
    return tuple(one for one in loop_sums(graph) if terminal[one.total] and coupled.isdisjoint((one.total, *one.carries)))


def reduced_once(graph: Graph, setup: Setup, assignment: Assignment, sums: Iterable[LoopSum]) -> Mended:
    """Returns the assignment in which all of the sums wait for their reduction."""
    fixed = []
    for one in sums:
        partial: frozenset[str] = frozenset().union(*partial_over(graph, one, assignment, setup.mesh))
        if not partial or partial == set(held_axes(graph, one, assignment, setup.mesh)):
            continue
        values = (*one.way, *one.carries, one.total)
        mended = _without(graph, assignment, one, values, partial)
        is_pinned = any(mended.values[value] != assignment.values[value] for value in values if value in setup.pins)
        is_whole = partial == set(held_axes(graph, one, mended, setup.mesh))
        if is_pinned or not is_whole or not _keeps_ties(graph, mended, values):
            fixed.append(one.total)
        else:
            assignment = mended
    return Mended(assignment, tuple(fixed))


def _without(graph: Graph, assignment: Assignment, one: LoopSum, changed: Iterable[int], axes: frozenset[str]) -> Assignment:
    """Returns the assignment in which no value or op on the way of a sum is split over some axes."""
    values, ops = list(assignment.values), list(assignment.ops)
    terms = frozenset(one.terms)
    for value in changed:
        values[value] = _other(values[value], axes)
        if value not in terms and value in graph.producers:
            maker = graph.producers[value]
            ops[maker] = OpSharding(_other(ops[maker].axes, axes))
    return replace(assignment, values=tuple(values), ops=tuple(ops))


def _other(sharding: TensorSharding, axes: frozenset[str]) -> TensorSharding:
    return tuple([_rest(names, axes) for names in sharding])


def _rest(names: AxisNames, axes: frozenset[str]) -> AxisNames:
    return tuple([name for name in names if name not in axes])


def _keeps_ties(graph: Graph, assignment: Assignment, changed: Iterable[int]) -> bool:
    """Returns whether every value tied to a changed one is still stored like it."""
    values, own = assignment.values, frozenset(changed)
    return all(values[before] == values[after] for before, after in graph.ties if before in own or after in own)

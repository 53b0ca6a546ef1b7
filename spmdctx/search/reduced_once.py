"""Gradients of micro-batches, reduced once per step: what a plan must not split, so that they can wait for their sum.

`grad_accumulation_step` promises one reduction per step. A search leaves out plans that would reduce in every turn; whatever chose a
plan, the sums of its loops are stored here as whole over the axes that their terms are partial over.
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
    """An assignment whose sums wait, but for those totals that are `fixed` by the user."""

    assignment: Assignment
    fixed: tuple[int, ...]


def sums_of_gradients(graph: Graph, couplings: Iterable[Coupling]) -> tuple[LoopSum, ...]:
    """The sums that loops of a step add up and no matrix product reads; without those that are coupled, to be split in every turn."""
    coupled = frozenset(one.value for one in couplings if one.how != "within")
    terminal = overlap_candidates(graph).terminal
    return tuple(one for one in loop_sums(graph) if terminal[one.total] and one.total not in coupled)


def reduced_once(graph: Graph, setup: Setup, assignment: Assignment, sums: Iterable[LoopSum]) -> Mended:
    """The assignment in which all of the sums wait for their reduction."""
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
    """The assignment in which nothing on the way of a sum is split over some axes."""
    values, ops = list(assignment.values), list(assignment.ops)
    terms = frozenset(one.terms)
    for value in changed:
        values[value] = _other(values[value], axes)
        maker = graph.producers[value]
        if value not in terms:
            ops[maker] = OpSharding(_other(ops[maker].axes, axes))
    return replace(assignment, values=tuple(values), ops=tuple(ops))


def _other(sharding: TensorSharding, axes: frozenset[str]) -> TensorSharding:
    return tuple([_rest(names, axes) for names in sharding])


def _rest(names: AxisNames, axes: frozenset[str]) -> AxisNames:
    return tuple([name for name in names if name not in axes])


def _keeps_ties(graph: Graph, assignment: Assignment, changed: Iterable[int]) -> bool:
    """Returns whether what is tied to something that changed is still stored like it."""
    values, own = assignment.values, frozenset(changed)
    return all(values[before] == values[after] for before, after in graph.ties if before in own or after in own)

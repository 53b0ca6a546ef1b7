"""Buckets of gradient reductions: equations are tied so that XLA combines within a bucket and never across.

Nothing but data dependence keeps XLA's combiner from joining two all-reduces. So what makes a bucket's sums waits, through an
optimization barrier, for the reduced sums of the bucket before it; the first is the one of the highest index, whose gradients the
backward pass makes first. Later readers take the reduced sums from the barrier, or XLA would drop them from it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc


class Sum(NamedTuple):
    """An equation that makes a bucket's partial sum, and the variable that holds the sum once it is reduced."""

    bucket: int
    eqn: Any
    reduced: Any


class Tied(NamedTuple):
    """A body whose buckets wait for each other; `joined` are those that could not be kept apart from the one above."""

    eqns: list[Any]
    outputs: list[Any]
    joined: tuple[int, ...]


def tie_buckets(eqns: Sequence[Any], outputs: Sequence[Any], sums: Sequence[Sum]) -> Tied:
    """The equations of a body with barriers between its buckets, in an order in which they can run.

    Args:
        eqns: the equations of the body.
        outputs: its results.
        sums: its gradient sums; all of a bucket's may be in one barrier.
    """
    written, results = list(eqns), list(outputs)
    joined = []
    numbers = sorted({one.bucket for one in sums}, reverse=True)
    sums = list(sums)
    for above, bucket in pairwise(numbers):
        first = [one for one in sums if one.bucket == above]
        second = [one for one in sums if one.bucket == bucket]
        if not _ancestors(written, [one.reduced for one in first]).isdisjoint(id(one.eqn) for one in second):
            joined.append(bucket)  # they would wait for each other
            sums = [one._replace(bucket=bucket) if one.bucket == above else one for one in sums]
            continue
        written, results, sums = _barrier(written, results, sums, first, second)
    return Tied(_sorted(written), results, tuple(joined))


def _barrier(eqns: list[Any], outputs: list[Any], sums: list[Sum], first: list[Sum], second: list[Sum]) -> tuple[Any, Any, list[Sum]]:
    """One barrier between two buckets."""
    made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    after_first = _computed_from(eqns, [one.reduced for one in first])
    held = [_latest(one.eqn, made) for one in second]
    # What is computed from the first bucket waits for it as it is.
    waiting = list(dict.fromkeys(var for var in held if var is not None and var not in after_first))
    reduced = list(dict.fromkeys(one.reduced for one in first if not isinstance(one.reduced, jexc.Literal)))
    after = {var: jexc.Var(var.aval) for var in (*waiting, *reduced)}
    barrier = barrier_of(list(after), list(after.values()), first[0].eqn.source_info)
    swapped = {var: after[var] for var in reduced}
    tied = {id(one.eqn) for one in second}
    renamed: dict[int, Any] = {}
    rewritten = []
    for eqn in eqns:
        names = {**swapped, **{var: after[var] for var in waiting}} if id(eqn) in tied else swapped
        new = eqn if names.keys().isdisjoint(_variables(eqn)) else eqn.replace(invars=[_renamed(atom, names) for atom in eqn.invars])
        renamed[id(eqn)] = new
        rewritten.append(new)
    outputs = [_renamed(atom, swapped) for atom in outputs]
    # Where its inputs are there: after all that could run before it, it would be the last.
    rewritten.insert(max(made.get(var, -1) for var in after) + 1, barrier)
    return rewritten, outputs, [one._replace(eqn=renamed[id(one.eqn)]) for one in sums]


def _latest(eqn: Any, made: dict[Any, int]) -> Any:
    """The operand of an equation that is there last: the cotangent."""
    own = _variables(eqn)
    return max(own, key=lambda var: made.get(var, -1), default=None)


def _variables(eqn: Any) -> list[Any]:
    return [atom for atom in eqn.invars if not isinstance(atom, jexc.Literal)]


def _computed_from(eqns: Sequence[Any], variables: Iterable[Any]) -> set[Any]:
    """Some variables and all that depend on them."""
    found = {var for var in variables if not isinstance(var, jexc.Literal)}
    for eqn in _sorted(eqns):
        if not found.isdisjoint(_variables(eqn)):
            found.update(eqn.outvars)
    return found


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, jexc.Literal) else names.get(atom, atom)


def _ancestors(eqns: Sequence[Any], variables: Iterable[Any]) -> set[int]:
    """The identities of the equations that some variables depend on."""
    wanted = {var for var in variables if not isinstance(var, jexc.Literal)}
    found = set()
    for eqn in reversed(_sorted(eqns)):
        if not wanted.isdisjoint(eqn.outvars):
            found.add(id(eqn))
            wanted.update(_variables(eqn))
    return found


def _sorted(eqns: Sequence[Any]) -> list[Any]:
    """The equations in an order in which they can run, as near to the given one as can be."""
    made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    missing = [len({made[var] for var in _variables(eqn) if var in made}) for eqn in eqns]
    readers: list[list[int]] = [[] for _ in eqns]
    for place, eqn in enumerate(eqns):
        for before in {made[var] for var in _variables(eqn) if var in made}:
            readers[before].append(place)
    ready = [place for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(eqns[place])
        for after in readers[place]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, after)
    return order


def barrier_of(operands: Sequence[Any], results: Sequence[Any], source_info: Any) -> Any:
    """An optimization barrier from some variables to others."""
    structs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type) for var in operands]
    template = jax.make_jaxpr(lambda *values: jax.lax.optimization_barrier(values))(*structs).jaxpr.eqns[0]
    return template.replace(invars=list(operands), outvars=list(results), source_info=source_info)

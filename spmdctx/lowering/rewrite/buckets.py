"""Orders the buckets of gradient reductions with barriers, so that XLA combines within a bucket and never across.

Nothing but data dependence keeps XLA's combiner from joining two all-reduces. So the equations that make a bucket's sums wait, through an
optimization barrier, for the reduced sums of the bucket before it. The bucket with the highest index comes first, because the backward
pass makes its gradients first. Later readers take the reduced sums from the barrier, or XLA would drop them from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.lowering.rewrite.equations import ancestors, barrier_of, computed_from, in_order, variables
from spmdctx.trace.build.jaxprs.equations import renamed


class Sum(NamedTuple):
    """An equation that makes a bucket's partial sum, and the variable that holds the sum once it is reduced."""

    bucket: int
    eqn: Any
    reduced: Any


class Separated(NamedTuple):
    """A body whose buckets wait for each other; `joined` are the buckets that could not be kept apart from the one above."""

    eqns: list[Any]
    outputs: list[Any]
    joined: tuple[int, ...]


def separate_buckets(eqns: Sequence[Any], outputs: Sequence[Any], sums: Sequence[Sum]) -> Separated:
    """Returns the equations of a body with barriers between its buckets, in an order in which they can run.

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
        if not ancestors(written, [one.reduced for one in first]).isdisjoint(id(one.eqn) for one in second):
            joined.append(bucket)  # the two would wait for each other
            sums = [one._replace(bucket=bucket) if one.bucket == above else one for one in sums]
            continue
        written, results, sums = _barrier(written, results, sums, first, second)
    return Separated(in_order(written), results, tuple(joined))


def _barrier(eqns: list[Any], outputs: list[Any], sums: list[Sum], first: list[Sum], second: list[Sum]) -> tuple[Any, Any, list[Sum]]:
    """Writes one barrier between two buckets."""
    made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    after_first = computed_from(eqns, [one.reduced for one in first])
    latest = [_latest(one.eqn, made) for one in second]
    # Operands that are computed from the first bucket wait for it anyway.
    waiting = list(dict.fromkeys(var for var in latest if var is not None and var not in after_first))
    reduced = list(dict.fromkeys(one.reduced for one in first if not isinstance(one.reduced, jexc.Literal)))
    after = {var: jexc.Var(var.aval) for var in (*waiting, *reduced)}
    barrier = barrier_of(list(after), list(after.values()), first[0].eqn.source_info)
    swapped = {var: after[var] for var in reduced}
    behind = {id(one.eqn) for one in second}
    rewrites: dict[int, Any] = {}
    rewritten = []
    for eqn in eqns:
        names = {**swapped, **{var: after[var] for var in waiting}} if id(eqn) in behind else swapped
        new = eqn if names.keys().isdisjoint(variables(eqn)) else eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars])
        rewrites[id(eqn)] = new
        rewritten.append(new)
    outputs = [renamed(atom, swapped) for atom in outputs]
    # Right behind its last input: after everything that could run before it, it would run last.
    rewritten.insert(max(made.get(var, -1) for var in after) + 1, barrier)
    return rewritten, outputs, [one._replace(eqn=rewrites[id(one.eqn)]) for one in sums]


def _latest(eqn: Any, made: dict[Any, int]) -> Any:
    """Returns the operand of an equation that is made last: the cotangent."""
    own = variables(eqn)
    return max(own, key=lambda var: made.get(var, -1), default=None)

"""Equations of one body: what depends on what, an order in which they can run, barriers between them, and clamps."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.trace.build.jaxprs.equations import struct_of, structs_of, written


def variables(eqn: Any) -> list[Any]:
    """Returns the variables that an equation reads."""
    return [atom for atom in eqn.invars if not isinstance(atom, jexc.Literal)]


def computed_from(eqns: Sequence[Any], some: Iterable[Any]) -> set[Any]:
    """Returns some variables and all that depend on them."""
    found = {var for var in some if not isinstance(var, jexc.Literal)}
    for eqn in in_order(eqns):
        if not found.isdisjoint(variables(eqn)):
            found.update(eqn.outvars)
    return found


def ancestors(eqns: Sequence[Any], some: Iterable[Any]) -> set[int]:
    """Returns the identities of the equations that some variables depend on."""
    wanted = {var for var in some if not isinstance(var, jexc.Literal)}
    found = set()
    for eqn in reversed(in_order(eqns)):
        if not wanted.isdisjoint(eqn.outvars):
            found.add(id(eqn))
            wanted.update(variables(eqn))
    return found


def in_order(eqns: Sequence[Any]) -> list[Any]:
    """Returns the equations in an order in which they can run, as near to the given one as can be."""
    made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    missing = [len({made[var] for var in variables(eqn) if var in made}) for eqn in eqns]
    readers: list[list[int]] = [[] for _ in eqns]
    for place, eqn in enumerate(eqns):
        for before in {made[var] for var in variables(eqn) if var in made}:
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
    """Returns an optimization barrier from some variables to others."""
    template = jax.make_jaxpr(lambda *values: jax.lax.optimization_barrier(values))(*structs_of(operands)).jaxpr.eqns[0]
    return template.replace(invars=list(operands), outvars=list(results), source_info=source_info)


def repetition(atom: Any, shape: tuple[int, ...], source_info: Any) -> Any:
    """Returns an equation that repeats an operand along its dimensions of size 1."""
    template = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, shape, range(len(shape))))(struct_of(atom.aval)).jaxpr.eqns[0]
    return template.replace(invars=[atom], outvars=[jexc.Var(template.outvars[0].aval)], source_info=source_info)


def clamped_starts(eqn: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the equations that clamp the starts of a dynamic slice, and its operands behind them.

    XLA adds the starts of a slice of a slice without clamping the first one, so blocks of a slice beyond the end would be others.
    """
    eqns, made = [], list(operands)
    limits = [size - own for size, own in zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)]
    for place, limit in enumerate(limits, 1):
        if isinstance(made[place], jexc.Literal):
            continue
        dtype = made[place].aval.dtype
        first, last = np.zeros((), dtype), np.asarray(min(limit, np.iinfo(dtype).max), dtype)
        new, (made[place],) = written(partial(_clamped, first, last), [made[place]], eqn.source_info)
        eqns += new
    return eqns, made


def _clamped(first: Any, last: Any, start: Any) -> Any:
    return jax.lax.clamp(first, start, last)

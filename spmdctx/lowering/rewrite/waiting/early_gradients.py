"""Has a backward pass make the gradients of a recomputed region soon after it, so that XLA frees what only their products read.

`machine.xla.memory.late_gradients` tells what XLA would do. Barriers stand behind the regions of a backward pass. Each joins what the rest
of the pass reads of a region with the region's gradients. Where these may be reduced, the half that is made last waits for the next
region: its reductions hide behind the products of that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx.lowering.rewrite.equations import barrier_of, variables
from spmdctx.rules.control_flow import MANUAL, RECOMPUTED, opened, with_bodies
from spmdctx.trace.build.jaxprs.equations import renamed

_KERNELS = frozenset({"pallas_call"})


class _Region(NamedTuple):
    """A recomputed region of a backward pass: its place, what later regions depend on, and the other gradients, in the order made."""

    place: int
    handed_on: tuple[Any, ...]
    gradients: tuple[Any, ...]


def with_early_gradients(closed: jexc.ClosedJaxpr, *, is_split: bool) -> jexc.ClosedJaxpr:
    """Returns the program with such barriers; one without recomputed regions comes back as it is.

    Args:
        closed: the program.
        is_split: whether it runs on more than one device, so that its gradients may be reduced where they are made.
    """
    return _rewritten(closed, is_split)


def _rewritten(body: Any, is_split: bool) -> Any:
    jaxpr = opened(body)
    eqns, outputs = [_with_bodies(eqn, is_split) for eqn in jaxpr.eqns], list(jaxpr.outvars)
    regions = _regions(eqns, outputs)
    if len(regions) > 1:
        eqns, outputs = _tied(eqns, outputs, _waited_for(regions, is_split))
    elif all(own is eqn for own, eqn in zip(eqns, jaxpr.eqns, strict=True)):
        return body
    jaxpr = jaxpr.replace(eqns=eqns, outvars=outputs)
    return jexc.ClosedJaxpr(jaxpr, body.consts) if hasattr(body, "consts") else jaxpr


def _with_bodies(eqn: Any, is_split: bool) -> Any:
    name = eqn.primitive.name
    if name in _KERNELS:
        return eqn
    params = with_bodies(eqn.params, partial(_rewritten, is_split=is_split and name not in MANUAL))
    return eqn if all(params[key] is value for key, value in eqn.params.items()) else eqn.replace(params=params)


def _regions(eqns: Sequence[Any], outputs: Sequence[Any]) -> list[_Region]:
    """Returns the recomputed regions of a body, in order."""
    read = set(chain.from_iterable(map(variables, eqns))).union(var for var in outputs if not isinstance(var, jexc.Literal))
    wanted: set[Any] = set()
    found: list[_Region] = []
    for place in reversed(range(len(eqns))):
        eqn = eqns[place]
        is_region = eqn.primitive.name in RECOMPUTED and eqn.params.get("differentiated", False)
        if is_region:
            made = [var for var in _by_making(eqn) if var in read and jnp.issubdtype(var.aval.dtype, jnp.inexact)]
            handed_on = tuple(var for var in made if var in wanted)
            found.append(_Region(place, handed_on, tuple(var for var in made if var not in wanted)))
        if is_region or not wanted.isdisjoint(eqn.outvars):
            wanted.update(variables(eqn))
    return found[::-1]


def _by_making(eqn: Any) -> list[Any]:
    """Returns the results of a region in the order in which its body makes them."""
    body = opened(eqn.params["jaxpr"])
    made = {var: place for place, own in enumerate(body.eqns) for var in own.outvars}
    places = [-1 if isinstance(var, jexc.Literal) else made.get(var, -1) for var in body.outvars]
    return [var for _, var in sorted(zip(places, eqn.outvars, strict=True), key=itemgetter(0))]


def _waited_for(regions: Sequence[_Region], is_split: bool) -> dict[int, tuple[Any, ...]]:
    """Returns by the place of a region the variables of the barrier behind it, where there is one."""
    found: dict[int, tuple[Any, ...]] = {}
    late: tuple[Any, ...] = ()
    for region in regions:
        early = math.ceil(len(region.gradients) / 2) if is_split else len(region.gradients)
        gradients = (*late, *region.gradients[:early])
        if region.handed_on and gradients:
            found[region.place] = (*region.handed_on, *gradients)
        late = region.gradients[early:]
    return found


def _tied(eqns: Sequence[Any], outputs: Sequence[Any], barriers: Mapping[int, tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """Returns the equations and results of a body with barriers behind some places."""
    names: dict[Any, Any] = {}
    written: list[Any] = []
    for place, eqn in enumerate(eqns):
        written.append(eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars]))
        if place in barriers:
            after = [jexc.Var(var.aval) for var in barriers[place]]
            written.append(barrier_of(barriers[place], after, eqn.source_info))
            names.update(zip(barriers[place], after, strict=True))
    return written, [renamed(atom, names) for atom in outputs]

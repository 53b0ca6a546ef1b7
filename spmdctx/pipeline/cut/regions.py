"""Writes the equations of a checkpointed region that lie in one chunk as a region again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax.extend.core as jexc

from spmdctx.pipeline.cut.inline import Region
from spmdctx.trace.build.jaxprs.equations import renamed


def closed_regions(
    eqns: Sequence[Any],
    outvars: Iterable[Any],
    region_of: Mapping[int, Region],
    whole: Callable[[Region, Sequence[Any]], bool],
    copies: Any,
) -> list[Any]:
    """Returns the equations of a chunk with each run of equations of one region as one equation.

    Args:
        eqns: of the chunk.
        outvars: its results.
        region_of: the region of each equation that was in one, by its identity.
        whole: returns whether a run is all of its region that stands on the line.
        copies: returns the equations by which a chunk computes what some atoms need.
    """
    runs = [(region, list(run)) for region, run in groupby(eqns, lambda eqn: region_of.get(id(eqn)))]
    read_after: set[Any] = {atom for atom in outvars if not isinstance(atom, jexc.Literal)}
    found: list[Any] = []
    for region, run in reversed(runs):
        if region is None:
            new = run
        elif whole(region, run):
            new = [_restored(region, run)]
        else:
            new = [_part(region, run, read_after, [eqn for eqn in copies(run) if region_of.get(id(eqn)) is region])]
        found[:0] = new
        read_after |= {atom for eqn in new for atom in eqn.invars if not isinstance(atom, jexc.Literal)}
    return found


def _restored(region: Region, run: Sequence[Any]) -> Any:
    """Returns the equation that was opened. Results that its own equations on the line do not make have other sources here."""
    made = {var for eqn in run for var in eqn.outvars}
    outvars = []
    for atom, var in zip(region.results, region.eqn.outvars, strict=True):
        is_made = not isinstance(atom, jexc.Literal) and atom in made
        made.discard(atom if is_made else None)
        outvars.append(atom if is_made else jexc.Var(var.aval))
    return region.eqn.replace(outvars=outvars)


def _part(region: Region, run: Sequence[Any], read_after: set[Any], copies: Sequence[Any]) -> Any:
    """Returns a region of some of the equations, which recomputes them as the whole one does."""
    inner = [*copies, *run]
    made = {var for eqn in inner for var in eqn.outvars}
    on_line = dict.fromkeys(var for eqn in run for var in eqn.outvars)
    read = dict.fromkeys(atom for eqn in inner for atom in eqn.invars if not isinstance(atom, jexc.Literal) and atom not in made)
    outer = [var for var in on_line if var in read_after]
    names = {var: jexc.Var(var.aval) for var in (*read, *made)}
    eqns = [
        eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars], outvars=[renamed(var, names) for var in eqn.outvars])
        for eqn in inner
    ]
    old = region.eqn.params["jaxpr"]
    jaxpr = old.replace(
        constvars=[],
        invars=[names[var] for var in read],
        outvars=[names[var] for var in outer],
        eqns=eqns,
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=old.debug_info._replace(arg_names=None, result_paths=None),
    )
    return region.eqn.replace(invars=list(read), outvars=outer, params={**region.eqn.params, "jaxpr": jaxpr}, effects=jaxpr.effects)

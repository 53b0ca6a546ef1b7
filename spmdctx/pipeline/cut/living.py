"""Leaves out what nothing reads: equations, and rows that a scan stacks."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.pipeline.cut.inline import Opened


def living(opened: Opened) -> Opened:
    """Returns a program without equations whose results nothing reads; what has an effect stays."""
    jaxpr = opened.closed.jaxpr
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, jexc.Literal)}
    region_of, source_of, eqns = {}, {}, []
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and read.isdisjoint(eqn.outvars):
            continue
        kept = _with_read_rows(eqn, read) if eqn.primitive.name == "scan" else eqn
        eqns.append(kept)
        read.update(atom for atom in kept.invars if not isinstance(atom, jexc.Literal))
        source_of[id(kept)] = opened.source_of[id(eqn)]
        if id(eqn) in opened.region_of:
            region_of[id(kept)] = opened.region_of[id(eqn)]
    closed = jexc.ClosedJaxpr(jaxpr.replace(eqns=eqns[::-1]), opened.closed.consts)
    return Opened(closed, region_of, source_of)


def _with_read_rows(scan: Any, read: set[Any]) -> Any:
    """Returns a scan that stacks only what is read."""
    _, carries = scan_counts(scan.params)
    kept = [place for place, var in enumerate(scan.outvars) if place < carries or var in read]
    if len(kept) == len(scan.outvars):
        return scan
    body = scan.params["jaxpr"]
    inner = body.jaxpr.replace(
        outvars=[body.jaxpr.outvars[place] for place in kept], debug_info=body.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    )
    params = {**scan.params, "jaxpr": jexc.ClosedJaxpr(inner, body.consts)}
    return scan.replace(outvars=[scan.outvars[place] for place in kept], params=params)

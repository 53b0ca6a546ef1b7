"""Writes the bodies of nested jits in place of their calls, so that a cut can lie inside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.rules.control_flow import call_body, opened
from spmdctx.trace.build.jaxprs.equations import renamed

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Calls that do nothing but run their body. Others say how it is differentiated."""


class Region(NamedTuple):
    """A call that was opened: its equation, and the atoms that are its results now."""

    eqn: Any
    results: tuple[Any, ...]


class Opened(NamedTuple):
    """A program whose calls of some kind were opened.

    Attributes:
        closed: the program.
        region_of: the region of each equation that was in one, by the equation's identity.
        source_of: the identity of the equation of the given program from which each one comes, by its identity.
    """

    closed: jexc.ClosedJaxpr
    region_of: dict[int, Region]
    source_of: dict[int, int]


def inlined(closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns the same program with no such calls at its top level; constants of bodies become its own."""
    return opened_calls(closed, lambda _: False).closed


def opened_calls(closed: jexc.ClosedJaxpr, is_opened: Callable[[Any], bool]) -> Opened:
    """Returns the same program with some other calls of its top level opened, too; calls inside of those stay."""
    writer = _Writer(list(closed.jaxpr.constvars), list(closed.consts))
    names: dict[Any, Any] = {}
    region_of: dict[int, Region] = {}
    source_of: dict[int, int] = {}
    for eqn in closed.jaxpr.eqns:
        first = len(writer.eqns)
        if is_opened(eqn):
            outer = eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars])
            region = Region(outer, tuple(writer.body(outer, outer.invars, outer.source_info)))
            names.update(zip(eqn.outvars, region.results, strict=True))
            region_of.update((id(own), region) for own in writer.eqns[first:])
        else:
            writer.write([eqn], names, None)
        source_of.update((id(own), id(eqn)) for own in writer.eqns[first:])
    outvars = [renamed(atom, names) for atom in closed.jaxpr.outvars]
    flat = jexc.ClosedJaxpr(closed.jaxpr.replace(constvars=writer.constvars, eqns=writer.eqns, outvars=outvars), writer.consts)
    return Opened(flat, region_of, source_of)


class _Writer:
    """Collects equations. A body that is called twice is written twice, each time with variables of its own."""

    def __init__(self, constvars: list[Any], consts: list[Any]) -> None:
        self.constvars, self.consts = constvars, consts
        self.eqns: list[Any] = []

    def write(self, eqns: list[Any], names: dict[Any, Any], outer: Any) -> None:
        """Writes the equations of a body; `names` gives its inputs, and takes what its results are called here."""
        for eqn in eqns:
            info = eqn.source_info if outer is None else eqn.source_info.replace(name_stack=outer.name_stack + eqn.source_info.name_stack)
            operands = [renamed(atom, names) for atom in eqn.invars]
            if eqn.primitive.name in _INLINED:
                names.update(zip(eqn.outvars, self.body(eqn, operands, info), strict=True))
                continue
            fresh = eqn.outvars if outer is None else [jexc.Var(var.aval) for var in eqn.outvars]
            self.eqns.append(eqn.replace(invars=operands, outvars=fresh, source_info=info))
            if outer is not None:
                names.update(zip(eqn.outvars, fresh, strict=True))

    def body(self, eqn: Any, operands: list[Any], info: Any) -> list[Any]:
        """Writes the body of a call; returns the atoms of its results."""
        body = call_body(eqn.primitive.name, eqn.params)
        jaxpr = opened(body)
        inside = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True):
            inside[var] = jexc.Var(var.aval)
            self.constvars.append(inside[var])
            self.consts.append(value)
        self.write(jaxpr.eqns, inside, info)
        return [renamed(atom, inside) for atom in jaxpr.outvars]

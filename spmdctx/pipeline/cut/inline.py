"""Writes the bodies of nested jits in place of their calls, so that a cut can lie inside of them."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc

from spmdctx.rules.control_flow import call_body, opened
from spmdctx.trace.build.jaxprs.equations import renamed

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Calls that do nothing but run their body. Others say how it is differentiated."""


def inlined(closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns the same program with no such calls at its top level; constants of bodies become its own."""
    writer = _Writer(list(closed.jaxpr.constvars), list(closed.consts))
    names: dict[Any, Any] = {}
    writer.write(closed.jaxpr, names, None)
    outvars = [renamed(atom, names) for atom in closed.jaxpr.outvars]
    return jexc.ClosedJaxpr(closed.jaxpr.replace(constvars=writer.constvars, eqns=writer.eqns, outvars=outvars), writer.consts)


class _Writer:
    """Collects equations. A body that is called twice is written twice, each time with variables of its own."""

    def __init__(self, constvars: list[Any], consts: list[Any]) -> None:
        self.constvars, self.consts = constvars, consts
        self.eqns: list[Any] = []

    def write(self, jaxpr: Any, names: dict[Any, Any], outer: Any) -> None:
        """Writes the equations of a body; `names` gives its inputs, and takes what its results are called here."""
        for eqn in jaxpr.eqns:
            info = eqn.source_info if outer is None else eqn.source_info.replace(name_stack=outer.name_stack + eqn.source_info.name_stack)
            operands = [renamed(atom, names) for atom in eqn.invars]
            if eqn.primitive.name in _INLINED:
                names.update(zip(eqn.outvars, self._body(eqn, operands, info), strict=True))
                continue
            fresh = eqn.outvars if outer is None else [jexc.Var(var.aval) for var in eqn.outvars]
            self.eqns.append(eqn.replace(invars=operands, outvars=fresh, source_info=info))
            if outer is not None:
                names.update(zip(eqn.outvars, fresh, strict=True))

    def _body(self, eqn: Any, operands: list[Any], info: Any) -> list[Any]:
        """Writes the body of a call; returns the atoms of its results."""
        body = call_body(eqn.primitive.name, eqn.params)
        jaxpr = opened(body)
        inside = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True):
            inside[var] = jexc.Var(var.aval)
            self.constvars.append(inside[var])
            self.consts.append(value)
        self.write(jaxpr, inside, info)
        return [renamed(atom, inside) for atom in jaxpr.outvars]

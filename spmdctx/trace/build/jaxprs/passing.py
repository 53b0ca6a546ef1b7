"""Finds the results of a program that are its operands, handed on through calls: nnx.remat returns the whole state that it was given."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc

from spmdctx.rules.control_flow import CALLS, call_body, call_operands, opened
from spmdctx.trace.build.jaxprs.equations import renamed


def passed_on(jaxpr: Any) -> list[int | None]:
    """Returns for each result of a jaxpr the number of the operand that it is, None where it is none."""
    names: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in CALLS or name == "custom_linear_solve":
            continue
        operands = [eqn.invars[place] for place in call_operands(name, eqn.params, len(eqn.invars))]
        found = passed_on(opened(call_body(name, eqn.params)))
        for var, place in zip(eqn.outvars, found, strict=True):
            if place is not None:
                names[var] = renamed(operands[place], names)
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    atoms = [renamed(atom, names) for atom in jaxpr.outvars]
    return [None if isinstance(atom, jexc.Literal) else numbers.get(atom) for atom in atoms]

"""Finds the results of a program that are its inputs, however many calls and loops hand them on."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.rules.control_flow import CALLS, call_body, call_operands, opened


def passed_inputs(body: Any) -> list[int | None]:
    """Returns for each result of a program, open or closed, the number of the input that it is; None for what is computed."""
    jaxpr = opened(body)
    number_of = {var: number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, _passed_operands(eqn), strict=True):
            source = None if operand is None else _number(operand, number_of)
            if source is not None:
                number_of[var] = source
    return [_number(atom, number_of) for atom in jaxpr.outvars]


def _number(atom: Any, number_of: dict[Any, int]) -> int | None:
    return None if isinstance(atom, jexc.Literal) else number_of.get(atom)


def _passed_operands(eqn: Any) -> list[Any]:
    """Returns for each result of an equation the operand that it is, or None."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        places = call_operands(name, params, len(eqn.invars))
        return [None if source is None else eqn.invars[places[source]] for source in passed_inputs(call_body(name, params))]
    if name != "scan":
        return [None] * len(eqn.outvars)
    first, carries = scan_counts(params)
    found = []
    for place, source in enumerate(passed_inputs(params["jaxpr"])):
        # A carry must stay what it is, and rows must be those of the operand; other inputs differ from what the loop gives.
        same = source == first + place if place < carries else source is not None and source >= first + carries
        found.append(eqn.invars[source] if same and source is not None else None)
    return found

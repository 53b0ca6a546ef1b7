"""Finds the values of a line that have no cotangent: where they cross a cut, nothing is sent back for them.

They do not move with the parameters, or the loss does not move with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax.numpy as jnp

from spmdctx.pipeline.cut.line import Line, variables


def without_tangents(line: Line, differentiated: Collection[int]) -> set[Any]:
    """Returns the values that have no tangent where only some inputs of the loss have one, as far as the open equations show.

    These are whole numbers, and what only `stop_gradient` or inputs that are not differentiated lead to. What is inside of loops and
    branches is not looked at: each of their results has a tangent if one of their operands has.

    Args:
        line: the equations.
        differentiated: the inputs of the loss by which it is differentiated, by number.
    """
    moving = {line.jaxpr.invars[leaf] for leaf in differentiated}
    found: set[Any] = set()
    seen: set[int] = set()
    for eqn in line.eqns:
        pending = [eqn]
        while pending:
            own = pending[-1]
            before = [line.copied[var] for var in variables(own.invars) if var in line.copied and id(line.copied[var]) not in seen]
            if before:
                pending += before
                continue
            pending.pop()
            seen.add(id(own))
            moves = own.primitive.name != "stop_gradient" and not moving.isdisjoint(variables(own.invars))
            for var in own.outvars:
                (moving if moves and has_cotangent(var.aval) else found).add(var)
    return found


def beside_loss(line: Line, value: int) -> set[Any]:
    """Returns the values that the loss does not read, directly or through others: they lead to other results alone, or to nothing.

    Args:
        line: the equations.
        value: the number of the loss among the results.
    """
    reached: set[Any] = set()

    def reach(atoms: Iterable[Any]) -> None:
        pending = list(variables(atoms))
        while pending:
            var = pending.pop()
            if var not in reached:
                reached.add(var)
                pending += variables(line.copied[var].invars) if var in line.copied else ()

    reach([line.jaxpr.outvars[value]])
    for eqn in reversed(line.eqns):
        if not reached.isdisjoint(eqn.outvars):
            reach(eqn.invars)
    return {var for eqn in line.eqns for var in eqn.outvars if var not in reached}


def has_cotangent(aval: Any) -> bool:
    """Returns whether values of a type can be differentiated."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))

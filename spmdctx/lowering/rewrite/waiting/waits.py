"""Makes the rest of a step wait for an update of state, so that XLA frees what only the gradient's product reads.

`cost.memory.early_updates` chooses these updates where it counts memory. TPU's compiler runs equations behind an optimization barrier
after those before it. Left alone, it fuses the product with the update, and runs both at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx.lowering.rewrite.equations import ancestors, barrier_of, in_order, variables
from spmdctx.trace.build.jaxprs.equations import renamed
from spmdctx.wording.warned import warn_user


def wait_for(eqns: Sequence[Any], outputs: Sequence[Any], gate: Any, *results: Any) -> tuple[list[Any], list[Any]]:
    """Returns the equations of a body, and its results, in which all that reads `gate` waits for `results`.

    Args:
        eqns: the equations of the body.
        outputs: its results.
        gate: a variable that nothing before `results` reads.
        results: the new state.
    """
    made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    if not made.keys() >= {gate, *results}:
        text = "The step does not wait for an update of state as planned, and may take more memory: the update is made inside of a call."
        warn_user(text)
        return list(eqns), list(outputs)
    after = {var: jexc.Var(var.aval) for var in (gate, *results)}
    before = ancestors(eqns, after)
    barrier = barrier_of(list(after), list(after.values()), eqns[made[gate]].source_info)
    written = [
        eqn
        if id(eqn) in before or after.keys().isdisjoint(variables(eqn))
        else eqn.replace(invars=[renamed(atom, after) for atom in eqn.invars])
        for eqn in eqns
    ]
    written.insert(made[gate] + 1, barrier)
    return in_order(written), [renamed(atom, after) for atom in outputs]

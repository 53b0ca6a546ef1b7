"""Both passes of a chunk as one program, by which a search sees what a whole micro-batch costs."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.pipeline.programs.slots import Holds, TaskProgram
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.trace.build.jaxprs.equations import structs_of


def joint_program(forward: TaskProgram, backward: TaskProgram) -> TaskProgram:
    """Returns the program that runs the forward pass of a micro-batch, and then its backward pass."""
    inputs = [*forward.inputs, *(slot for slot in backward.inputs if slot not in forward.inputs and slot.holds is not Holds.KEPT)]
    given = {slot: var for one in (backward, forward) for slot, var in zip(one.inputs, one.jaxpr.jaxpr.invars, strict=True)}
    outputs = [*(slot for slot in forward.outputs if slot.holds is not Holds.KEPT), *backward.outputs]

    def run(*operands: Any) -> list[Any]:
        held = dict(zip(inputs, operands, strict=True))
        made: dict[Any, Any] = {}
        for one in (forward, backward):
            results = jexc.jaxpr_as_fun(one.jaxpr)(*(held[slot] for slot in one.inputs))
            made.update(zip(one.outputs, results, strict=True))
            held.update((slot, value) for slot, value in made.items() if slot.holds is Holds.KEPT)
        return [made[slot] for slot in outputs]

    jaxpr = jax.make_jaxpr(run)(*structs_of([given[slot] for slot in inputs]))
    return TaskProgram(Kind.BACKWARD, jaxpr, tuple(inputs), tuple(outputs))

"""What a worker computes for servers that do not wait for each other: values that one server makes and another one reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.results import Fate
from spmdctx.pipeline.cut.line import is_array, needed, variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut, slots_of
from spmdctx.server.program.spec import raw, typed
from spmdctx.trace.build.origins import source_line


@dataclass(frozen=True)
class Crossing:
    """The program of the values that cross, for one part.

    Attributes:
        jaxpr: it takes results of the loss and inputs of the step.
        inputs: their slots.
        outputs: the slots of what it makes.
        pulled: the inputs of the step that servers hold and that it reads, by number.
    """

    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pulled: tuple[int, ...]

    def run(self, made: Mapping[str, Any], values: Mapping[int, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns what crosses, by slot.

        Args:
            made: the results of the loss, by slot.
            values: the inputs of the step, by number.
        """
        if not self.outputs:
            return {}
        given = []
        for slot, aval in zip(self.inputs, self.jaxpr.in_avals, strict=True):
            given.append(typed(made[slot], aval) if slot in made else values[int(slot.partition("/")[2])])
        return {slot: np.asarray(raw(value)) for slot, value in zip(self.outputs, self._call(*given), strict=True)}

    @cached_property
    def _call(self) -> Any:
        return jax.jit(jexc.jaxpr_as_fun(self.jaxpr))


def crossing_of(step: ServedStep, cut: Cut) -> Crossing:
    """Returns what a worker computes in the place of servers.

    Raises:
        UnsupportedError: a value needs state that workers do not have, or all parts of the batch.
    """
    _check_parts(step, cut)
    around = cut.around
    body = around.jaxpr.jaxpr
    slot_of = slots_of(around, cut.rows.slot_of)
    wanted = {slot for server in cut.servers for own in server.awaits for slot in own}
    if cut.rows.tables and wanted:
        raise UnsupportedError(
            "Servers that do not wait for each other cannot cut tables by rows where values of all arrays meet, such as a global norm.",
            where=step.loss.where,
            fix='update_mode="sync", or an optimizer that treats each array by itself',
        )
    outputs = [var for var, slot in slot_of.items() if slot in wanted]
    eqns = needed(around.after, outputs)
    made = {var for eqn in eqns for var in eqn.outvars}
    constants = dict(zip(body.constvars, around.jaxpr.consts, strict=True))
    read = dict.fromkeys([*(var for eqn in eqns for var in variables(eqn.invars)), *outputs])
    inputs = [var for var in read if var not in made and var not in constants]
    number_of = {var: number for number, var in enumerate(body.invars)}
    held = [number_of[var] for var in inputs if number_of.get(var) in cut.held]
    far = [number for number in held if number not in cut.pulled and is_array(body.invars[number])]
    if far:
        _refuse(step, cut, eqns, far)
    jaxpr = body.replace(
        constvars=[var for var in read if var in constants],
        invars=inputs,
        outvars=outputs,
        eqns=eqns,
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    closed = jexc.ClosedJaxpr(jaxpr, [constants[var] for var in read if var in constants])
    return Crossing(closed, tuple(slot_of[var] for var in inputs), tuple(slot_of[var] for var in outputs), tuple(held))


def _check_parts(step: ServedStep, cut: Cut) -> None:
    """Refuses what is whole only when all parts are there."""
    rows, count = step.loss.rows, step.loss.num_parts
    whole = [rows[number].path for server in cut.servers for number in server.joined if rows[number].fate is Fate.STACKED]
    if whole and count > 1:
        raise UnsupportedError(
            "In async each update has one part of the batch, and the step reads a result of the loss that grows with the batch.",
            where=step.loss.where,
            got=", ".join(dict.fromkeys(whole)),
            fix='return its mean, or update_mode="sync"',
        )


def _refuse(step: ServedStep, cut: Cut, eqns: list[Any], far: list[int]) -> None:
    paths = [step.captured.inputs[number].path for number in far]
    reached = {cut.around.jaxpr.jaxpr.invars[number] for number in far}
    slot_of, wanted = slots_of(cut.around, cut.rows.slot_of), {slot for server in cut.servers for own in server.awaits for slot in own}
    where = ""
    for eqn in eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
            if not where and any(slot_of.get(var) in wanted for var in eqn.outvars):
                where = source_line(eqn.source_info) or eqn.primitive.name
    raise UnsupportedError(
        "In async servers do not wait for each other, and the update combines state that several of them hold.",
        where=where,
        got=f"what it combines depends on {', '.join(paths[:3])}{' and others' if len(paths) > 3 else ''}",
        need="norms and sums over gradients, or over parameters that the loss reads",
        fix='update_mode="sync", or num_servers=1',
    )

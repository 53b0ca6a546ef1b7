"""A program of a pipeline as a captured step, which the planner takes as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.program import UserPin
from spmdctx.trace.capture.capture import Captured, InputLeaf, OutputLeaf
from spmdctx.trace.capture.pytrees import PureFlattening

_ROLES = {
    Holds.SUM: Role.OPTIMIZER,
    Holds.ENTERING: Role.BATCH,
    Holds.OF_LEAVING: Role.ARGUMENT,
    Holds.KEPT: Role.ARGUMENT,
    Holds.LINK: Role.ARGUMENT,
}


class LossLeaf(NamedTuple):
    """An input of the loss as plans name it."""

    path: str
    role: Role


Pins = Mapping[Slot, TensorSharding]
"""Shardings that another program of the pipeline has decided."""


def captured_task(name: str, program: TaskProgram, leaves: Sequence[LossLeaf], mesh: LogicalMesh | None, pins: Pins) -> Captured:
    """Returns a program of a pipeline as a captured step.

    Args:
        name: of the program, in messages and profiles.
        program: what to plan.
        leaves: the inputs of the loss.
        mesh: the one that the pins are written for; None if there are none.
        pins: shardings of operands and results that are decided.
    """
    axes = () if mesh is None else mesh.axes
    body = program.jaxpr.jaxpr
    inputs = tuple(_input(slot, var.aval, leaves, pins) for slot, var in zip(program.inputs, body.invars, strict=True))
    sums = {slot: index for index, slot in enumerate(program.inputs) if slot.holds is Holds.SUM}
    outputs = tuple(
        OutputLeaf(str(slot.holds), tuple(var.aval.shape), str(var.aval.dtype), sums.get(slot))
        for slot, var in zip(program.outputs, body.outvars, strict=True)
    )
    structure = PureFlattening((tuple(var.aval for var in body.invars), {})).structure(range(len(outputs)))
    captured = Captured(name, program.jaxpr, inputs, outputs, structure, 0.0, mesh_axes=axes)
    built = build(program.jaxpr, [Argument(leaf.path, leaf.role) for leaf in inputs], captured.carried)
    own = [
        UserPin(value, axes, pins[slot])
        for slot, value in zip(program.outputs, built.graph.outputs, strict=True)
        if slot in pins and value >= 0 and slot not in sums
    ]
    return replace(captured, program=replace(built, user_pins=(*built.user_pins, *own)))


def _input(slot: Slot, aval: Any, leaves: Sequence[LossLeaf], pins: Pins) -> InputLeaf:
    of_loss = slot.holds in (Holds.LEAF, Holds.SUM)
    path = leaves[slot.number].path if of_loss else f"{slot.holds} {slot.number}"
    role = leaves[slot.number].role if slot.holds is Holds.LEAF else _ROLES[slot.holds]
    pin = pins.get(slot)
    names = None if pin is None else tuple(dim or None for dim in pin)
    return InputLeaf(
        path if slot.holds is not Holds.SUM else f"gradient of {path}",
        tuple(aval.shape),
        str(aval.dtype),
        role,
        donated=slot.holds is Holds.SUM,
        metadata=names,
    )

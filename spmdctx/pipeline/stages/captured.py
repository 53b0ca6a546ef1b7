"""A program of a pipeline as a captured step, which the planner takes as any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.errors import StrategyError
from spmdctx.ir.graph import LITERAL, Accumulator, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.program import Program, UserPin
from spmdctx.trace.capture.capture import Captured, InputLeaf, OutputLeaf
from spmdctx.trace.capture.pytrees import PureFlattening
from spmdctx.trace.scope.settings import Settings


class LossLeaf(NamedTuple):
    """An input of the loss as plans name it; `strategy` is its entry of a dataset_strategy that has one for each batch leaf."""

    path: str
    role: Role
    strategy: object = None


def batch_entries(captured: Captured, dataset: object) -> dict[str, object]:
    """Returns the entries of a dataset_strategy for each batch leaf of a step, by path; none of a strategy that is given by name.

    Raises:
        StrategyError: there are more or fewer.
    """
    if not isinstance(dataset, tuple):
        return {}
    paths = [leaf.path for leaf in captured.inputs if leaf.role is Role.BATCH]
    if len(paths) != len(dataset):
        raise StrategyError(
            f"dataset_strategy has {len(dataset)} entries, but the step has {len(paths)} batch leaves.",
            got=f"dataset_strategy {dataset}",
            need=f"one entry per batch leaf: {', '.join(paths)}",
        )
    return dict(zip(paths, dataset, strict=True))


def with_entries(settings: Settings, entries: Sequence[object]) -> Settings:
    """Returns the settings of one program, whose batch leaves take these entries of a dataset_strategy; None leaves one free."""
    if not isinstance(settings.context.dataset_strategy, tuple):
        return settings
    own: Any = tuple(entries)
    return replace(settings, context=replace(settings.context, dataset_strategy=own))


Pins = Mapping[Slot, TensorSharding]
"""Shardings that another program of the pipeline has decided."""


class Operand(NamedTuple):
    """An operand of a program: its name, role and sharding; None for a sharding leaves it free.

    `layers` are the axes that split the first dimension of an operand which is free otherwise.
    """

    path: str
    role: Role
    pin: TensorSharding | None = None
    donated: bool = False
    layers: AxisNames = ()


class Outcome(NamedTuple):
    """A result of a program: its name, its sharding or None, and the operand whose next value it is, or None.

    `layers` are the axes that split the first dimension of a result which is free otherwise.
    """

    path: str
    pin: TensorSharding | None = None
    carried_from: int | None = None
    layers: AxisNames = ()


def captured_program(
    name: str,
    jaxpr: jexc.ClosedJaxpr,
    mesh: LogicalMesh | None,
    operands: Sequence[Operand],
    results: Sequence[Outcome],
    known: dict[Any, Program] | None = None,
) -> Captured:
    """Returns a flat program as a captured step.

    Args:
        name: of the program, in messages and profiles.
        jaxpr: the program.
        mesh: the one that the pins are written for; None if there are none.
        operands: one for each.
        results: one for each.
        known: what was built from the program, by the names and roles of its operands; what is built here is added.
    """
    axes = () if mesh is None else mesh.axes
    inputs = tuple(
        InputLeaf(
            own.path,
            tuple(aval.shape),
            str(aval.dtype),
            own.role,
            donated=own.donated,
            metadata=None if own.pin is None else tuple(dim or None for dim in own.pin),
        )
        for own, aval in zip(operands, jaxpr.in_avals, strict=True)
    )
    outputs = tuple(
        OutputLeaf(own.path, tuple(aval.shape), str(aval.dtype), own.carried_from)
        for own, aval in zip(results, jaxpr.out_avals, strict=True)
    )
    structure = PureFlattening((tuple(jaxpr.in_avals), {})).structure(range(len(outputs)))
    captured = Captured(name, jaxpr, inputs, outputs, structure, 0.0, mesh_axes=axes, is_part=True)
    arguments, known = [Argument(own.path, own.role) for own in operands], {} if known is None else known
    key = (*arguments, *captured.carried)
    built = known[key] if key in known else known.setdefault(key, build(jaxpr, arguments, captured.carried))
    own = [
        UserPin(value, axes, result.pin)
        for result, value in zip(results, built.graph.outputs, strict=True)
        if result.pin is not None and value != LITERAL and result.carried_from is None
    ]
    named: list[tuple[Operand | Outcome, int, Any]] = [*zip(operands, built.graph.inputs, jaxpr.in_avals, strict=True)]
    named += zip(results, built.graph.outputs, jaxpr.out_avals, strict=True)
    for one, value, aval in named:
        if one.layers and one.pin is None and value != LITERAL:
            own.append(UserPin(value, axes, (one.layers, *[None] * (len(aval.shape) - 1))))
    return replace(captured, program=replace(built, user_pins=(*built.user_pins, *own)))


class Between(NamedTuple):
    """What runs of a chunk's program hand on to later runs in the same step.

    Attributes:
        runs: those after which sums of gradients are complete, if they may wait until then to be reduced; else 1.
        sum_role: the role of these sums; the parallel optimizer splits those that are part of its state.
        carried: for leaves that one micro-batch takes from the one before, the results that are their next values, split alike.
    """

    runs: int = 1
    sum_role: Role = Role.OPTIMIZER
    carried: Mapping[int, int] = MappingProxyType({})


def captured_task(
    name: str,
    program: TaskProgram,
    leaves: Sequence[LossLeaf],
    mesh: LogicalMesh | None,
    pins: Pins,
    between: Between = Between(),  # noqa: B008  # a constant
) -> Captured:
    """Returns a program of a chunk as a captured step.

    Args:
        name: of the program.
        program: the program.
        leaves: the inputs of the loss.
        mesh: the one that the pins are written for; None if there are none.
        pins: shardings that are decided.
        between: what runs hand on to later ones.
    """
    runs, sum_role = between.runs, between.sum_role
    next_of = {Slot(Holds.LEAF, leaf): Slot(Holds.RESULT, result) for leaf, result in between.carried.items()}
    sums = {next_of.get(slot, slot): index for index, slot in enumerate(program.inputs) if slot.holds is Holds.SUM or slot in next_of}
    operands = [_operand(slot, leaves, pins.get(slot), sum_role) for slot in program.inputs]
    results = [Outcome(f"{slot.holds} {slot.number}", pins.get(slot), sums.get(slot)) for slot in program.outputs]
    captured = captured_program(name, program.jaxpr, mesh, operands, results, program.built)
    return captured if runs == 1 else replace(captured, program=_accumulating(captured.built(), program, runs))


def _accumulating(built: Program, program: TaskProgram, runs: int) -> Program:
    """Returns a program whose graph says that several runs add up the sums of gradients."""
    made = dict(zip(program.outputs, built.graph.outputs, strict=True))
    given = zip(program.inputs, built.graph.inputs, strict=True)
    found = [Accumulator(value, made[slot], runs) for slot, value in given if slot.holds is Holds.SUM and slot in made]
    return replace(built, graph=replace(built.graph, accumulators=tuple(found)))


def _operand(slot: Slot, leaves: Sequence[LossLeaf], pin: TensorSharding | None, sum_role: Role) -> Operand:
    if slot.holds is Holds.LEAF:
        return Operand(leaves[slot.number].path, leaves[slot.number].role, pin)
    if slot.holds is Holds.SUM:
        return Operand(f"gradient of {leaves[slot.number].path}", sum_role, pin, donated=True)
    return Operand(f"{slot.holds} {slot.number}", Role.BATCH if slot.holds is Holds.ENTERING else Role.ARGUMENT, pin)

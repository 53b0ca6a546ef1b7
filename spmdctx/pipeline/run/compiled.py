"""The compiled programs of a stage's chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmdctx.ir.graph import LITERAL
from spmdctx.lowering.compile import JitOptions, as_held, jit_program
from spmdctx.lowering.compile_options import Options
from spmdctx.machine.xla.kept.layouts import LAYOUTS_ON
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.lowered import Kept, Lowerable
from spmdctx.pipeline.run.routes import is_here
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.pipeline.stages.plans import Planned, PlannedChunk, PlannedTask
from spmdctx.trace.specs import make_mesh, named_sharding

_STAYING = frozenset({Holds.KEPT, Holds.LINK})
"""What only programs of the same chunk read."""

OptionsOf = Callable[[Planned, Sequence[Any]], Options]
"""Gives the compile options of a planned program for the devices of its stage."""


def no_options(planned: Planned, devices: Sequence[Any]) -> Options:
    """Returns no options."""
    return {}


@dataclass(frozen=True)
class Jitted:
    """A planned program: where its operands and results lie, and what runs it, None where its stage belongs to other processes.

    `types` are those in which the tape passes its operands. The compiler chooses how results of `free_layouts` lie in memory.
    """

    run: jax.stages.Wrapped | None
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    free_layouts: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CompiledTask:
    """A jitted program with the slots of its operands and results."""

    jitted: Jitted
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


@dataclass(frozen=True)
class CompiledChunk:
    """The programs of a chunk, and where its arrays lie; `reduction` completes its sums of gradients, None if its tasks do so."""

    tasks: Mapping[Kind, CompiledTask]
    shardings: Mapping[Slot, NamedSharding]
    planned: PlannedChunk
    reduction: CompiledTask | None = None

    @cached_property
    def lowerable(self) -> Mapping[Kind, Lowerable]:
        """The tasks that this process runs, each after those whose results it reads as they choose to lay them out."""
        found: dict[Kind, Lowerable] = {}
        makers: dict[Slot, tuple[Lowerable, int]] = {}
        for kind, task in self.tasks.items():
            if task.jitted.run is not None:
                kept = tuple(Kept(operand, *makers[slot]) for operand, slot in enumerate(task.inputs) if slot in makers)
                one = found[kind] = Lowerable(task.jitted.run, task.jitted.types, kept)
                makers.update({task.outputs[result]: (one, result) for result in task.jitted.free_layouts})
        return found

    def total(self, leaf: int) -> Slot:
        """Returns the slot of a leaf's gradient when it is complete."""
        return Slot(Holds.TOTAL if leaf in self.planned.held else Holds.SUM, leaf)


def jitted(planned: Planned, avals: Sequence[Any], devices: Sequence[Any], options: JitOptions) -> Jitted:
    """Jits a planned program for the devices of its stage, if this process has some of them; nothing is compiled yet.

    `avals` are the types of its operands.
    """
    mesh, graph, directives = make_mesh(planned.mesh, devices), planned.program.graph, planned.directives
    values, held = planned.assignment.values, directives.loop_sums.axes
    inputs = tuple(named_sharding(mesh, as_held(value, values[value], directives)) for value in graph.inputs)
    outputs = tuple(named_sharding(mesh, as_held(value, values[value], directives) if value != LITERAL else ()) for value in graph.outputs)
    avals = [
        aval.update(shape=(planned.mesh.num_slices(held[value]), *aval.shape)) if value in held else aval
        for value, aval in zip(graph.inputs, avals, strict=True)
    ]
    if not is_here(named_sharding(mesh, ())):
        return Jitted(None, inputs, outputs, placed_types(avals, inputs))
    program = jit_program(planned.program, planned.assignment, planned.mesh, devices, planned.directives, options)
    return Jitted(
        program.jitted, program.in_shardings, program.out_shardings, placed_types(avals, program.in_shardings), options.free_layouts
    )


def compiled_chunk(
    chunk: PlannedChunk, devices: Sequence[Any], reduction: PlannedTask | None = None, options_of: OptionsOf = no_options
) -> CompiledChunk:
    """Jits the programs of a chunk for the devices of its stage, and the one that completes its gradients; nothing is compiled yet."""
    shardings: dict[Slot, NamedSharding] = {}
    tasks = {kind: _compiled(task, devices, shardings, options_of) for kind, task in chunk.tasks.items()}
    last = _compiled(reduction, devices, shardings, options_of) if reduction is not None else None
    return CompiledChunk(tasks, shardings, chunk, last)


def _compiled(task: PlannedTask, devices: Sequence[Any], shardings: dict[Slot, NamedSharding], options_of: OptionsOf) -> CompiledTask:
    planned, program = task.planned, task.program
    renewed = set(program.outputs)
    donated = [index for index, slot in enumerate(program.inputs) if slot.holds is Holds.SUM and slot in renewed]
    name = f"pipeline_{task.name or program.kind.name.lower()}"
    chooses = devices[0].platform in LAYOUTS_ON
    free = frozenset(index for index, slot in enumerate(program.outputs) if chooses and slot.holds in _STAYING)
    options = JitOptions(donated, options_of(planned, devices), name, free)
    made = jitted(planned, program.jaxpr.in_avals, devices, options)
    shardings.update(zip(program.inputs, made.in_shardings, strict=True))
    shardings.update(zip(program.outputs, made.out_shardings, strict=True))
    return CompiledTask(made, program.inputs, program.outputs)


def placed_types(avals: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of arrays that lie where a program wants them."""
    return tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
        for aval, sharding in zip(avals, shardings, strict=True)
    )

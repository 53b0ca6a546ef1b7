"""The compiled programs of a stage's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmdctx.lowering.compile import JitOptions, jit_program
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.pipeline.stages.plans import PlannedChunk, PlannedTask


@dataclass(frozen=True)
class CompiledTask:
    """A jitted program with the slots of its operands and results, and the types in which the walk passes its operands."""

    run: jax.stages.Wrapped
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    types: tuple[jax.ShapeDtypeStruct, ...] = ()


@dataclass(frozen=True)
class CompiledChunk:
    """The programs of a chunk, and where its arrays lie."""

    tasks: Mapping[Kind, CompiledTask]
    shardings: Mapping[Slot, NamedSharding]
    planned: PlannedChunk


def compiled_chunk(chunk: PlannedChunk, devices: Sequence[Any]) -> CompiledChunk:
    """Jits the programs of a chunk for the devices of its stage; nothing is compiled yet."""
    shardings: dict[Slot, NamedSharding] = {}
    tasks = {kind: _compiled(task, devices, shardings) for kind, task in chunk.tasks.items()}
    return CompiledChunk(tasks, shardings, chunk)


def _compiled(task: PlannedTask, devices: Sequence[Any], shardings: dict[Slot, NamedSharding]) -> CompiledTask:
    planned, program = task.planned, task.program
    donated = [index for index, slot in enumerate(program.inputs) if slot.holds is Holds.SUM]
    name = f"pipeline_{task.name or program.kind.name.lower()}"
    jitted = jit_program(planned.program, planned.assignment, planned.mesh, devices, planned.directives, JitOptions(donated, name=name))
    shardings.update(zip(program.inputs, jitted.in_shardings, strict=True))
    shardings.update(zip(program.outputs, jitted.out_shardings, strict=True))
    return CompiledTask(jitted.jitted, program.inputs, program.outputs, placed_types(program.jaxpr.in_avals, jitted.in_shardings))


def placed_types(avals: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of arrays that lie where a program wants them."""
    return tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
        for aval, sharding in zip(avals, shardings, strict=True)
    )

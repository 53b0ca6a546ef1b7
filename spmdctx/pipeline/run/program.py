"""A planned pipeline as a function of flat leaves: places them, walks the schedule, and runs what follows the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.keys import fold
from spmdctx.gradients.results import Fate
from spmdctx.ir.mesh import replicated
from spmdctx.lowering.compile import JitOptions, jit_program
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import CompiledChunk, compiled_chunk
from spmdctx.pipeline.run.walk import Held, Walk
from spmdctx.pipeline.stages.whole import PlannedPipeline, PlannedProgram, sharding_of, stages_of
from spmdctx.trace.specs import make_mesh, named_sharding


@dataclass(frozen=True)
class _Compiled:
    """A program after the loss, jitted for the devices of its stage."""

    program: PlannedProgram
    run: jax.stages.Wrapped
    in_shardings: tuple[NamedSharding, ...]


class PipelineProgram:
    """Runs a pipelined step.

    Args:
        pipeline: the planned step.
        devices: at least as many as the plan has; stage s takes the s-th part of them.
    """

    def __init__(self, pipeline: PlannedPipeline, devices: Sequence[Any]) -> None:
        self._pipeline = pipeline
        count = pipeline.mesh.num_devices
        self._devices = [devices[stage * count : (stage + 1) * count] for stage in range(pipeline.schedule.num_stages)]
        self.meshes: list[Mesh] = [make_mesh(pipeline.mesh, own) for own in self._devices]
        self._chunks: list[CompiledChunk] = [
            compiled_chunk(chunk, self._devices[pipeline.stage_of_chunk(number)]) for number, chunk in enumerate(pipeline.planned)
        ]
        carried = [
            {leaf: result for leaf, result in pipeline.step.loss.carried.items() if leaf in chunk.leaves and result in chunk.results}
            for chunk in pipeline.chunks
        ]
        self._walk = Walk(self._chunks, pipeline.schedule, pipeline.simulation.order, carried)
        self._rounds = [[self._compiled(one) for one in programs] for programs in pipeline.rounds]

    @property
    def counts(self) -> Any:
        """What the last run has moved, and had in flight."""
        return self._walk.counts

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        """Where each input of the step lies: on the devices of its stage."""
        return tuple(self._home(var) for var in self._pipeline.around.jaxpr.jaxpr.invars)

    @cached_property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        """Where each result of the step lies."""
        outvars = self._pipeline.around.jaxpr.jaxpr.outvars
        return tuple(named_sharding(self.meshes[0], ()) if isinstance(var, jexc.Literal) else self._home(var) for var in outvars)

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Runs the step on flat leaves; returns its flat results."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UnsupportedError(
                "A pipeline runs many programs, so that it cannot stand inside of jit, grad or vmap.", fix="call it outside"
            )
        body = self._pipeline.around.jaxpr.jaxpr
        values = _Values()
        for var, leaf, sharding in zip(body.invars, leaves, self.in_shardings, strict=True):
            values.keep(stages_of(self._pipeline, var), var, jax.device_put(leaf, sharding))
        self._run_before(values)
        held = [self._held(number, values) for number in range(len(self._chunks))]
        self._walk.run(held)
        self._finish(held, values)
        for programs in self._rounds:
            made = [(one, self._run_after(one, values)) for one in programs]
            for one, results in made:
                for var, value in zip(one.program.program.outputs, results, strict=True):
                    values.keep(one.program.program.stage, var, value)
        return tuple(values.result(atom) for atom in body.outvars)

    def _run_after(self, one: _Compiled, values: _Values) -> Any:
        program = one.program.program
        return one.run(*(values.on(program.stage, var, place) for var, place in zip(program.inputs, one.in_shardings, strict=True)))

    def _home(self, var: Any) -> NamedSharding:
        return named_sharding(self.meshes[stages_of(self._pipeline, var)], sharding_of(self._pipeline, var))

    def whole(self, stage: int, var: Any) -> NamedSharding:
        """Returns the sharding of a value that every device of a stage has whole."""
        return named_sharding(self.meshes[stage], replicated(len(var.aval.shape)))

    def _compiled(self, one: PlannedProgram) -> _Compiled:
        planned, stage = one.planned, one.program.stage
        name = f"pipeline_after_{stage}"
        jitted = jit_program(
            planned.program, planned.assignment, planned.mesh, self._devices[stage], planned.directives, JitOptions(name=name)
        )
        return _Compiled(one, jitted.jitted, jitted.in_shardings)

    @cached_property
    def _before(self) -> Any:
        """The program of what the step computes before the loss, or None if there is nothing: its operands, its results and itself."""
        around = self._pipeline.around
        body = around.jaxpr.jaxpr
        made = [var for eqn in around.before for var in eqn.outvars]
        later = (around.loss.invars, *(eqn.invars for eqn in around.after), body.outvars)
        read = {atom for atoms in later for atom in variables(atoms)}
        outputs = [var for var in made if var in read]
        if not outputs:
            return None
        used = {var for eqn in around.before for var in variables(eqn.invars)}
        inputs = [var for var in body.invars if var in used]
        debug_info = body.debug_info._replace(arg_names=None, result_paths=None)
        jaxpr = body.replace(invars=inputs, outvars=outputs, eqns=list(around.before), debug_info=debug_info)
        return inputs, outputs, jax.jit(jexc.jaxpr_as_fun(jexc.ClosedJaxpr(jaxpr, around.jaxpr.consts)))

    def _run_before(self, values: _Values) -> None:
        if self._before is None:
            return
        inputs, outputs, run = self._before
        for var, value in zip(outputs, run(*(values.on(0, var, self.whole(0, var)) for var in inputs)), strict=True):
            values.keep(0, var, value)

    def _held(self, number: int, values: _Values) -> Held:
        """Returns what a chunk has before its first task."""
        loss, chunk, compiled = self._pipeline.step.loss, self._pipeline.chunks[number], self._chunks[number]
        stage, atoms = self._pipeline.stage_of_chunk(number), self._pipeline.around.loss.invars
        step: dict[Slot, Any] = {}
        micro: dict[int, dict[Slot, Any]] = {index: {} for index in range(loss.num_micro)}
        for leaf in chunk.leaves:
            slot = Slot(Holds.LEAF, leaf)
            place, dim = compiled.shardings.get(slot), loss.operands[leaf].batch_dim
            if place is None:
                continue
            if dim is None and leaf not in loss.folded:
                step[slot] = values.on(stage, atoms[leaf], place)
                continue
            whole = values.on(stage, atoms[leaf], place)
            for index in range(loss.num_micro):
                part = _part(whole, dim, index, loss.num_micro) if dim is not None else whole
                part = fold(part, np.uint32(index)) if leaf in loss.folded else part
                micro[index][slot] = jax.device_put(part, place)
        passes = self._pipeline.planned[number].passes
        for leaf in passes.weights:
            slot, struct = Slot(Holds.SUM, leaf), passes.sum_of(leaf)
            step[slot] = jnp.zeros(struct.shape, struct.dtype, device=compiled.shardings[slot])
        return Held(step, micro)

    def _finish(self, held: Sequence[Held], values: _Values) -> None:
        """Makes the results of the loss from sums and from the results of micro-batches."""
        pipeline = self._pipeline
        loss, outvars = pipeline.step.loss, pipeline.around.loss.outvars
        for index, leaf in loss.gradient_of.items():
            first, *others = pipeline.readers(leaf)
            slot = Slot(Holds.SUM, leaf)
            place = self._chunks[first].shardings[slot]
            sums = [held[first].step.pop(slot), *(jax.device_put(held[other].step.pop(slot), place) for other in others)]
            mean = _mean(sums, loss.num_micro, loss.types[index].dtype)
            values.keep(pipeline.stage_of_chunk(first), outvars[index], mean)
        for index, result in loss.made_by.items():
            number = next(number for number, chunk in enumerate(pipeline.chunks) if result in chunk.results)
            parts = held[number].results[result]
            row = loss.rows[index]
            ordered = [parts[micro] for micro in range(loss.num_micro)]
            if row.fate is Fate.STACKED:
                value = _joined(ordered, row.dim)
            elif row.carry is None and row.fate in (Fate.AVERAGED, Fate.REDUCED):
                value = _mean(ordered, loss.num_micro, loss.types[index].dtype)
            else:
                value = ordered[-1]
            values.keep(pipeline.stage_of_chunk(number), outvars[index], value)


class _Values:
    """The values around the loss, each by the stage on which it lies."""

    def __init__(self) -> None:
        self._held: dict[Any, dict[int, Any]] = {}

    def keep(self, stage: int, var: Any, value: Any) -> None:
        """Keeps a value that a stage has."""
        self._held.setdefault(var, {})[stage] = value

    def on(self, stage: int, atom: Any, place: NamedSharding) -> Any:
        """Returns a value on a stage, moved there if another one has it."""
        if isinstance(atom, jexc.Literal):
            return jax.device_put(np.asarray(atom.val, atom.aval.dtype), place)
        held = self._held[atom]
        value = held[stage] if stage in held else next(iter(held.values()))
        return jax.device_put(value, place)

    def result(self, atom: Any) -> Any:
        """Returns a result of the step."""
        if isinstance(atom, jexc.Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        return next(iter(self._held[atom].values()))


@jax.jit
def _total(parts: Any) -> Any:
    return sum(parts[1:], start=parts[0])


def _mean(parts: Sequence[Any], count: int, dtype: Any) -> Any:
    return (_total(list(parts)) / count).astype(dtype)


def _part(x: Any, dim: int, number: int, count: int) -> Any:
    """Returns the elements number, number + count, ... along a dimension."""
    return jax.lax.slice_in_dim(x, number, None, count, dim)


def _joined(parts: Sequence[Any], dim: int | None) -> Any:
    """Joins micro-batches along the batch; the inverse of `_part`."""
    assert dim is not None, "what is stacked has a batch dimension"
    stacked = jnp.stack(parts, dim + 1)
    return stacked.reshape((*stacked.shape[:dim], stacked.shape[dim] * len(parts), *stacked.shape[dim + 2 :]))

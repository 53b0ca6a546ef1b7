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
from spmdctx.pipeline.capture.around import is_array
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.transfers import Moved, Route
from spmdctx.pipeline.run.compiled import CompiledChunk, compiled_chunk, placed_types
from spmdctx.pipeline.run.dry import carried_of
from spmdctx.pipeline.run.lowered import Lowerable
from spmdctx.pipeline.run.walk import Counts, Held, Walk
from spmdctx.pipeline.stages.whole import PlannedPipeline, PlannedProgram, stages_of
from spmdctx.trace.specs import make_mesh, named_sharding


@dataclass(frozen=True)
class _Compiled:
    """A program after the loss, jitted for the devices of its stage."""

    program: PlannedProgram
    run: jax.stages.Wrapped
    in_shardings: tuple[NamedSharding, ...]
    lowerable: Lowerable


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
        self._walk = Walk(self._chunks, pipeline.schedule, pipeline.simulation.order, carried_of(pipeline))
        self._rounds = [[self._compiled(one) for one in programs] for programs in pipeline.rounds]
        self.counts: Counts | None = None
        """What the last run has done; None before the first."""

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
        counts = Counts()
        values = _Values(counts)
        for var, leaf, sharding in zip(body.invars, leaves, self.in_shardings, strict=True):
            values.keep(stages_of(self._pipeline, var), var, jax.device_put(leaf, sharding))
        self._run_before(values)
        held = [self._held(number, values) for number in range(len(self._chunks))]
        self._walk.run(held, counts)
        self._finish(held, values)
        del held
        for programs in self._rounds:
            # All operands are moved before any program reuses the memory of its own.
            operands = [self._operands(one, values) for one in programs]
            for one, given in zip(programs, operands, strict=True):
                counts.after[one.program.name] += 1
                for var, value in zip(one.program.program.outputs, one.run(*given), strict=True):
                    values.keep(one.program.program.stage, var, value)
        self.counts = counts
        return tuple(values.result(atom) for atom in body.outvars)

    @staticmethod
    def _operands(one: _Compiled, values: _Values) -> list[Any]:
        program = one.program.program
        return [values.on(program.stage, var, place) for var, place in zip(program.inputs, one.in_shardings, strict=True)]

    @property
    def lowerable(self) -> dict[str, Lowerable]:
        """Each program by its name, with the types in which a call passes its operands."""
        found: dict[str, Lowerable] = {}
        if self._before is not None:
            inputs, _, run = self._before
            found["before"] = Lowerable(run, placed_types([var.aval for var in inputs], [self.whole(0, var) for var in inputs]))
        for chunk in self._chunks:
            for kind, task in chunk.tasks.items():
                found[chunk.planned.tasks[kind].name] = Lowerable(task.run, task.types)
        return found | {one.program.name: one.lowerable for programs in self._rounds for one in programs}

    def _home(self, var: Any) -> NamedSharding:
        stage = stages_of(self._pipeline, var)
        dims = self._pipeline.placed.get(var) if is_array(var) else None
        return named_sharding(self.meshes[stage], dims if dims is not None else replicated(len(var.aval.shape)))

    def whole(self, stage: int, var: Any) -> NamedSharding:
        """Returns the sharding of a value that every device of a stage has whole."""
        return named_sharding(self.meshes[stage], replicated(len(var.aval.shape)))

    def _compiled(self, one: PlannedProgram) -> _Compiled:
        planned, stage = one.planned, one.program.stage
        options = JitOptions(one.donated, name=f"pipeline_{one.name}")
        jitted = jit_program(planned.program, planned.assignment, planned.mesh, self._devices[stage], planned.directives, options)
        types = placed_types(one.program.jaxpr.in_avals, jitted.in_shardings)
        return _Compiled(one, jitted.jitted, jitted.in_shardings, Lowerable(jitted.jitted, types))

    @cached_property
    def _before(self) -> Any:
        """The program of what the loss reads and the step computes, or None if there is nothing."""
        around = self._pipeline.around
        body = around.jaxpr.jaxpr
        made = {var for eqn in around.before for var in eqn.outvars}
        outputs = [var for var in dict.fromkeys(around.loss.invars) if not isinstance(var, jexc.Literal) and var in made]
        if not outputs:
            return None
        read = {var for eqn in around.before for var in variables(eqn.invars)}
        inputs = [var for var in body.invars if var in read]
        jaxpr = body.replace(
            invars=inputs,
            outvars=outputs,
            eqns=list(around.before),
            debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
        )
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
                step[slot] = values.on(stage, atoms[leaf], place, Moved.WEIGHT)
                continue
            whole = values.on(stage, atoms[leaf], place, Moved.WEIGHT)
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
            sums = [held[first].step.pop(slot)]
            for other in others:
                value, stages = held[other].step.pop(slot), (pipeline.stage_of_chunk(other), pipeline.stage_of_chunk(first))
                values.count(Moved.GRADIENT, *stages, value)
                sums.append(jax.device_put(value, place))
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

    def __init__(self, counts: Counts) -> None:
        self._held: dict[Any, dict[int, Any]] = {}
        self._counts = counts

    def keep(self, stage: int, var: Any, value: Any) -> None:
        """Keeps a value that a stage has."""
        self._held.setdefault(var, {})[stage] = value

    def count(self, what: Moved, source: int, target: int, value: Any) -> None:
        """Counts an array that is moved, unless it stays on its stage."""
        if source != target:
            self._counts.add(Route(what, source, target), value.nbytes)

    def on(self, stage: int, atom: Any, place: NamedSharding, what: Moved = Moved.VALUE) -> Any:
        """Returns a value on a stage, moved there if another one has it; `what` says what it is then counted as."""
        if isinstance(atom, jexc.Literal):
            return jax.device_put(np.asarray(atom.val, atom.aval.dtype), place)
        held = self._held[atom]
        source = stage if stage in held else next(iter(held))
        self.count(what, source, stage, held[source])
        return jax.device_put(held[source], place)

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

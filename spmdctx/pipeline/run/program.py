"""A planned pipeline as a function of flat leaves: what comes before the loss, its schedule, and what follows it, on one tape."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
from jax.sharding import Mesh, NamedSharding

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import replicated
from spmdctx.lowering.compile import JitOptions
from spmdctx.pipeline.capture.around import EVERYWHERE, is_array
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import CompiledChunk, Jitted, compiled_chunk, jitted
from spmdctx.pipeline.run.edges import Joint, dividing, joining, joint_of, parts_of
from spmdctx.pipeline.run.grounds import Grounds, Values
from spmdctx.pipeline.run.routes import Spot, check_stages, is_here, move, without_shards
from spmdctx.pipeline.run.tape import Counts, Program, Tape
from spmdctx.pipeline.run.walk import Held, Walk
from spmdctx.pipeline.stages.whole import PlannedPipeline

_STEPS_AHEAD = 2
"""Steps that a process of several may have begun and not ended: their transfers wait for the other processes."""


class _Written(NamedTuple):
    """A tape that is done, and where its results are."""

    program: Program
    out_shardings: tuple[NamedSharding, ...]


class _Result(NamedTuple):
    """A result of the loss that a stage joins from pieces."""

    var: Any
    joint: Joint
    pieces: list[Spot]
    place: NamedSharding


class PipelineProgram:
    """Runs a pipelined step.

    Args:
        pipeline: the planned step.
        devices: at least as many as the plan has; stage s takes the s-th part of them.

    Raises:
        UnsupportedError: a stage has a part of a process's devices, and others of another process.
    """

    def __init__(self, pipeline: PlannedPipeline, devices: Sequence[Any]) -> None:
        self._pipeline = pipeline
        self._body = pipeline.around.jaxpr.jaxpr
        self._grounds = Grounds(pipeline.mesh, devices, pipeline.schedule.num_stages)
        check_stages([self._grounds.on((stage,), ()) for stage in self._grounds.stages])
        self._spans_processes = len({device.process_index for own in self._grounds.devices for device in own}) > 1
        self._running: deque[list[Any]] = deque()

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return self._grounds.union(self._grounds.stages)

    @property
    def counts(self) -> Counts:
        """What the last run has moved, and had in flight."""
        return self._written.program.counts

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        """Where each input of the step lies: on the devices of its stage, or of all that have it."""
        return tuple(self._grounds.on(self._home[var], self._dims(var)) for var in self._body.invars)

    @property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        """Where each result of the step lies."""
        return self._written.out_shardings

    def __call__(self, *leaves: Any) -> list[Any]:
        """Runs the step on flat leaves, which lie as `in_shardings` say; returns its flat results."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UnsupportedError(
                "A pipeline runs many programs, so that it cannot stand inside of jit, grad or vmap.", fix="call it outside"
            )
        if len(self._running) >= _STEPS_AHEAD:
            jax.block_until_ready(self._running.popleft())
        found = self._written.program(leaves)
        count = len(self._body.outvars)
        if self._spans_processes:
            self._running.append(found[count:])
        return found[:count]

    @cached_property
    def _home(self) -> dict[Any, tuple[int, ...]]:
        """The stages on which each input lies. All have scalars; those that read a part of the batch have that.

        In several processes all stages have the batch, so that every process has something to give.
        """
        pipeline, all_stages = self._pipeline, self._grounds.stages
        readers: dict[Any, set[int]] = {}
        for leaf, var in enumerate(pipeline.around.loss.invars):
            if not isinstance(var, jexc.Literal):
                readers.setdefault(var, set()).update(map(pipeline.stage_of_chunk, pipeline.readers(leaf)))
        for stage, (inputs, _, _) in self._before.items():
            for var in inputs:
                readers.setdefault(var, set()).add(stage)
        found: dict[Any, tuple[int, ...]] = {}
        for var, given in zip(self._body.invars, pipeline.step.captured.inputs, strict=True):
            stage = pipeline.placement.stage_of.get(var, EVERYWHERE)
            if stage == EVERYWHERE or (given.role is Role.BATCH and self._spans_processes):
                found[var] = all_stages
            elif given.role is Role.BATCH:
                found[var] = tuple(sorted(readers.get(var, set()))) or (stage,)
            else:
                found[var] = (stage,)
        return found

    def _dims(self, var: Any) -> Any:
        dims = self._pipeline.placed.get(var) if is_array(var) else None
        return dims if dims is not None else replicated(len(var.aval.shape))

    @cached_property
    def _before(self) -> dict[int, tuple[list[Any], list[Any], jexc.ClosedJaxpr]]:
        """By stage, what its chunks read and the step computes before the loss: inputs, outputs and program."""
        pipeline, around = self._pipeline, self._pipeline.around
        made = {var for eqn in around.before for var in eqn.outvars}
        found = {}
        for stage in self._grounds.stages:
            outputs = [
                var
                for leaf, var in enumerate(around.loss.invars)
                if not isinstance(var, jexc.Literal) and var in made and stage in map(pipeline.stage_of_chunk, pipeline.readers(leaf))
            ]
            if outputs:
                found[stage] = _needed(around.jaxpr, around.before, list(dict.fromkeys(outputs)))
        return found

    @cached_property
    def _written(self) -> _Written:
        tape, pipeline = Tape(), self._pipeline
        consts = dict(zip(self._body.constvars, pipeline.around.jaxpr.consts, strict=True))
        values = Values(tape, self._grounds, consts)
        for number, (var, place) in enumerate(zip(self._body.invars, self.in_shardings, strict=True)):
            values.keep(var, self._home[var], Spot(number, place, var.aval))
        self._write_before(tape, values)
        chunks = [
            compiled_chunk(chunk, self._grounds.devices[pipeline.stage_of_chunk(number)]) for number, chunk in enumerate(pipeline.planned)
        ]
        held = [self._write_begin(tape, values, number, chunk) for number, chunk in enumerate(chunks)]
        carried = [
            {leaf: result for leaf, result in pipeline.step.loss.carried.items() if leaf in chunk.leaves and result in chunk.results}
            for chunk in pipeline.chunks
        ]
        Walk(tape, chunks, carried).write(pipeline.simulation.order, held)
        ends = self._write_end(tape, values, chunks, held)
        self._write_rounds(tape, values)
        results = [
            self._result(values, var, leaf.carried_from)
            for var, leaf in zip(self._body.outvars, pipeline.step.captured.outputs, strict=True)
        ]
        for spot in {spot.name: spot for spot in results if not is_here(spot.place)}.values():
            if not isinstance(spot.name, int):
                tape.constant(spot.name, partial(without_shards, spot.aval, spot.place))
        names = [*(spot.name for spot in results), *ends]
        return _Written(tape.finished(range(len(self._body.invars)), names), tuple(spot.place for spot in results))

    def _write_before(self, tape: Tape, values: Values) -> None:
        for stage, (inputs, outputs, closed) in self._before.items():
            given = [values.on(var, stage).name for var in inputs]
            made = [
                Spot(("before", stage, number), self._grounds.on((stage,), self._dims(var)), var.aval) for number, var in enumerate(outputs)
            ]
            if is_here(made[0].place):
                run = jax.jit(jexc.jaxpr_as_fun(closed), out_shardings=[spot.place for spot in made])
                tape.run(run, given, [spot.name for spot in made])
            for var, spot in zip(outputs, made, strict=True):
                values.keep(var, (stage,), spot)

    def _write_begin(self, tape: Tape, values: Values, number: int, compiled: CompiledChunk) -> Held:
        """Writes what a chunk has before its first task."""
        loss, chunk = self._pipeline.step.loss, self._pipeline.chunks[number]
        stage, atoms = self._pipeline.stage_of_chunk(number), self._pipeline.around.loss.invars
        places, passes = compiled.shardings, self._pipeline.planned[number].passes
        parts = parts_of(loss, compiled, chunk.leaves)
        whole = [values.on(atoms[part.slot.number], stage) for part in parts]
        divided = {part.slot for part in parts}
        held = Held()
        for slot in (Slot(Holds.LEAF, leaf) for leaf in chunk.leaves):
            if slot in places and slot not in divided:
                held.step[slot] = values.on(atoms[slot.number], stage, places[slot])
        made: list[Spot] = []
        for part, of in zip(parts, whole, strict=True):
            for index in range(loss.num_micro):
                spot = Spot(("part", number, part.slot, index), places[part.slot], of.aval)
                held.micro.setdefault(index, {})[part.slot] = spot
                made.append(spot)
        sums = [passes.sum_of(leaf) for leaf in passes.weights]
        for leaf, struct in zip(passes.weights, sums, strict=True):
            slot = Slot(Holds.SUM, leaf)
            held.step[slot] = Spot(("zero", number, leaf), places[slot], struct)
            made.append(held.step[slot])
        if made and is_here(made[0].place):
            run = dividing(parts, loss.num_micro, sums, [spot.place for spot in made])
            tape.run(run, [spot.name for spot in whole], [spot.name for spot in made])
        return held

    def _write_end(self, tape: Tape, values: Values, chunks: Sequence[CompiledChunk], held: Sequence[Held]) -> list[Any]:
        """Writes the results of the loss, made of sums and of results of micro-batches; returns the names of what ends a step here."""
        pipeline = self._pipeline
        loss, outvars = pipeline.step.loss, pipeline.around.loss.outvars
        found: dict[int, list[_Result]] = {}
        for index, leaf in loss.gradient_of.items():
            first, *others = pipeline.readers(leaf)
            slot, var = Slot(Holds.SUM, leaf), outvars[index]
            place, stage = chunks[first].shardings[slot], pipeline.stage_of_chunk(first)
            pieces = [held[first].step[slot], *(move(tape, [held[other].step[slot]], [place])[0] for other in others)]
            joint = Joint(len(pieces), loss.types[index].dtype)
            found.setdefault(stage, []).append(_Result(var, joint, pieces, self._grounds.on((stage,), self._dims(var))))
        for index, result in loss.made_by.items():
            number = next(number for number, chunk in enumerate(pipeline.chunks) if result in chunk.results)
            stage, var, how = pipeline.stage_of_chunk(number), outvars[index], joint_of(loss, index)
            pieces = [held[number].results[result][micro] for micro in range(loss.num_micro)]
            if how is None:
                values.keep(var, (stage,), pieces[-1])
            else:
                found.setdefault(stage, []).append(_Result(var, how, pieces, pieces[0].place))
        ends: list[Any] = []
        for stage, results in found.items():
            made = [Spot(("end", stage, number), own.place, own.var.aval) for number, own in enumerate(results)]
            end = Spot(("ended", stage), self._grounds.on((stage,), ()), None)
            if is_here(end.place):
                run = joining([own.joint for own in results], loss.num_micro, [*(spot.place for spot in made), end.place])
                tape.run(run, [spot.name for own in results for spot in own.pieces], [*(spot.name for spot in made), end.name])
                ends.append(end.name)
            for own, spot in zip(results, made, strict=True):
                values.keep(own.var, (stage,), spot)
        return ends

    def _write_rounds(self, tape: Tape, values: Values) -> None:
        for number, programs in enumerate(self._pipeline.rounds):
            made = []
            for one in programs:
                stage, program = one.program.stage, one.program
                own: Jitted = jitted(one.planned, self._grounds.devices[stage], JitOptions(name=f"pipeline_after_{stage}"))
                given = [values.on(var, stage, place) for var, place in zip(program.inputs, own.in_shardings, strict=True)]
                spots = [
                    Spot(("after", number, stage, index), place, var.aval)
                    for index, (var, place) in enumerate(zip(program.outputs, own.out_shardings, strict=True))
                ]
                if own.run is not None:
                    tape.run(own.run, [spot.name for spot in given], [spot.name for spot in spots])
                made += [(var, stage, spot) for var, spot in zip(program.outputs, spots, strict=True)]
            for var, stage, spot in made:
                values.keep(var, (stage,), spot)

    def _result(self, values: Values, var: Any, source: int | None) -> Spot:
        """Writes how a result comes to where the input lies of which it is the next value.

        In several processes scalars come to all of them.
        """
        if source is not None:
            return values.over(var, self._home[self._body.invars[source]], self.in_shardings[source])
        if self._spans_processes and not is_array(var):
            stages = self._grounds.stages
            return values.over(var, stages, self._grounds.on(stages, replicated(len(var.aval.shape))))
        return values.anywhere(var)


def _needed(closed: jexc.ClosedJaxpr, eqns: Sequence[Any], outputs: list[Any]) -> tuple[list[Any], list[Any], jexc.ClosedJaxpr]:
    """Returns the program of some values: what it reads, what it gives, and itself."""
    wanted, own = set(outputs), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            own.append(eqn)
            wanted.update(variables(eqn.invars))
    body = closed.jaxpr
    inputs = [var for var in body.invars if var in wanted]
    consts = [(var, value) for var, value in zip(body.constvars, closed.consts, strict=True) if var in wanted]
    jaxpr = body.replace(
        constvars=[var for var, _ in consts],
        invars=inputs,
        outvars=outputs,
        eqns=own[::-1],
        effects=frozenset().union(*(eqn.effects for eqn in own)),
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    return inputs, outputs, jexc.ClosedJaxpr(jaxpr, [value for _, value in consts])

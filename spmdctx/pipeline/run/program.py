"""A planned pipeline as a function of flat leaves: what comes before the loss, its schedule, and what follows it, on one tape."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
from jax.sharding import Mesh, NamedSharding

from spmdctx.errors import UnsupportedError
from spmdctx.ir.mesh import replicated
from spmdctx.lowering.compile import JitOptions
from spmdctx.pipeline.capture.around import SPREAD
from spmdctx.pipeline.cut.line import is_array
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.transfers import Moved
from spmdctx.pipeline.run.compiled import CompiledChunk, Jitted, OptionsOf, compiled_chunk, jitted, no_options, placed_types
from spmdctx.pipeline.run.edges import Joint, dividing, joining, joint_of, parts_of
from spmdctx.pipeline.run.grounds import Grounds, Values, crossing
from spmdctx.pipeline.run.layers import LayerWriter
from spmdctx.pipeline.run.lowered import Lowerable
from spmdctx.pipeline.run.routes import Spot, check_stages, is_here, move, processes_of, without_shards
from spmdctx.pipeline.run.tape import AfterRun, Counts, Program, Tape
from spmdctx.pipeline.run.walk import Held, Walk
from spmdctx.pipeline.stages.homes import Homes, before_of, homes_of
from spmdctx.pipeline.stages.whole import PlannedPipeline, PlannedProgram, is_spread, sharding_of

_STEPS_AHEAD = 2
"""Steps that a process of several may have begun and not ended: their transfers wait for the other processes."""


class _Written(NamedTuple):
    """A tape that is done, where its results are, and the programs that it runs."""

    program: Program
    out_shardings: tuple[NamedSharding, ...]
    lowerable: Mapping[str, Lowerable]


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
        options_of: gives the compile options of each program.

    Raises:
        UnsupportedError: a stage has a part of a process's devices, and others of another process.
    """

    def __init__(self, pipeline: PlannedPipeline, devices: Sequence[Any], options_of: OptionsOf = no_options) -> None:
        self._pipeline, self._options_of = pipeline, options_of
        self._body = pipeline.around.jaxpr.jaxpr
        self._grounds = Grounds(pipeline.mesh, devices, pipeline.schedule.num_stages)
        check_stages([self._grounds.on((stage,), ()) for stage in self._grounds.stages])
        # CPUs run programs as their operands arrive, each process in an order of its own, and their collectives would meet others.
        on_cpu = self._grounds.devices[0][0].platform == "cpu"
        self._waits = on_cpu and any(len(processes_of(self._grounds.on((stage,), ()))) > 1 for stage in self._grounds.stages)
        self._spans_processes = len({device.process_index for own in self._grounds.devices for device in own}) > 1
        self._running: deque[list[Any]] = deque()

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return self._grounds.union(self._grounds.stages)

    @property
    def meshes(self) -> list[Mesh]:
        """The mesh of each stage."""
        return self._grounds.meshes

    @property
    def counts(self) -> Counts | None:
        """What the last run has done; None before the first."""
        return self._written.program.counts

    def dry_counts(self) -> Counts:
        """Returns what a run would count."""
        return self._written.program.dry_counts()

    @property
    def lowerable(self) -> Mapping[str, Lowerable]:
        """Each program of this process by its name, with the types in which a call passes its operands."""
        return self._written.lowerable

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
    def _home(self) -> Homes:
        """The stages on which each input lies."""
        return homes_of(self._pipeline, spans_processes=self._spans_processes)

    def _dims(self, var: Any) -> Any:
        return sharding_of(self._pipeline, var)

    @cached_property
    def _written(self) -> _Written:
        tape, pipeline = Tape(waits=self._waits), self._pipeline
        lowerable: dict[str, Lowerable] = {}
        consts = dict(zip(self._body.constvars, pipeline.around.jaxpr.consts, strict=True))
        values = Values(tape, self._grounds, consts)
        for number, (var, place) in enumerate(zip(self._body.invars, self.in_shardings, strict=True)):
            values.keep(var, self._home[var], Spot(number, place, var.aval), by_layers=is_spread(pipeline, var))
        self._write_before(tape, values, lowerable)
        layers = LayerWriter(tape, values, self._grounds, lowerable, self._dims)
        layers.take([own for own in pipeline.stacks if not own.stack.is_gradient])
        chunks = [
            compiled_chunk(chunk, self._grounds.devices[pipeline.stage_of_chunk(number)], pipeline.reductions.get(number), self._options_of)
            for number, chunk in enumerate(pipeline.planned)
        ]
        held = [self._write_begin(tape, values, number, chunk, lowerable) for number, chunk in enumerate(chunks)]
        for chunk in chunks:
            lowerable.update({chunk.planned.tasks[kind].name: one for kind, one in chunk.lowerable.items()})
        carried = [
            {leaf: result for leaf, result in pipeline.step.loss.carried.items() if leaf in chunk.leaves and result in chunk.results}
            for chunk in pipeline.chunks
        ]
        Walk(tape, chunks, pipeline.schedule.stage_of, carried).write(pipeline.simulation.order, held)
        self._write_reductions(tape, chunks, held, lowerable)
        ends = self._write_end(tape, values, chunks, held, lowerable)
        layers.give([own for own in pipeline.stacks if own.stack.is_gradient])
        self._write_rounds(tape, values, lowerable)
        results = [
            self._result(values, var, leaf.carried_from)
            for var, leaf in zip(self._body.outvars, pipeline.step.captured.outputs, strict=True)
        ]
        for spot in {spot.name: spot for spot in results if not is_here(spot.place)}.values():
            if not isinstance(spot.name, int):
                tape.constant(spot.name, partial(without_shards, spot.aval, spot.place))
        names = [*(spot.name for spot in results), *ends]
        return _Written(tape.finished(range(len(self._body.invars)), names), tuple(spot.place for spot in results), lowerable)

    def _write_before(self, tape: Tape, values: Values, lowerable: dict[str, Lowerable]) -> None:
        for place, (inputs, outputs, closed) in before_of(self._pipeline).items():
            stages = self._pipeline.stages_with(place)
            given = [
                values.over(var, stages, self._grounds.on(stages, self._dims(var))) if place == SPREAD else values.on(var, place)
                for var in inputs
            ]
            made = [
                Spot(("before", place, number), self._grounds.on(stages, self._dims(var)), var.aval) for number, var in enumerate(outputs)
            ]
            if is_here(made[0].place):
                run = jax.jit(jexc.jaxpr_as_fun(closed), out_shardings=[spot.place for spot in made])
                tape.run(run, [spot.name for spot in given], [spot.name for spot in made])
                lowerable[f"before_{'all' if place == SPREAD else place}"] = Lowerable(run, _types(given))
            for var, spot in zip(outputs, made, strict=True):
                values.keep(var, stages, spot, by_layers=is_spread(self._pipeline, var))

    def _write_begin(self, tape: Tape, values: Values, number: int, compiled: CompiledChunk, lowerable: dict[str, Lowerable]) -> Held:
        """Writes what a chunk has before its first task."""
        loss, chunk = self._pipeline.step.loss, self._pipeline.chunks[number]
        stage, atoms = self._pipeline.stage_of_chunk(number), self._pipeline.around.loss.invars
        places, passes = compiled.shardings, self._pipeline.planned[number].passes
        parts = parts_of(loss, compiled, chunk.leaves)
        whole = [values.on(atoms[part.slot.number], stage, what=Moved.WEIGHT) for part in parts]
        divided = {part.slot for part in parts}
        held = Held()
        for slot in (Slot(Holds.LEAF, leaf) for leaf in chunk.leaves):
            if slot in places and slot not in divided:
                held.step[slot] = values.on(atoms[slot.number], stage, places[slot], Moved.WEIGHT)
        made: list[Spot] = []
        for part, of in zip(parts, whole, strict=True):
            for index in range(loss.num_micro):
                spot = Spot(("part", number, part.slot, index), places[part.slot], of.aval)
                held.micro.setdefault(index, {})[part.slot] = spot
                made.append(spot)
        held_sums, mesh = compiled.planned.held, compiled.planned.mesh
        sums = [held_sums[leaf].struct(mesh) if leaf in held_sums else passes.sum_of(leaf) for leaf in passes.weights]
        for leaf, struct in zip(passes.weights, sums, strict=True):
            slot = Slot(Holds.SUM, leaf)
            held.step[slot] = Spot(("zero", number, leaf), places[slot], struct)
            made.append(held.step[slot])
        if made and is_here(made[0].place):
            run = dividing(parts, loss.num_micro, sums, [spot.place for spot in made])
            tape.run(run, [spot.name for spot in whole], [spot.name for spot in made])
            lowerable[f"begin{number}"] = Lowerable(run, _types(whole))
        return held

    def _write_reductions(self, tape: Tape, chunks: Sequence[CompiledChunk], held: Sequence[Held], lowerable: dict[str, Lowerable]) -> None:
        """Writes what completes the sums of gradients that no micro-batch reduces."""
        for number, planned in self._pipeline.reductions.items():
            chunk, own = chunks[number], held[number]
            task = chunk.reduction
            assert task is not None, "the chunk was compiled with its reduction"
            avals = planned.program.avals
            made = [Spot((planned.name, slot), chunk.shardings[slot], avals[slot]) for slot in task.outputs]
            if task.jitted.run is not None:
                tape.run(
                    task.jitted.run,
                    [own.step.pop(slot).name for slot in task.inputs],
                    [spot.name for spot in made],
                    AfterRun(planned.name),
                )
            own.step.update(zip(task.outputs, made, strict=True))
            _note(lowerable, planned.name, task.jitted)

    def _write_end(
        self, tape: Tape, values: Values, chunks: Sequence[CompiledChunk], held: Sequence[Held], lowerable: dict[str, Lowerable]
    ) -> list[Any]:
        """Writes the results of the loss, made of sums and of results of micro-batches; returns the names of what ends a step here."""
        pipeline = self._pipeline
        loss, outvars = pipeline.step.loss, pipeline.around.loss.outvars
        found: dict[int, list[_Result]] = {}
        for index, leaf in loss.gradient_of.items():
            first, *others = pipeline.readers(leaf)
            slot, var = chunks[first].total(leaf), outvars[index]
            place, stage = chunks[first].shardings[slot], pipeline.stage_of_chunk(first)
            pieces = [held[first].step[slot]]
            for other in others:
                spot = held[other].step[chunks[other].total(leaf)]
                event = crossing(Moved.GRADIENT, pipeline.stage_of_chunk(other), stage, spot)
                pieces += move(tape, [spot], [place], event)
            joint = Joint(len(pieces), loss.types[index].dtype)
            found.setdefault(stage, []).append(_Result(var, joint, pieces, self._grounds.on((stage,), self._dims(var))))
        for index, result in loss.made_by.items():
            number = next(number for number, chunk in enumerate(pipeline.chunks) if result in chunk.results)
            stage, var, joined = pipeline.stage_of_chunk(number), outvars[index], joint_of(loss, index)
            pieces = [held[number].results[result][micro] for micro in range(loss.num_micro)]
            if joined is None:
                values.keep(var, (stage,), pieces[-1])
            else:
                found.setdefault(stage, []).append(_Result(var, joined, pieces, pieces[0].place))
        ends: list[Any] = []
        for stage, results in found.items():
            made = [Spot(("end", stage, number), own.place, own.var.aval) for number, own in enumerate(results)]
            end = Spot(("ended", stage), self._grounds.on((stage,), ()), None)
            if is_here(end.place):
                run = joining([own.joint for own in results], loss.num_micro, [*(spot.place for spot in made), end.place])
                pieces = [spot for own in results for spot in own.pieces]
                tape.run(run, [spot.name for spot in pieces], [*(spot.name for spot in made), end.name])
                lowerable[f"end_{stage}"] = Lowerable(run, _types(pieces))
                ends.append(end.name)
            for own, spot in zip(results, made, strict=True):
                values.keep(own.var, (stage,), spot)
        return ends

    def _write_rounds(self, tape: Tape, values: Values, lowerable: dict[str, Lowerable]) -> None:
        for number, programs in enumerate(self._pipeline.rounds):
            ready: list[tuple[PlannedProgram, Jitted, list[Spot]]] = []
            # All operands are moved before any program reuses the memory of its own.
            for one in programs:
                stages, program = self._pipeline.stages_with(one.program.stage), one.program
                devices = [device for stage in stages for device in self._grounds.devices[stage]]
                options = JitOptions(one.donated, self._options_of(one.planned, devices), f"pipeline_{one.name}")
                own = jitted(one.planned, program.jaxpr.in_avals, devices, options)
                given = [values.over(var, stages, place) for var, place in zip(program.inputs, own.in_shardings, strict=True)]
                _note(lowerable, one.name, own)
                ready.append((one, own, given))
            for one, own, given in ready:
                outputs, stages = one.program.outputs, self._pipeline.stages_with(one.program.stage)
                spots = [
                    Spot(("after", number, one.name, index), place, var.aval)
                    for index, (var, place) in enumerate(zip(outputs, own.out_shardings, strict=True))
                ]
                if own.run is not None:
                    tape.run(own.run, [spot.name for spot in given], [spot.name for spot in spots], AfterRun(one.name))
                for var, spot in zip(outputs, spots, strict=True):
                    values.keep(var, stages, spot, by_layers=is_spread(self._pipeline, var))

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


def _types(spots: Sequence[Spot]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return placed_types([spot.aval for spot in spots], [spot.place for spot in spots])


def _note(lowerable: dict[str, Lowerable], name: str, own: Jitted) -> None:
    """Notes a program that this process runs."""
    if own.run is not None:
        lowerable[name] = Lowerable(own.run, own.types)

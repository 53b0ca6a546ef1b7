"""Counts what a planned pipeline moves between its stages in one step: arrays and bytes, by why they cross."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdctx.pipeline.cut.line import num_bytes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.transfers import Moved, Route
from spmdctx.pipeline.stages.whole import PlannedPipeline, stages_of


def transfers_of(pipeline: PlannedPipeline) -> dict[Route, tuple[int, int]]:
    """Returns the number of arrays that cross in a step, and their bytes, by route."""
    found: dict[Route, tuple[int, int]] = {}
    moves = (*_handed_on(pipeline), *_shared(pipeline), *_read_before(pipeline), *_read_after(pipeline))
    for route, times, size in moves:
        if route.source != route.target:
            count, total = found.get(route, (0, 0))
            found[route] = (count + times, total + times * size)
    return dict(sorted(found.items(), key=lambda item: (list(Moved).index(item[0].what), item[0])))


_Move = tuple[Route, int, int]
"""A route, how often an array takes it, and the array's bytes."""


def _handed_on(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives what leaves each chunk, and the cotangents that come back, once for each micro-batch."""
    stage_of, micro = pipeline.schedule.stage_of, pipeline.schedule.num_micro
    for number, chunk in enumerate(pipeline.planned):
        made: dict[Slot, Any] = {}
        for task in chunk.tasks.values():
            made.update(zip(task.program.outputs, task.program.jaxpr.jaxpr.outvars, strict=True))
        for what, holds, reader in (
            (Moved.ACTIVATION, Holds.LEAVING, number + 1),
            (Moved.COTANGENT, Holds.OF_ENTERING, number - 1),
        ):
            if 0 <= reader < len(pipeline.planned):
                route = Route(what, stage_of[number], stage_of[reader])
                yield from ((route, micro, num_bytes(var)) for slot, var in made.items() if slot.holds is holds)


def _shared(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives the leaves of the loss that chunks on other stages than their own read, and their gradients."""
    atoms, loss = pipeline.around.loss.invars, pipeline.step.loss
    for number, chunk in enumerate(pipeline.chunks):
        stage = pipeline.stage_of_chunk(number)
        for leaf in chunk.leaves:
            if not hasattr(atoms[leaf], "val"):
                yield Route(Moved.WEIGHT, _maker(pipeline, atoms[leaf]), stage), 1, num_bytes(atoms[leaf])
    for leaf in loss.gradient_of.values():
        first, *others = pipeline.readers(leaf)
        for other in others:
            task = next(one for one in pipeline.planned[other].tasks.values() if Slot(Holds.SUM, leaf) in one.program.inputs)
            var = task.program.jaxpr.jaxpr.invars[task.program.inputs.index(Slot(Holds.SUM, leaf))]
            yield Route(Moved.GRADIENT, pipeline.stage_of_chunk(other), pipeline.stage_of_chunk(first)), 1, num_bytes(var)


def _maker(pipeline: PlannedPipeline, var: Any) -> int:
    """Returns the stage that has a value before the loss; what the step computes for it lies on the first one."""
    return stages_of(pipeline, var) if var in pipeline.around.jaxpr.jaxpr.invars else 0


def _read_before(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives what is moved to the first stage, where the step computes what its loss reads."""
    around = pipeline.around
    made = {var for eqn in around.before for var in eqn.outvars}
    if made.isdisjoint(var for var in around.loss.invars if not hasattr(var, "val")):
        return
    read = {var for eqn in around.before for var in eqn.invars if not hasattr(var, "val")}
    for var in around.jaxpr.jaxpr.invars:
        if var in read:
            yield Route(Moved.VALUE, stages_of(pipeline, var), 0), 1, num_bytes(var)


def _read_after(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives what programs after the loss read from other stages: scalars."""
    loss, around = pipeline.step.loss, pipeline.around
    held: dict[Any, list[int]] = {var: [stages_of(pipeline, var)] for var in around.jaxpr.jaxpr.invars}
    held |= {var: [0] for eqn in around.before for var in eqn.outvars}
    for index, var in enumerate(around.loss.outvars):
        if index in loss.gradient_of:
            held[var] = [pipeline.stage_of_chunk(pipeline.readers(loss.gradient_of[index])[0])]
        else:
            made = loss.made_by[index]
            held[var] = [next(pipeline.stage_of_chunk(number) for number, chunk in enumerate(pipeline.chunks) if made in chunk.results)]
    for programs in pipeline.rounds:
        for one in programs:
            for var in one.program.inputs:
                if one.program.stage not in held[var]:
                    yield Route(Moved.VALUE, held[var][0], one.program.stage), 1, num_bytes(var)
        for one in programs:
            for var in one.program.outputs:
                held.setdefault(var, []).append(one.program.stage)

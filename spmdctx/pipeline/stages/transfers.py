"""Counts what a planned pipeline moves between its stages in one step: arrays and bytes, by why they cross."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from spmdctx.pipeline.cut.line import num_bytes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.stacks import StoredStack
from spmdctx.pipeline.programs.transfers import Moved, Route
from spmdctx.pipeline.stages.homes import Homes, before_of, homes_of
from spmdctx.pipeline.stages.whole import PlannedPipeline


def transfers_of(pipeline: PlannedPipeline) -> dict[Route, tuple[int, int]]:
    """Returns the number of arrays that cross in a step, and their bytes, by route."""
    found: dict[Route, tuple[int, int]] = {}
    moves = (*_handed_on(pipeline), *_layers(pipeline), *_shared(pipeline), *_around(pipeline))
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


def _layers(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives the layers of stacked parameters, and of their gradients, that other stages keep than use them."""
    yield from ((route, 1, size) for own in pipeline.stacks for route, size in layer_moves(own))


def layer_moves(own: StoredStack) -> list[tuple[Route, int]]:
    """Returns what a step moves of a stack, each with its bytes; also what stays on its stage."""
    stack = own.stack
    source, target = (own.used, own.kept) if stack.is_gradient else (own.kept, own.used)
    what, layer = Moved.GRADIENT if stack.is_gradient else Moved.WEIGHT, num_bytes(stack.whole) // own.num_layers
    return [
        (Route(what, source[piece.source].stage, target[piece.target].stage), layer * (piece.last - piece.first)) for piece in own.pieces
    ]


def _shared(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives the gradients of leaves that chunks on other stages than their own read."""
    for leaf in pipeline.step.loss.gradient_of.values():
        first, *others = pipeline.readers(leaf)
        for other in others:
            task = next(one for one in pipeline.planned[other].tasks.values() if Slot(Holds.SUM, leaf) in one.program.inputs)
            var = task.program.jaxpr.jaxpr.invars[task.program.inputs.index(Slot(Holds.SUM, leaf))]
            yield Route(Moved.GRADIENT, pipeline.stage_of_chunk(other), pipeline.stage_of_chunk(first)), 1, num_bytes(var)


class _Held:
    """The stages that have each value around the loss, in the order in which they got it; reading it elsewhere moves it there."""

    def __init__(self, homes: Homes) -> None:
        self._stages = {var: list(stages) for var, stages in homes.items()}

    def keep(self, var: Any, stage: int) -> None:
        """Notes that a stage has made a value."""
        stages = self._stages.setdefault(var, [])
        if stage not in stages:
            stages.append(stage)

    def read(self, var: Any, stage: int, what: Moved) -> Iterator[_Move]:
        """Gives the move that a read needs."""
        stages = self._stages.get(var, [stage])
        if stage not in stages:
            yield Route(what, stages[0], stage), 1, num_bytes(var)
            stages.append(stage)


def _around(pipeline: PlannedPipeline) -> Iterator[_Move]:
    """Gives what is moved for the loss as a whole, and after it."""
    held = _Held(homes_of(pipeline))
    yield from _for_the_loss(pipeline, held)
    _keep_results(pipeline, held)
    yield from _after(pipeline, held)


def _for_the_loss(pipeline: PlannedPipeline, held: _Held) -> Iterator[_Move]:
    """Gives what is moved before the first task."""
    for place, before in before_of(pipeline).items():
        for stage in pipeline.stages_with(place):
            for var in before.inputs:
                yield from held.read(var, stage, Moved.VALUE)
            for var in before.outputs:
                held.keep(var, stage)
    atoms = pipeline.around.loss.invars
    for number, chunk in enumerate(pipeline.chunks):
        for leaf in chunk.leaves:
            if not hasattr(atoms[leaf], "val"):
                yield from held.read(atoms[leaf], pipeline.stage_of_chunk(number), Moved.WEIGHT)


def _keep_results(pipeline: PlannedPipeline, held: _Held) -> None:
    """Notes where the results of the loss are."""
    loss = pipeline.step.loss
    for index, var in enumerate(pipeline.around.loss.outvars):
        if index in loss.gradient_of:
            held.keep(var, pipeline.stage_of_chunk(pipeline.readers(loss.gradient_of[index])[0]))
        elif index in loss.made_by:
            made = loss.made_by[index]
            held.keep(var, next(pipeline.stage_of_chunk(number) for number, chunk in enumerate(pipeline.chunks) if made in chunk.results))
    for own in pipeline.stacks:
        for rows in own.kept:
            held.keep(own.stack.whole, rows.stage)


def _after(pipeline: PlannedPipeline, held: _Held) -> Iterator[_Move]:
    """Gives what is moved after the last task, and to where the next step reads it."""
    for programs in pipeline.rounds:
        for one in programs:
            for var, stage in product(one.program.inputs, pipeline.stages_with(one.program.stage)):
                yield from held.read(var, stage, Moved.VALUE)
        for one in programs:
            for var, stage in product(one.program.outputs, pipeline.stages_with(one.program.stage)):
                held.keep(var, stage)
    body, homes = pipeline.around.jaxpr.jaxpr, homes_of(pipeline)
    for var, result in zip(body.outvars, pipeline.step.captured.outputs, strict=True):
        if result.carried_from is not None and not hasattr(var, "val"):
            for stage in homes[body.invars[result.carried_from]]:
                yield from held.read(var, stage, Moved.VALUE)

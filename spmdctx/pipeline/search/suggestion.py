"""Estimates from a planned schedule what others would take, which are not planned: with the same chunks, or with halves of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from spmdctx.machine.topology import Topology
from spmdctx.pipeline.cut.choose import even_cuts
from spmdctx.pipeline.cut.costs import EquationCosts
from spmdctx.pipeline.programs.slots import Holds, TaskProgram
from spmdctx.pipeline.programs.split import split_backward
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, Kind, cost_of
from spmdctx.pipeline.search.schedules import EVERY, shown
from spmdctx.pipeline.stages.hops import hop_price
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.sizes import slot_bytes
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import counted, seconds_text

_WORTH = 0.95
"""Another schedule is suggested if it is estimated to take at most this part of the planned step."""


def suggested(pipeline: PlannedPipeline, topology: Topology) -> list[str]:
    """Returns a note on the schedule by which a planned pipeline would be faster by an estimate, or nothing."""
    seconds = estimates(pipeline, topology)
    best = min(seconds, key=lambda own: seconds[own], default=None)
    if best is None or seconds[best] > _WORTH * pipeline.total_s:
        return []
    stages = counted(pipeline.schedule.num_stages, "stage")
    return [
        f"By an estimate, which is no plan, {stages} by {shown(best)} would take about {seconds_text(seconds[best])} in place of the "
        f"{seconds_text(pipeline.total_s)} by {pipeline.schedule.name}. auto_pipeline=True plans both, and other numbers of stages."
    ]


def estimates(pipeline: PlannedPipeline, topology: Topology, schedulers: Sequence[Scheduler] = EVERY) -> dict[Scheduler, float]:
    """Returns the estimated seconds of a step by each other schedule of a pipeline that is planned by one chunk a stage.

    Chunks that are cut further take their parts of the planned seconds. Gradients of inputs and of weights share those of their backward
    pass as they would on one device, and the bytes of moves are those of the planned ones in the ratio of what crosses.
    """
    schedule = pipeline.schedule
    count, num_micro = schedule.num_stages, schedule.num_micro
    if schedule.num_chunks != count or schedule.splits_backward:
        return {}
    after_s = pipeline.total_s - pipeline.simulation.makespan_s
    prices = EquationCosts(topology)
    shares = [_shares(chunk, prices) for chunk in pipeline.planned]
    places_of = {number: _parts(pipeline, number) for number in {own.num_chunks(count) for own in schedulers}}
    places_of[count] = [tuple(pipeline.cut.places)]
    found = {}
    for scheduler in schedulers:
        places = places_of[scheduler.num_chunks(count)]
        if shown(scheduler) == schedule.name or (scheduler.rounds > 1 and num_micro % count):
            continue
        seconds = {cuts: _simulated_s(pipeline, topology, scheduler, cuts, shares) for cuts in places}
        if seconds:
            found[scheduler] = min(seconds.values()) + after_s
            places_of[scheduler.num_chunks(count)] = [min(seconds, key=lambda own: seconds[own])]
    return found


def _parts(pipeline: PlannedPipeline, num_chunks: int) -> list[tuple[int, ...]]:
    """Returns cuts into so many chunks; marks leave no others than the planned ones."""
    cut = pipeline.cut
    if pipeline.step.loss.is_marked or num_chunks > len(cut.seconds):
        return []
    return even_cuts(cut.seconds, cut.crossing, num_chunks)


def _simulated_s(
    pipeline: PlannedPipeline, topology: Topology, scheduler: Scheduler, places: Sequence[int], shares: Sequence[Costs]
) -> float:
    costs = _costs(pipeline, places, shares)
    own = scheduler.schedule(pipeline.schedule.num_stages, pipeline.schedule.num_micro, costs)
    return simulate(own, cost_of(costs), _Hops(pipeline, places, own.stage_of, topology)).makespan_s


def _shares(chunk: PlannedChunk, prices: EquationCosts) -> Costs:
    """Returns the seconds of each kind of task, of 1 s of the chunk's both passes together.

    Both parts of a backward pass are taken to wait for links as long as the whole one.
    """
    total = chunk.costs.forward + chunk.costs.backward
    early, late = (_seconds(program, prices) for program in split_backward(chunk.passes.backward))
    weight = late / max(early + late, 1e-300)
    cost = chunk.tasks[Kind.BACKWARD].planned.plan.cost
    waiting, computing = (cost.total_s - cost.compute_s) / total, cost.compute_s / total
    halves = (waiting + computing * part if part else 0.0 for part in (1 - weight, weight))
    return Costs(chunk.costs.forward / total, chunk.costs.backward / total, *halves)


def _seconds(program: TaskProgram, prices: EquationCosts) -> float:
    return sum(prices.seconds(eqn).forward for eqn in program.jaxpr.eqns)


def _costs(pipeline: PlannedPipeline, places: Sequence[int], shares: Sequence[Costs]) -> list[Costs]:
    """Returns the costs of the chunks between some places, each equation with the shares of the planned chunk in which it lies."""
    ends = np.concatenate([[0.0], np.cumsum(pipeline.cut.seconds)])
    planned, own = ([0, *(place + 1 for place in cuts), len(ends) - 1] for cuts in (pipeline.cut.places, places))
    found = []
    for first, last in pairwise(own):
        parts = [
            max(0.0, ends[min(last, end)] - ends[max(first, begin)]) if begin < last and first < end else 0.0
            for begin, end in pairwise(planned)
        ]
        found.append(
            Costs(*(float(sum(part * share for part, share in zip(parts, kind, strict=True))) for kind in zip(*shares, strict=True)))
        )
    return found


class _Hops:
    """The seconds of moves between chunks that are cut at some places."""

    def __init__(self, pipeline: PlannedPipeline, places: Sequence[int], stage_of: Sequence[int], topology: Topology) -> None:
        cut, self._stage_of, self._topology = pipeline.cut, stage_of, topology
        self._size = pipeline.mesh.num_devices
        sent = sum(sum(slot_bytes(chunk, (Holds.LEAVING,)).values()) for chunk in pipeline.planned)
        ratio = sent / max(sum(cut.crossing[place] for place in cut.places), 1.0)
        self._bytes = [ratio * cut.crossing[place] for place in places]

    def __call__(self, chunk: int, reader: int) -> float:
        price = hop_price(self._stage_of[chunk], self._stage_of[reader], self._size, self._topology)
        return price.fixed_s + self._bytes[min(chunk, reader)] * price.s_per_byte

"""Chooses which schedules are planned on each number of stages: all that could be faster than what is planned already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.errors import ContextError, InfeasibleError, SpmdctxError, StrategyError, UnsupportedError
from spmdctx.machine.topology import Topology
from spmdctx.pipeline.cut.line import is_dear
from spmdctx.pipeline.programs.slots import Holds
from spmdctx.pipeline.programs.split import split_backward
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, cost_of
from spmdctx.pipeline.search.counts import Candidate, Choices
from spmdctx.pipeline.stages.hops import hops_of
from spmdctx.pipeline.stages.memory import memory_of
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import counted, seconds_text

NOT_HERE = (ContextError, InfeasibleError, StrategyError, UnsupportedError)
"""What rules a number of stages or a schedule out, and not the step."""

PLAIN = Scheduler("1f1b")
_GPIPE = Scheduler("gpipe")
_H1 = Scheduler("zero_bubble_h1")
INTERLEAVED = Scheduler("1f1b", 2)
_V = Scheduler("zero_bubble_v")
EVERY = (PLAIN, _GPIPE, _H1, INTERLEAVED, _V)
"""The schedules among which the choice is, in the order in which they are planned."""
DEEPER = tuple(Scheduler("1f1b", rounds) for rounds in range(3, 9))
"""Schedules of more chunks on each stage, of which the most promising one is planned where it promises to be the fastest."""
_WORTH_DEPTH = 0.997
"""Share of the best seconds that a schedule of more chunks may take by its estimate to be planned."""


class Tried(NamedTuple):
    """A planned pipeline, as far as the choice needs it.

    Attributes:
        candidate: the pipeline.
        busy_s: the seconds of a step if its stages shared the work evenly and never waited.
        parts: whether gradients of weights are worth being tasks of their own.
        again_s: gives the seconds of a step if the same chunks run by another schedule, with backward passes in one part.
    """

    candidate: Candidate
    busy_s: float
    parts: bool
    again_s: Callable[[Scheduler], float]


def plan_schedules(
    choices: Choices, num_stages: int, num_micro: int, plan: Callable[[Scheduler], Tried], best_s: float, given: Scheduler | None
) -> list[Tried]:
    """Plans the schedules on one number of stages that could be the fastest one, 1F1B first, whatever memory they take.

    Args:
        choices: gets those that cannot be planned, and those that need not be.
        num_stages: p.
        num_micro: micro-batches.
        plan: plans a schedule, or raises one of `NOT_HERE`.
        best_s: the seconds of a step that is planned, and fits.
        given: the schedule that the user set, which is then the only one; None if the choice is free.
    """
    first = _planned(choices, counted(num_stages, "stage"), plan, given or PLAIN)
    if first is None or given is not None:
        return [first] if first is not None else []
    found = [first]
    for scheduler in EVERY[1:]:
        name = f"{counted(num_stages, 'stage')} by {shown(scheduler)}"
        reason = _useless(scheduler, found, num_stages, num_micro)
        if first.busy_s >= best_s:
            reason = f"stages that never wait would take {seconds_text(first.busy_s)}"
        if reason:
            choices.skipped[name] = reason
        elif (one := _planned(choices, name, plan, scheduler)) is not None:
            found.append(one)
    return found


def shown(scheduler: Scheduler) -> str:
    """Returns the name of the schedules that a scheduler makes, with the chunks on each stage where these are more than two."""
    if scheduler.rounds == 1 or scheduler.name == "zero_bubble_v":
        return scheduler.name
    return f"interleaved {scheduler.name}" + (f" in {scheduler.rounds} chunks" if scheduler.rounds > INTERLEAVED.rounds else "")


def plan_deeper(
    choices: Choices, best: Candidate, two: Candidate, estimates: Mapping[Scheduler, float], plan: Callable[[Scheduler], Tried]
) -> Tried | None:
    """Plans the schedule of more chunks that promises most, if it promises to beat the best pipeline.

    Args:
        choices: gets what cannot be planned, and what need not be.
        best: the best pipeline so far.
        two: what was planned by two chunks on each of as many stages, whether or not it fits.
        estimates: the estimated seconds of `INTERLEAVED` and `DEEPER`; what the first was planned to take corrects the others.
        plan: as for `plan_schedules`.
    """
    promised_s = {own: seconds * two.seconds / estimates[INTERLEAVED] for own, seconds in estimates.items() if own != INTERLEAVED}
    if not promised_s:
        return None
    deeper = min(promised_s, key=lambda own: promised_s[own])
    name = f"{counted(best.stages, 'stage')} by {shown(deeper)}"
    if promised_s[deeper] > _WORTH_DEPTH * best.seconds:
        choices.skipped[name] = f"of more than two chunks it promises most, and by an estimate takes {seconds_text(promised_s[deeper])}"
        return None
    return _planned(choices, name, plan, deeper)


def leave_deeper(choices: Choices, smallest: Candidate) -> None:
    """Says that no schedules of more chunks are planned where nothing fits: each chunk more keeps more micro-batches in flight."""
    name = f"{counted(smallest.stages, 'stage')} by {shown(DEEPER[0])} or more"
    choices.skipped[name] = "nothing fits, and more chunks on a stage take no less memory"


def _useless(scheduler: Scheduler, found: Sequence[Tried], num_stages: int, num_micro: int) -> str:
    """Returns why a schedule is no faster than those found on as many stages, 1F1B first, or nothing."""
    first, last = found[0], found[-1]
    if scheduler == _GPIPE and first.again_s(_GPIPE) >= first.candidate.seconds:
        return "1f1b is as fast with fewer micro-batches in flight"
    if scheduler == INTERLEAVED and num_micro % num_stages:
        return f"{num_micro} micro-batches are no multiple of {num_stages}"
    if scheduler == _H1 and not first.parts:
        return "backward passes that a stage waits for give the gradients of inputs and weights in one part, so it would be 1f1b"
    is_interleaved = last.candidate.schedule == shown(INTERLEAVED)
    if scheduler == _V and not first.parts and is_interleaved and last.again_s(_V) >= min(own.candidate.seconds for own in found):
        return "backward passes that a stage waits for give the gradients of inputs and weights in one part, so it would not be faster"
    return ""


def _planned(choices: Choices, name: str, plan: Callable[[Scheduler], Tried], scheduler: Scheduler) -> Tried | None:
    try:
        return plan(scheduler)
    except NOT_HERE as error:
        choices.refused[name] = reason_of(error)
        return None


def tried(pipeline: PlannedPipeline, topology: Topology) -> Tried:
    """Returns what the choice needs to know of a pipeline that is planned for a machine.

    The seconds in which it waits for links are as large a part of the step as of its tasks.
    """
    tasks = [task.planned.plan.cost for chunk in pipeline.planned for task in chunk.tasks.values()]
    waiting = sum(cost.total_s - cost.compute_s for cost in tasks) / max(sum(cost.total_s for cost in tasks), 1e-300)
    schedule = pipeline.schedule
    num_stages, after_s = schedule.num_stages, pipeline.total_s - pipeline.simulation.makespan_s
    rounds = schedule.num_chunks // num_stages
    peak = max(own.peak_bytes for own in memory_of(pipeline))
    name = schedule.name + (f" in {rounds} chunks" if rounds > INTERLEAVED.rounds else "")

    def again_s(scheduler: Scheduler) -> float:
        whole = [Costs(own.forward, own.backward, own.backward, 0.0) for own in (chunk.costs for chunk in pipeline.planned)]
        own = scheduler.schedule(num_stages, schedule.num_micro, whole)
        return simulate(own, cost_of(whole), hops_of(pipeline.planned, own.stage_of, topology)).makespan_s + after_s

    return Tried(
        Candidate(num_stages, pipeline.total_s, pipeline.total_s * waiting, peak, name),
        sum(pipeline.simulation.busy_s) / num_stages + after_s,
        parts_backward(pipeline),
        again_s,
    )


def reason_of(error: SpmdctxError) -> str:
    """Returns the first sentence of an error."""
    return str(error.args[0]).splitlines()[0]


def parts_backward(pipeline: PlannedPipeline) -> bool:
    """Returns whether some stage waits for gradients of inputs which could come before dear gradients of weights.

    Nothing waits for the first chunk. A checkpointed region, or a loop, gives both kinds of gradient at once.
    """
    backwards = (chunk.passes.backward for chunk in pipeline.planned[1:])
    return any(
        is_dear(eqn)
        for backward in backwards
        if any(slot.holds is Holds.OF_ENTERING for slot in backward.outputs)
        for eqn in split_backward(backward)[1].jaxpr.eqns
    )

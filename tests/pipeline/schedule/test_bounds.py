"""Bounds on schedules, against every cut, every option of every chunk, and many orders of tasks."""

import itertools
import random

import pytest

from spmdctx.pipeline.schedule.bounds import least_makespan_s, least_share
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, Kind, Schedule, Task, cost_of, needs

SCHEDULERS = [Scheduler("1f1b"), Scheduler("gpipe"), Scheduler("zero_bubble_h1"), Scheduler("1f1b", 2), Scheduler("zero_bubble_v")]


def in_any_order(schedule, draw):
    """The same tasks, each stage running what is ready in an order by chance."""
    left = {task: stage for stage, tasks in enumerate(schedule.stages) for task in tasks}
    done, stages = set(), [[] for _ in schedule.stages]
    while left:
        ready = [task for task in left if done.issuperset(needs(task, schedule.num_chunks, splits_backward=schedule.splits_backward))]
        task = draw.choice(ready)
        stages[left.pop(task)].append(task)
        done.add(task)
    return Schedule("any", tuple(map(tuple, stages)), schedule.stage_of, schedule.num_micro)


def line_of(draw, count):
    """Equations with the least seconds of forward passes and of gradients of inputs and of weights."""
    return [
        Costs(own, back + late, back, late)
        for own, back, late in ([draw.choice([0.0, 1.0, draw.uniform(0, 3)]) for _ in "fiw"] for _ in range(count))
    ]


def joined(line, places):
    bounds = [0, *(place + 1 for place in places), len(line)]
    return [Costs(*map(sum, zip(*line[first:last], strict=True))) for first, last in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(240))
def test_no_cut_option_or_order_is_below_its_bound(seed):
    draw = random.Random(seed)
    scheduler, num_stages = SCHEDULERS[seed % len(SCHEDULERS)], draw.choice([2, 2, 3])
    num_micro = num_stages * draw.randint(1, 2)
    num_chunks = scheduler.num_chunks(num_stages)
    line = line_of(draw, num_chunks + draw.randint(0, 2 if num_chunks < 6 else 1))
    total = sum(own.forward + own.backward for own in line)
    options = [[1.0, draw.uniform(1, 2)] if number < 2 else [1.0] for number in range(num_chunks)]
    for places in itertools.combinations(range(len(line) - 1), num_chunks - 1):
        least = joined(line, places)
        for factors in itertools.product(*options):
            costs = [Costs(*(factor * one for one in own)) for own, factor in zip(least, factors, strict=True)]
            schedule = scheduler.schedule(num_stages, num_micro, costs)
            splits = schedule.splits_backward
            bound = least_makespan_s(least, schedule.stage_of, num_micro, splits_backward=splits)
            any_cut = least_share(schedule.stage_of, num_micro, splits_backward=splits) * total
            for one in (schedule, in_any_order(schedule, draw)):
                makespan = simulate(one, cost_of(costs), lambda *_: 0.0).makespan_s
                assert makespan >= bound * (1 - 1e-12)
                assert makespan >= any_cut * (1 - 1e-12)


@pytest.mark.parametrize(("num_stages", "num_micro"), [(1, 4), (2, 8), (4, 16), (8, 32), (3, 1)])
def test_the_share_of_one_chunk_a_stage_has_a_closed_form_and_is_attained(num_stages, num_micro):
    share = least_share(range(num_stages), num_micro, splits_backward=False)
    assert share == pytest.approx(1 / (1 - (1 - 1 / num_micro) ** num_stages))
    # Stages whose seconds fall by this factor all end together.
    each = [share / num_micro * (1 - 1 / num_micro) ** stage for stage in range(num_stages)]
    costs = [Costs(own / 3, 2 * own / 3, 0.0, 0.0) for own in each]
    schedule = Scheduler("1f1b").schedule(num_stages, num_micro, costs)
    assert sum(each) == pytest.approx(1.0)
    assert least_makespan_s(costs, schedule.stage_of, num_micro, splits_backward=False) == pytest.approx(share)


def test_even_stages_attain_the_bound_of_their_chunks():
    costs = [Costs(1.0, 2.0, 1.0, 1.0)] * 4
    schedule = Scheduler("1f1b").schedule(4, 8, costs)
    assert simulate(schedule, cost_of(costs)).makespan_s == pytest.approx(
        least_makespan_s(costs, schedule.stage_of, 8, splits_backward=False)
    )


def test_late_gradients_pass_nothing_back():
    costs = [Costs(1.0, 3.0, 1.0, 2.0)] * 2
    stages = ((Task(Kind.FORWARD, 0, 0), Task(Kind.INPUT, 0, 0), Task(Kind.WEIGHT, 0, 0)),)
    assert (
        least_makespan_s(costs[:1], (0,), 1, splits_backward=True) == simulate(Schedule("one", stages, (0,), 1), cost_of(costs)).makespan_s
    )
    assert least_makespan_s(costs, (0, 1), 1, splits_backward=True) == 5.0

"""Schedules: every task once and in order, the bubbles and micro-batches in flight of theory, and bounds that hold."""

import itertools
import random

import pytest

from spmdctx.errors import ContextError, StrategyError
from spmdctx.pipeline.schedule.bounds import bubble_of
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.schedule.orders import gpipe, interleaved, interleaved_gpipe, one_f_one_b
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, Kind, Schedule, Task, cost_of
from spmdctx.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v
from tests.pipeline.schedule.theory import in_flight_of, least_makespan_s

EVEN = Costs(1.0, 2.0, 1.0, 1.0)
SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (3, 9), (4, 4), (4, 8), (4, 16), (8, 16), (8, 32)]
MAKERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "interleaved_gpipe": lambda p, m: interleaved_gpipe(p, m, 3),
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": lambda p, m: zero_bubble_v(p, m, cost_of([EVEN] * 2 * p)),
}


def uneven(count, seed):
    draw = random.Random(seed)
    return [Costs(*(draw.uniform(0.5, 2) for _ in range(4))) for _ in range(count)]


@pytest.mark.parametrize(("name", "size"), [*itertools.product(MAKERS, SIZES)])
def test_every_task_runs_once_after_what_it_needs(name, size):
    schedule = MAKERS[name](*size)
    tasks = [task for own in schedule.stages for task in own]
    kinds = [Kind.FORWARD, *([Kind.INPUT, Kind.WEIGHT] if name.startswith("zero") else [Kind.BACKWARD])]
    assert sorted(tasks) == sorted(Task(*one) for one in itertools.product(kinds, range(schedule.num_chunks), range(size[1])))
    assert all(schedule.stage_of[task.chunk] == stage for stage, own in enumerate(schedule.stages) for task in own)
    for seed in range(3):
        run = simulate(schedule, cost_of(uneven(schedule.num_chunks, seed)), lambda *_: 0.1)
        seen = set()
        for task in run.order:
            assert seen.issuperset(schedule.needs(task))
            assert all(run.spans[one].end <= run.spans[task].start for one in schedule.needs(task))
            seen.add(task)


@pytest.mark.parametrize(
    ("name", "size"), [*itertools.product(["gpipe", "1f1b", "interleaved", "interleaved_gpipe", "zero_bubble_h1"], SIZES)]
)
@pytest.mark.parametrize("costs", [EVEN, Costs(1.0, 2.5, 1.7, 0.8)])
def test_bubbles_and_micro_batches_in_flight_are_those_of_theory(name, size, costs):
    schedule = MAKERS[name](*size)
    run = simulate(schedule, lambda task: costs.of(task.kind) / (schedule.num_chunks // schedule.num_stages))
    rounds = schedule.num_chunks // size[0]
    assert run.bubble == pytest.approx(bubble_of(schedule.name, *size, costs, rounds), abs=1e-12)
    assert run.in_flight == in_flight_of(schedule.name, *size, rounds)


@pytest.mark.parametrize("size", [(2, 8), (4, 8), (4, 16), (8, 32), (8, 64)])
def test_a_v_of_chunks_waits_only_until_all_stages_have_started(size):
    run = simulate(MAKERS["zero_bubble_v"](*size), lambda task: 0.5)
    fill, work = (size[0] - 1) * 0.5, size[1] * 3.0
    assert run.bubble == pytest.approx(fill / (work + fill), abs=1e-12)
    assert max(run.in_flight) <= 2 * size[0]


@pytest.mark.parametrize("seed", range(60))
def test_a_v_of_uneven_chunks_comes_to_an_end_within_its_memory(seed):
    draw = random.Random(seed)
    num_stages = draw.choice([1, 2, 3, 4, 8])
    costs = [Costs(*(draw.choice([0.0, 0.01, 0.1, 1, 5]) for _ in range(4))) for _ in range(2 * num_stages)]
    run = simulate(zero_bubble_v(num_stages, draw.choice([1, 2, 3]) * num_stages, cost_of(costs)), cost_of(costs))
    assert max(run.in_flight) <= 2 * num_stages


@pytest.mark.parametrize(
    ("scheduler", "name", "num_chunks"),
    [
        (Scheduler("gpipe"), "gpipe", 4),
        (Scheduler("1f1b"), "1f1b", 4),
        (Scheduler("1f1b", 2), "interleaved 1f1b", 8),
        (Scheduler("gpipe", 3), "interleaved gpipe", 12),
        (Scheduler("zero_bubble_h1"), "zero_bubble_h1", 4),
        (Scheduler("zero_bubble_v"), "zero_bubble_v", 8),
        (Scheduler("zero_bubble_v", 3), "zero_bubble_v", 8),
    ],
)
def test_schedules_are_found_by_name(scheduler, name, num_chunks):
    assert scheduler.num_chunks(4) == num_chunks
    schedule = scheduler.schedule(4, 8, [EVEN] * num_chunks)
    assert (schedule.name, schedule.num_chunks, schedule.num_stages) == (name, num_chunks, 4)


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_ends_before_its_bound(seed):
    draw = random.Random(seed)
    num_stages, num_micro = draw.randint(1, 6), draw.randint(1, 12)
    costs = uneven(num_stages, seed)
    for make in (gpipe, one_f_one_b, zero_bubble_h1):
        schedule = make(num_stages, num_micro)
        bound = least_makespan_s(costs, num_micro, splits_backward=schedule.splits_backward)
        assert simulate(schedule, cost_of(costs)).makespan_s >= bound * (1 - 1e-12)


def test_even_1f1b_attains_its_bound():
    costs = [EVEN] * 4
    run = simulate(one_f_one_b(4, 8), cost_of(costs))
    assert run.makespan_s == pytest.approx(least_makespan_s(costs, 8, splits_backward=False))
    assert run.busy_s == (24.0,) * 4


def test_hops_delay_what_comes_from_another_stage():
    without, far = (simulate(one_f_one_b(2, 1), cost_of([EVEN] * 2), lambda *_, hop=hop: hop).makespan_s for hop in (0.0, 0.25))
    assert far == without + 2 * 0.25


def test_an_interleaved_pipeline_refuses_groups_that_are_not_full():
    with pytest.raises(ContextError, match="10 micro-batches over 4 stages"):
        interleaved(4, 10, 2)


def test_tasks_that_wait_for_each_other_are_named():
    tasks = (Task(Kind.BACKWARD, 0, 0), Task(Kind.FORWARD, 0, 0))
    with pytest.raises(StrategyError, match=r"B0\.0"):
        simulate(Schedule("wrong", (tasks,), (0,), 1), cost_of([EVEN]))

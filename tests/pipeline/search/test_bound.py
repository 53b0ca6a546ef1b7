"""The bound on all cuts, against the schedules of every cut."""

import itertools
import random

import pytest

from spmdctx.pipeline.schedule.orders import gpipe, one_f_one_b
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, cost_of
from spmdctx.pipeline.search.bound import least_makespan_of_cuts_s
from tests.pipeline.schedule.theory import least_makespan_s


def cuts(seconds, num_stages):
    for places in itertools.combinations(range(1, len(seconds)), num_stages - 1):
        bounds = [0, *places, len(seconds)]
        yield [sum(seconds[first:last]) for first, last in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_shorter_schedule_and_some_cut_has_the_bound(seed):
    draw = random.Random(seed)
    seconds = [draw.choice([1.0, draw.uniform(0.1, 5)]) for _ in range(draw.randint(4, 9))]
    num_stages, num_micro = draw.randint(2, 4), draw.randint(4, 9)
    bound = least_makespan_of_cuts_s(seconds, num_stages, num_micro, splits=False)
    least = []
    for stages in cuts(seconds, num_stages):
        costs = [Costs(own / 3, 2 * own / 3, own / 3, own / 3) for own in stages]
        least.append(least_makespan_s(costs, num_micro, splits_backward=False))
        for make in (gpipe, one_f_one_b):
            assert simulate(make(num_stages, num_micro), cost_of(costs)).makespan_s >= bound * (1 - 1e-9)
    # Each equation is one stage's, so the bound by whole equations is at most one equation of slack above.
    assert bound <= min(least) * (1 + 1e-9)
    assert bound >= num_micro * sum(seconds) / num_stages * (1 - 1e-9)


def test_the_bound_is_what_balanced_stages_take_where_nothing_can_be_cut_unevenly():
    bound = least_makespan_of_cuts_s([1.0, 1.0], 2, 8, splits=False)
    assert bound == pytest.approx(9.0)


def test_schedules_that_split_the_backward_pass_have_the_mean_load():
    assert least_makespan_of_cuts_s([1.0, 3.0], 2, 8, splits=True) == pytest.approx(16.0)
    assert least_makespan_of_cuts_s([1.0, 3.0], 1, 8, splits=False) == pytest.approx(32.0)

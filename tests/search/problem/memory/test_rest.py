"""Rows that count what a plan takes beside them: they count that plan as its bill does at each time, as far as other plans have room."""

import numpy as np
import pytest

from spmdctx.search.problem.memory.rest import most_of, rest_of, with_rest, with_rest_node
from spmdctx.search.problem.memory.rows import completed, counted_bytes
from spmdctx.search.solver.problem.memory import usage_over_time
from spmdctx.search.solver.problem.problem import Life
from tests.search.problem.memory.test_reserved import _problem


def _used(problem, states):
    """The bytes that a problem counts at each time of its states."""
    return usage_over_time(problem.memory, [usage[state] for usage, state in zip(problem.memory.usages, states, strict=True)])


def _rested(most=1.0):
    _, _, plain, states, bill = _problem()
    problem = with_rest_node(plain)
    states = completed(problem, states)
    alive = np.array(bill.memory_profile, dtype=np.float64)
    return problem, states, alive, rest_of(problem, states, alive, most)


def test_the_plan_that_a_rest_is_of_is_counted_as_its_bill_counts_it():
    problem, states, alive, rest = _rested()
    counted = _used(with_rest(problem, rest), states)[: len(alive)]
    assert counted_bytes(problem, states) < 0.97 * alive.max()
    assert (counted >= alive * (1 - 1e-9)).all()
    assert counted.max() == pytest.approx(alive.max(), rel=0.03)


def test_the_node_of_the_rest_costs_nothing_and_counts_nothing_by_itself():
    _, _, plain, states, _ = _problem()
    problem = with_rest_node(plain)
    assert problem.costs[-1].tolist() == [0.0]
    assert counted_bytes(problem, completed(problem, states)) == counted_bytes(plain, states)
    assert with_rest(problem, ()) is problem


def test_a_rest_takes_a_part_of_what_the_smallest_choice_leaves():
    problem, _, alive, _ = _rested()
    limit = float(alive.max())
    limited = type(problem)(problem.costs, problem.edges, type(problem.memory)(problem.memory.usages, problem.memory.lives, limit))
    least = [int(usage.argmin()) for usage in problem.memory.usages]
    left = limit - _used(limited, least)[: len(alive)]
    for part in (0.25, 0.5):
        rest = rest_of(limited, least, np.full(len(alive), 10 * limit), part)
        taken = _used(with_rest(limited, rest), least)[: len(alive)] - (limit - left)
        assert (taken <= part * left + 0.02 * 10 * limit).all()
        assert taken.max() == pytest.approx(part * left.max())


def test_two_rests_take_the_larger_one_at_each_time():
    found = most_of((Life(3, 0, 4, 10.0),), (Life(3, 2, 6, 7.0), Life(3, 6, 8, 20.0)))
    at = {time: share for _, start, end, share in found for time in range(start, end)}
    assert at == {0: 10.0, 1: 10.0, 2: 10.0, 3: 10.0, 4: 7.0, 5: 7.0, 6: 20.0, 7: 20.0}
    assert most_of((), ()) == ()

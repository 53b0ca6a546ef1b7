from types import SimpleNamespace

import numpy as np
import pytest

from spmdctx.search.dynamic.branching import WORK, Within, cheapest_accepted
from spmdctx.search.solver.problem.problem import Infeasible, Problem
from spmdctx.search.solver.solve import solve

COSTS = (np.array([0.0, 1.0, 4.0]), np.array([0.0, 2.0, 8.0]))


def _best(accept, work=WORK, solver=solve, is_over=lambda: False):
    """Two nodes that do not meet, each with three states."""
    choices = [SimpleNamespace(states=None, stored=[np.arange(3)]) for _ in COSTS]
    tables = SimpleNamespace(network=SimpleNamespace(nodes=[SimpleNamespace(sort="slot")] * 2), choices=choices)
    problem = Problem(COSTS, ())
    return cheapest_accepted(
        tables, problem, solver(problem), solver, lambda solution: solution if accept(solution) else None, Within(work, is_over=is_over)
    )


@pytest.mark.parametrize("least", range(13))
def test_the_first_choice_that_is_accepted_is_the_cheapest_of_all(least):
    best = _best(lambda solution: solution.cost >= least)
    sums = [a + b for a in COSTS[0] for b in COSTS[1] if a + b >= least]
    assert not best.is_cut
    assert (best.found.cost if sums else best.found) == min(sums, default=None)
    assert best.lower_bound == min(sums, default=float("inf"))


def test_where_too_many_are_left_the_cheapest_that_was_seen_is_given():
    best = _best(lambda solution: solution.cost >= 2, work=24)
    assert best.is_cut
    assert best.found.cost == 2
    assert best.lower_bound <= 2
    assert _best(lambda solution: False, work=24).found is None


def _three_or_four(accepted):
    """Accepts solutions that cost 3 or 4, and notes each answer."""

    def accept(solution):
        accepted.append(solution.cost in (3, 4))
        return accepted[-1]

    return accept


@pytest.mark.parametrize(("most", "cost"), [(3, None), (4, 3), (5, 3)])
def test_work_that_is_allowed_once_a_solution_is_known_is_used_for_a_cheaper_one(most, cost):
    solved, accepted = [], []

    def counted(problem):
        solved.append(problem)
        return solve(problem)

    # The fourth problem has the solution of 4, and the fifth that of 3.
    best = _best(_three_or_four(accepted), solver=counted, is_over=lambda: len(solved) >= most and not any(accepted))
    assert (best.found and best.found.cost, best.is_cut) == (cost, cost is None)


def test_a_part_in_whose_midst_the_work_ends_is_solved_again_once_more_is_allowed():
    solved, accepted = [], []

    def cut(problem):
        solved.append(problem)
        # The fifth problem has the solution of 3.
        return Infeasible(0, 0.0, 1.0, is_proven=False, lower_bound=1.0) if len(solved) == 5 else solve(problem)

    best = _best(_three_or_four(accepted), solver=cut, is_over=lambda: len(solved) >= 5 and not any(accepted))
    assert (best.found.cost, best.lower_bound, best.is_cut) == (3, 3, False)


@pytest.mark.parametrize("least", range(13))
def test_what_is_found_with_less_work_is_found_with_more_or_something_cheaper(least):
    found = [_best(lambda solution: solution.cost >= least, work=work).found for work in range(0, 120, 12)]
    costs = [float("inf") if one is None else one.cost for one in found]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("slack", [0.5, 3.0, 20.0])
def test_the_cheapest_unproven_solution_is_taken_not_the_one_of_the_lowest_bound(slack):
    def unproven(problem):
        """A dear choice for what forbids the first node's first state, with a low bound."""
        found = solve(problem)
        return found if np.isfinite(problem.costs[0][0]) else found._replace(cost=found.cost + slack, lower_bound=found.lower_bound / 2)

    best = _best(lambda solution: solution.cost >= 2, solver=unproven)
    assert best.lower_bound <= 2
    assert best.found.cost == 2


def test_a_part_that_the_solver_gives_up_on_is_not_said_to_be_empty():
    def gives_up(problem):
        return solve(problem) if np.isfinite(problem.costs[0][0]) else Infeasible(0, 0.0, 1.0, is_proven=False, lower_bound=1.0)

    best = _best(lambda solution: solution.cost >= 2, solver=gives_up)
    assert best.found.cost == 2
    assert best.lower_bound == 1
    nothing = _best(lambda solution: False, solver=gives_up)
    assert (nothing.found, nothing.lower_bound, nothing.is_cut) == (None, 1, True)

import numpy as np
import pytest
from scipy.optimize import linprog

from spmdctx.search.solver.limited.constrained import Constrained
from spmdctx.search.solver.limited.planes import highest
from spmdctx.search.solver.problem.problem import Infeasible, Known
from spmdctx.search.solver.solve import solve
from tests.search.solver.problems import random_problem, truth, usage_of


@pytest.mark.parametrize("seed", range(12))
def test_prices_are_highest_where_a_linear_program_says(seed):
    random = np.random.default_rng(seed)
    num_planes, num_rows = int(random.integers(1, 12)), int(random.integers(0, 5))
    costs, slopes = random.random(num_planes) * 10, random.normal(size=(num_planes, num_rows))
    # A plane that falls everywhere, as that of a choice that fits.
    costs, slopes = np.append(costs, 11.0), np.vstack([slopes, -0.5 - random.random(num_rows)])
    rows = np.hstack([np.ones((len(costs), 1)), -slopes])
    expected = linprog([-1.0, *[0.0] * num_rows], A_ub=rows, b_ub=costs, bounds=[(None, None), *[(0, None)] * num_rows])
    prices, most = highest(costs, slopes)
    assert most == pytest.approx(-expected.fun)
    assert (costs + slopes @ prices).min() == pytest.approx(most)
    assert (prices >= 0).all()


def test_prices_stay_finite_where_no_plane_falls():
    prices, most = highest(np.array([1.0, 2.0]), np.array([[0.5], [0.25]]))
    assert np.isfinite(prices).all()
    assert np.isfinite(most)
    assert prices[0] > 0


@pytest.mark.parametrize("block", range(3))
def test_planes_bound_the_truth_and_find_a_choice_that_fits(block, monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    priced = near = count = 0
    for seed in range(5000 + 60 * block, 5060 + 60 * block):
        problem = random_problem(seed, max_nodes=7)
        true, found = truth(problem), solve(problem, effort=0)
        if isinstance(found, Infeasible):
            assert not found.is_proven or np.isinf(true.cost)
            continue
        assert found.lower_bound <= true.cost + 1e-9
        assert found.cost >= true.cost - 1e-9
        assert max(usage_of(problem, found.states)) <= problem.memory.limit * (1 + 1e-12)
        priced += found.counts.get("prices", 0)
        near += found.cost <= 1.2 * true.cost + 1e-9
        count += 1
    assert priced
    assert near > 0.9 * count


def test_prices_of_another_problem_are_tried_first_and_leave_bounds_true(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    fewer = 0
    for seed in range(5200, 5260):
        problem = random_problem(seed, max_nodes=7)
        found = solve(problem, effort=0, known=Known((), 0.0))
        if isinstance(found, Infeasible) or not found.prices:
            continue
        good, poor = (
            solve(problem, effort=0, known=Known((), 0.0, prices))
            for prices in (found.prices, tuple((time + 1, 50 * price) for time, price in found.prices))
        )
        for again in (good, poor):
            assert again.lower_bound <= truth(problem).cost + 1e-9
            assert max(usage_of(problem, again.states)) <= problem.memory.limit * (1 + 1e-12)
        assert good.lower_bound >= found.lower_bound - 1e-9 * abs(found.lower_bound)
        fewer += good.counts["prices"] < found.counts["prices"]
    assert fewer


def test_choices_at_prices_are_told_so_that_other_limits_start_from_them(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    for seed in range(60):
        problem = random_problem(seed, max_nodes=7)
        found = solve(problem, effort=0)
        if isinstance(found, Infeasible) or not found.met:
            continue
        again = solve(problem, effort=0, known=Known((found.states, *found.met), 0.0))
        assert again.cost <= found.cost + 1e-9
        return
    pytest.fail("no problem has prices")


def test_prices_that_can_hardly_raise_the_bound_are_not_tried(monkeypatch):
    monkeypatch.setattr("spmdctx.search.solver.limited.closing.MAX_CHOICES", 0)
    monkeypatch.setattr("spmdctx.search.solver.limited.constrained.is_narrow", lambda graph: False)
    monkeypatch.setattr(Constrained, "_is_closable", lambda self, graph: False)
    tried, gaps = {}, {}
    for worth in (0.0, 0.02, 0.5):
        monkeypatch.setattr("spmdctx.search.solver.limited.planes.WORTH", worth)
        tried[worth] = gaps[worth] = 0
        for seed in range(5300, 5360):
            problem = random_problem(seed, max_nodes=7)
            found = solve(problem, effort=0)
            if not isinstance(found, Infeasible):
                assert found.lower_bound <= truth(problem).cost + 1e-9 <= found.cost + 2e-9
                tried[worth] += found.counts.get("prices", 0)
                gaps[worth] += found.cost - found.lower_bound
    assert tried[0.5] < tried[0.02] <= tried[0.0]
    assert gaps[0.02] <= 1.1 * gaps[0.0]

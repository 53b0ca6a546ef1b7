"""Budgets that no plan meets end after limited work, counted in the solver's additions, and name one that is enough."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.search.solver.problem.allowance import Allowance

OPTIONS = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "h100"}


def _stack(optimizer, widths):
    """A stack of matrices under an optimizer."""

    def step(state, x):
        def loss(weights):
            y = x
            for weight in weights:
                y = jax.nn.gelu(y @ weight)
            return (y**2).mean()

        gradients = jax.grad(loss)(state["weights"])
        updates, own = optimizer.update(gradients, state["own"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "own": own}

    weights = [jnp.ones(pair) for pair in itertools.pairwise(widths)]
    return step, ({"weights": weights, "own": optimizer.init(weights)}, jnp.ones((48, widths[0])))


def _pinned(optimizer, widths):
    """The same with strategies on its input."""
    inner, (state, x) = _stack(optimizer, widths)
    return lambda state, x: inner(state, spmdctx.shard(lambda x: x * 2, ((4, 2),))(x)), (state, x)


STEPS = {
    "momentum": _stack(optax.sgd(0.1, momentum=0.9), (96, 160, 64)),
    "adam": _stack(optax.adam(0.1), (128, 40, 24)),
    "pinned": _pinned(optax.sgd(0.1), (64, 96, 96, 32)),
}


SHARES = {"momentum": (0.1,), "adam": (0.1,), "pinned": (0.3, 0.1)}


@pytest.fixture
def additions(monkeypatch):
    """All additions that are charged to any allowance."""
    total, charge = [0.0], Allowance.charge

    def counted(self, number):
        total[0] += number
        charge(self, number)

    monkeypatch.setattr(Allowance, "charge", counted)
    return total


@pytest.mark.parametrize("name", STEPS)
def test_the_error_comes_after_limited_work_and_its_budget_is_enough(name, additions):
    function, arguments = STEPS[name]
    fastest = spmdctx.plan(function, *arguments, **OPTIONS)
    infeasible = 0
    for share in SHARES[name]:
        additions[0] = 0.0
        try:
            spmdctx.plan(function, *arguments, **OPTIONS, memory_bytes=int(fastest.safe_memory_bytes * share))
        except InfeasibleError as error:
            infeasible += 1
            assert additions[0] < 2.5e9
            budget = int(re.search(r"need: +memory_bytes=(\d+)", str(error)).group(1))
            assert spmdctx.plan(function, *arguments, **OPTIONS, memory_bytes=budget).safe_memory_bytes <= budget
    assert infeasible


@pytest.mark.parametrize("name", ["pinned"])
def test_points_are_given_as_they_are_found_after_limited_work(name, additions):
    function, arguments = STEPS[name]
    plan = spmdctx.plan(function, *arguments, **OPTIONS)
    additions[0], told = 0.0, []
    found = plan.pareto(progress=told.append)
    assert additions[0] < 6e9
    assert len(told) >= len(found.points) + len(found.unmet)
    assert set(found.unmet) <= set(told)
    for point in found.points:
        limits = [limit for limit in (point.memory_limit_bytes, *point.also_limit_bytes) if limit is not None]
        assert all(point.memory_bytes <= limit for limit in limits)


@pytest.mark.parametrize(("name", "share"), [("momentum", 0.7), ("pinned", 0.95)])
def test_a_budget_that_can_be_met_takes_limited_work_too(name, share, additions):
    function, arguments = STEPS[name]
    budget = int(spmdctx.plan(function, *arguments, **OPTIONS).safe_memory_bytes * share)
    additions[0] = 0.0
    assert spmdctx.plan(function, *arguments, **OPTIONS, memory_bytes=budget).safe_memory_bytes <= budget
    assert additions[0] < 5e9


def test_the_budget_that_an_error_names_is_far_below_what_the_fastest_plan_takes():
    function, arguments = _stack(optax.sgd(0.1), (64, 64, 64, 64))
    fastest = spmdctx.plan(function, *arguments, **OPTIONS)
    with pytest.raises(InfeasibleError, match=r"No plan on 8 devices.*as was proven") as error:
        spmdctx.plan(function, *arguments, **OPTIONS, memory_bytes=100)
    assert int(re.search(r"need: +memory_bytes=(\d+)", str(error.value)).group(1)) < 0.6 * fastest.safe_memory_bytes

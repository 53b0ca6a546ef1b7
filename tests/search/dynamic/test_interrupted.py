"""Ctrl-C during a search: the best plan so far, or KeyboardInterrupt where there is none."""

import signal

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.search.dynamic import searcher
from spmdctx.search.dynamic.mesh_search import MeshSearch
from spmdctx.search.dynamic.searcher import Budgets
from tests.plan.summary.programs import mlp_loss, shaped, trained

WIDTH = 32


def train(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


ARGUMENTS = jnp.ones((WIDTH, WIDTH)), jnp.ones((16, WIDTH))


LARGE = mlp_loss(), {"up": shaped(256, 1024), "down": shaped(1024, 256)}, {name: shaped(64, 32, 256) for name in "xy"}


def large(**options):
    return trained(*LARGE, parallel_mode="auto_parallel", topology="h100", **options)


@pytest.fixture(scope="module")
def fastest():
    return large()


def step(**options):
    return spmdctx.parallel(train, parallel_mode="auto_parallel", **options)


@pytest.fixture
def interrupt(monkeypatch):
    """A function that has the nth call of a method interrupted by the keyboard."""
    # Below a shell in the background SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def at(kind, name, number):
        whole, count = getattr(kind, name), [0]

        def counting(*args, **kwargs):
            count[0] += 1
            if count[0] == number:
                signal.raise_signal(signal.SIGINT)
            return whole(*args, **kwargs)

        monkeypatch.setattr(kind, name, counting)

    yield at
    signal.signal(signal.SIGINT, before)


def is_interrupted(plan):
    return any("was interrupted" in note for note in plan.notes)


def test_the_best_plan_so_far_is_used_and_says_so(interrupt):
    interrupt(MeshSearch, "fastest_on", 2)
    made = step()
    plan = made.plan(*ARGUMENTS)
    assert is_interrupted(plan)
    assert plan.lower_bound_s is None
    assert made(*ARGUMENTS).shape == (WIDTH, WIDTH)


def test_a_first_look_at_a_mesh_is_a_plan_too(interrupt):
    interrupt(MeshSearch, "fastest_on", 1)
    plan = step().plan(*ARGUMENTS)
    assert is_interrupted(plan)
    assert plan.cost.total_s >= step().plan(*ARGUMENTS).cost.total_s


def test_without_any_plan_the_interrupt_goes_on(interrupt):
    interrupt(MeshSearch, "first_look", 1)
    made = step()
    with pytest.raises(KeyboardInterrupt):
        made.plan(*ARGUMENTS)
    assert not is_interrupted(made.plan(*ARGUMENTS))


def test_a_plan_over_the_budget_is_none(interrupt, fastest):
    interrupt(MeshSearch, "fastest_on", 2)
    with pytest.raises(KeyboardInterrupt):
        large(memory_bytes=fastest.safe_memory_bytes * 4 // 5)


def test_the_search_within_a_budget_is_interrupted_too(interrupt, fastest):
    budget = fastest.safe_memory_bytes * 4 // 5
    interrupt(MeshSearch, "within", 2)
    plan = large(memory_bytes=budget)
    assert plan.safe_memory_bytes <= budget
    assert plan.cost.total_s >= fastest.cost.total_s
    assert is_interrupted(plan)


def test_weighing_time_against_memory_keeps_its_own_answer_to_an_interrupt(interrupt):
    plan = step().plan(*ARGUMENTS)
    interrupt(Budgets, "within", 2)
    found = plan.pareto([10_000, 4000], [8], progress=lambda _: None)
    assert any("Interrupted" in note for note in found.notes)
    assert not any(map(is_interrupted, found.plans))


def test_an_interrupted_search_may_be_planned_again_in_whole(interrupt):
    interrupt(MeshSearch, "fastest_on", 2)
    plan = step().plan(*ARGUMENTS)
    again = plan.replan(num_devices=8)
    assert is_interrupted(plan)
    assert not is_interrupted(again)
    assert again.lower_bound_s is not None


def test_the_search_has_words_for_every_mesh(monkeypatch):
    told = []
    monkeypatch.setattr(searcher, "tell", told.append)
    step().plan(*ARGUMENTS)
    assert any(text.startswith("a first look at mesh 1 of") for text in told)
    assert any("so far" in text for text in told)

"""Gradients of micro-batches are reduced once per step, whatever the search would rather do."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.ir.analysis.loop_sums import held_axes
from spmdctx.search.dynamic.results import Shortfall
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.search.reduced_once import reduced_once, sums_of_gradients
from spmdctx.step.planning import planner
from spmdctx.step.planning import request as request_module
from tests.audit.compile_only import need_gpu, need_tpu
from tests.ir.analysis.test_loop_sums import loss

TX = optax.adamw(1e-3)
DEVICES = {"tpu": need_tpu, "gpu": need_gpu, "cpu": jax.devices}
MODES = {
    "data_parallel": {"parallel_mode": "data_parallel", "gradients_mean": True},
    "semi_auto_parallel": {"parallel_mode": "semi_auto_parallel"},
    **{
        name: {"parallel_mode": "auto_parallel", "search_mode": name}
        for name in ("dynamic_programming", "recursive_programming", "sharding_propagation")
    },
}
ROWS, WIDTH = 6144, 512
"""Sizes of activations are multiples of three, those of gradients are not."""


def step(params, state, x):
    value, gradients = spmdctx.value_and_grad(loss)(params, x)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments(rows=ROWS, width=WIDTH):
    rng = np.random.default_rng(0)
    params = {f"w{index}": rng.normal(size=(width, width)).astype(np.float32) / width**0.5 for index in range(2)}
    params |= {f"b{index}": np.zeros(width, np.float32) for index in range(2)}
    return params, TX.init(params), jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)


def parallel(mode, count, **options):
    return spmdctx.parallel(step, grad_accumulation_step=count, **MODES[mode], **options)


def in_turns(plan):
    """Reductions of gradients that run more than once."""
    return [row for row in plan.collectives if row.kind in ("all_reduce", "reduce_scatter") and row.repeats > 1 and row.payload_bytes % 3]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", DEVICES)
def test_no_turn_of_the_compiled_program_reduces_a_gradient(backend, mode, count):
    run, given = parallel(mode, count, devices=DEVICES[backend]()), arguments()
    plan = run.plan(*given)
    assert not in_turns(plan)
    if mode == "dynamic_programming":
        assert plan.gap < 0.01
    report = run.audit(*given)
    assert (report.found_share, report.unplanned_share) == (1, 0)


def test_without_the_promise_the_search_reduces_in_turns(monkeypatch):
    monkeypatch.setattr(request_module, "sums_of_gradients", lambda *_: ())
    for mode in ("dynamic_programming", "recursive_programming"):
        plan = parallel(mode, 2, topology="tpu-v5e", device_num=8).plan(*arguments(4096))
        assert any(row.kind == "reduce_scatter" and row.repeats == 2 for row in plan.collectives)


@pytest.mark.parametrize("mode", MODES)
def test_the_step_follows_that_of_the_whole_batch(mode):
    with jax.enable_x64(True):
        params, _, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), arguments(64, 32))
        given = params, TX.init(params), x
        want, got = (parallel(mode, count, topology="tpu-v5e")(*given) for count in (1, 4))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_sums_that_do_not_fit_in_the_memory_are_reduced_in_turns_and_named(monkeypatch):
    class Cramped:
        def __init__(self, budgets):
            self._budgets = budgets

        def within(self, options):
            return Shortfall(0, 1, 1, self._budgets.within(options))

    def cramped(searcher, request):
        return Cramped(budgets(searcher, request)) if request.once else budgets(searcher, request)

    budgets = Searcher.budgets
    monkeypatch.setattr(Searcher, "budgets", cramped)
    plan = parallel("dynamic_programming", 2, topology="tpu-v5e", device_num=8).plan(*arguments())
    assert in_turns(plan)
    assert any("whole sums do not fit" in note for note in plan.notes)


def test_a_sum_that_the_user_splits_is_named_and_left_as_it_is(monkeypatch):
    found = []

    def noted(step, request, options):
        found.append((step.graph, planner_search(step, request, options)))
        return found[-1][1]

    planner_search = planner.search
    monkeypatch.setattr(request_module, "sums_of_gradients", lambda *_: ())
    monkeypatch.setattr(planner, "search", noted)
    parallel("dynamic_programming", 2, topology="tpu-v5e", device_num=8).plan(*arguments())
    ((graph, chosen),) = found
    sums = sums_of_gradients(graph, ())
    split = [one for one in sums if held_axes(graph, one, chosen.assignment, chosen.setup.mesh) == ()]
    assert split
    mended = reduced_once(graph, chosen.setup, chosen.assignment, sums)
    assert all(held_axes(graph, one, mended.assignment, chosen.setup.mesh) for one in sums)
    pinned = replace(chosen.setup, pins={one.total: chosen.assignment.values[one.total] for one in split})
    assert reduced_once(graph, pinned, chosen.assignment, split) == (chosen.assignment, tuple(one.total for one in split))

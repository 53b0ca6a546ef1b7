"""What a planned step can be asked: why, what else, and what another budget or number of devices would give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import spmdctx
from spmdctx.errors import ContextError, UnsupportedError

AUTO = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "topology": "h100"}
ADAM = optax.adam(1e-3)


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step_fn(params, opt_state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    gradients = jax.grad(loss)(params)
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def arguments(batch=4096):
    params = {"up": abstract(1024, 4096), "down": abstract(4096, 1024)}
    return params, jax.eval_shape(ADAM.init, params), abstract(batch, 1024)


@pytest.fixture(scope="module")
def plan():
    return spmdctx.plan(step_fn, *arguments(), device_num=8, mesh={"data": 4, "model": 2}, **AUTO)


def test_a_parameter_has_a_runner_up_with_what_moves_along(plan):
    (one,) = plan.explain("params/up").tensors
    assert one.whole_step
    assert one.alternatives
    assert one.alternatives[0].num_moved >= 2, "the moments and the next value of the parameter"
    assert one.alternatives[0].extra_s < 0, "what is spread from the batch is not optimal"
    assert "  better " in str(plan.explain("params/up"))


def test_a_source_line_explains_its_ops(plan):
    found = plan.explain(f"test_insight.py:{step_fn.__code__.co_firstlineno + 2}")
    assert "dot_general" in [kind.op.primitive for kind in found.op_kinds]
    assert any(kind.alternatives for kind in found.op_kinds)


def test_nothing_is_worked_out_before_it_is_asked_for(plan):
    fresh = spmdctx.plan(step_fn, *arguments(), device_num=8, mesh={"data": 4, "model": 2}, **AUTO)
    assert "_around" not in vars(fresh.alternatives)
    assert fresh == plan


def test_a_pinned_batch_says_what_the_pin_costs():
    made = spmdctx.plan(step_fn, *arguments(16384), device_num=8, full_batch=True, **AUTO)
    (batch,) = [value for value, leaf in zip(made.op_table.inputs, made.inputs, strict=True) if leaf.path == "batch"]
    assert batch in made.alternatives.pinned
    (one,) = made.explain("batch").tensors
    assert one.alternatives[0].extra_s < 0


def test_a_plan_knows_its_memory_over_the_step(plan):
    assert len(plan.memory_profile) == len(plan.ops)
    assert max(plan.memory_profile) == plan.cost.memory_bytes
    assert "Memory over the step" in plan._repr_html_()


@pytest.mark.parametrize("num_devices", [2, 16])
def test_a_step_is_planned_again_on_other_device_counts(plan, num_devices):
    again = plan.replan(num_devices=num_devices)
    assert again.logical_mesh.num_devices == num_devices
    assert again.fingerprint == plan.fingerprint
    assert dict(again.options)["device_num"] == num_devices
    assert again.replan(num_devices=num_devices) == again


@pytest.mark.parametrize(("budget", "error"), [(0, ContextError), (-1, ContextError), (float("inf"), ContextError), ("x", TypeError)])
def test_a_budget_to_plan_again_for_is_checked_as_the_option_is(plan, budget, error):
    with pytest.raises(error, match="memory_bytes must be"):
        plan.replan(memory_bytes=budget)
    with pytest.raises(error, match="memory_bytes must be"):
        plan.pareto(memory_bytes=(budget,), num_devices=(8,))


def test_time_against_memory_has_a_point_per_device_count(plan):
    found = plan.pareto(memory_bytes=(2**40,), num_devices=(4, 8))
    assert [point.num_devices for point in found.points] == [4, 8]
    assert [made.cost.total_s for made in found.plans] == [point.total_s for point in found.points]


def test_a_loaded_plan_can_be_asked_in_a_step_but_not_alone(plan, tmp_path):
    path = str(tmp_path / "plan.json")
    plan.save(path)
    options = {"device_num": 8, "mesh": {"data": 4, "model": 2}, **AUTO}
    loaded = spmdctx.plan(step_fn, *arguments(), strategy_ckpt_load_file=path, **options)
    assert str(loaded.explain("params/up")) == str(plan.explain("params/up"))
    with pytest.raises(UnsupportedError, match="plan the step again"):
        spmdctx.Plan.load(path).pareto()


def test_one_device_has_nothing_to_choose():
    made = spmdctx.plan(step_fn, *arguments(), topology="h100")
    assert made.alternatives is None
    assert made.explain("params/up").tensors[0].alternatives == ()

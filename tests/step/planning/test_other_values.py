"""What other values of options would bring is said with the price of the plan that has them, and only where it is worth a word."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.wording import bytes_text, seconds_text

MACHINE = {"device_num": 8, "topology": "tpu-v5e"}
OPTIMIZER = optax.adamw(1e-3)


def parameters(dtype, width=512):
    return {"up": jax.ShapeDtypeStruct((width, 4 * width), dtype), "down": jax.ShapeDtypeStruct((4 * width, width), dtype)}


def batch(dtype, rows=256, width=512):
    return jax.ShapeDtypeStruct((rows, width), dtype)


def loss(p, x):
    return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]).astype(jnp.float32) ** 2)


def sgd(p, x, gradient=jax.value_and_grad):
    value, found = gradient(loss)(p, x)
    return jax.tree.map(lambda one, own: one - own, p, found), value


def adam(p, state, x):
    value, found = jax.value_and_grad(loss)(p, x)
    updates, state = OPTIMIZER.update(found, state, p)
    return optax.apply_updates(p, updates), state, value


def adam_arguments(width=4096, rows=64):
    p = parameters(jnp.float32, width)
    return p, jax.eval_shape(OPTIMIZER.init, p), batch(jnp.float32, rows, width)


def plan(step, *args, mode="data_parallel", **options):
    return spmdctx.plan(step, *args, parallel_mode=mode, **{**MACHINE, **options})


def said(found, option):
    return [note for note in found.notes if note.startswith(option)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_the_seconds_of_gradients_in_their_own_type_are_those_of_that_plan(dtype, mode):
    args = parameters(dtype), batch(dtype)
    own = plan(sgd, *args, mode=mode, gradient_fp32_sync=False)
    found = plan(sgd, *args, mode=mode)
    (note,) = said(found, "gradient_fp32_sync=False")
    assert f"{seconds_text(own.cost.total_s)} instead of {seconds_text(found.cost.total_s)}" in note
    assert f"{100 * (1 - own.cost.total_s / found.cost.total_s):.1f} % faster" in note
    assert not said(own, "gradient_fp32_sync")


def test_a_local_loss_says_at_least_how_much_faster_its_own_type_is():
    args, local = (parameters(jnp.bfloat16), batch(jnp.bfloat16)), partial(sgd, gradient=spmdctx.value_and_grad)
    found, own = plan(local, *args), plan(local, *args, gradient_fp32_sync=False)
    (note,) = said(found, "gradient_fp32_sync=False")
    least = float(re.search(r"at least ([\d.]+) % faster", note).group(1))
    assert 10 < least <= 100 * (1 - own.cost.total_s / found.cost.total_s)


def test_float32_gradients_and_small_ones_are_not_spoken_of():
    assert not said(plan(sgd, parameters(jnp.float32), batch(jnp.float32)), "gradient_fp32_sync")
    small = plan(sgd, parameters(jnp.bfloat16, 16), batch(jnp.bfloat16, 1 << 20, 16))
    assert not said(small, "gradient_fp32_sync")


def test_moves_that_are_cheaper_by_all_to_all_are_said():
    def moved(x):
        x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("data", None))
        x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(None, "data"))
        return x * 2

    args, mesh = (batch(jnp.float32, 4096, 4096),), {"data": 8}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((8,), ("data",))):
        found = plan(moved, *args, mode="semi_auto_parallel", mesh=mesh, enable_alltoall=False)
        allowed = plan(moved, *args, mode="semi_auto_parallel", mesh=mesh, enable_alltoall=True)
    (note,) = said(found, "enable_alltoall=True")
    assert f"{seconds_text(allowed.cost.total_s)} instead of {seconds_text(found.cost.total_s)}" in note
    assert not said(allowed, "enable_alltoall")


def test_the_parallel_optimizer_that_is_fastest_is_named_with_its_seconds():
    args, levels = adam_arguments(), ("level1", "level2", "level3")
    found = plan(adam, *args)
    others = [plan(adam, *args, enable_parallel_optimizer=True, parallel_optimizer_config={"optimizer_level": level}) for level in levels]
    best = min(others, key=lambda one: one.cost.total_s)
    (note,) = said(found, "enable_parallel_optimizer=True")
    assert seconds_text(best.cost.total_s) in note
    assert not said(best, "optimizer_level")
    assert not said(best, "enable_parallel_optimizer=True")


def test_what_lets_a_step_fit_is_said_with_its_peak():
    args = adam_arguments()
    whole = plan(adam, *args)
    other = plan(adam, *args, enable_parallel_optimizer=True)
    budget = (whole.cost.memory_bytes + other.cost.memory_bytes) // 2
    (note,) = said(plan(adam, *args, memory_bytes=budget), "enable_parallel_optimizer=True")
    assert "would let the step fit" in note
    assert bytes_text(whole.cost.memory_bytes) in note
    tight = other.cost.memory_bytes - 1
    level3 = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": "level3"}}
    (note,) = said(plan(adam, *args, memory_bytes=tight), "enable_parallel_optimizer=True with optimizer_level=")
    assert bytes_text(plan(adam, *args, **level3).cost.memory_bytes) in note
    (note,) = said(plan(adam, *args, memory_bytes=1 << 20), "enable_parallel_optimizer=True")
    assert "fit" not in note


@pytest.mark.parametrize("mode", ["data_parallel", "stand_alone"])
def test_donated_state_that_lets_a_step_fit_is_said(mode):
    args, own = adam_arguments(), {} if mode == "data_parallel" else {"device_num": 1}
    donating = plan(adam, *args, mode=mode, donate_argnums=(0, 1), **own)
    found = plan(adam, *args, mode=mode, memory_bytes=donating.cost.memory_bytes, **own)
    (note,) = said(found, "donate_argnums")
    assert f"its peak would be {bytes_text(donating.cost.memory_bytes)}" in note
    assert donating.cost.memory_bytes < 0.7 * found.cost.memory_bytes
    assert not said(plan(adam, *args, mode=mode, donate_argnums=(0, 1), memory_bytes=1 << 10, **own), "donate_argnums")
    assert not said(plan(adam, *args, mode=mode, **own), "donate_argnums")


def test_an_error_says_that_donated_state_takes_less():
    with pytest.raises(InfeasibleError, match="donate the state that the step returns"):
        plan(adam, *adam_arguments(), mode="auto_parallel", memory_bytes=1 << 20)
    with pytest.raises(InfeasibleError) as caught:
        plan(adam, *adam_arguments(), mode="auto_parallel", memory_bytes=1 << 20, donate_argnums=(0, 1))
    assert "donate" not in str(caught.value)


def test_buckets_that_keep_gradients_waiting_are_priced_without_them():
    args = parameters(jnp.float32), batch(jnp.float32)
    found, free = plan(sgd, *args, all_reduce_fusion_config=[2]), plan(sgd, *args)
    notes = said(found, "Gradients without buckets")
    assert bool(notes) == (found.cost.total_s * 0.99 > free.cost.total_s)
    assert not said(free, "Gradients without buckets")


def test_a_saved_plan_forgets_what_would_let_it_fit_where_it_fits(tmp_path):
    args, file = adam_arguments(), tmp_path / "plan.json"
    budget = plan(adam, *args, donate_argnums=(0, 1)).safe_memory_bytes
    found = plan(adam, *args, mode="semi_auto_parallel", memory_bytes=budget)
    assert said(found, "donate_argnums")
    found.save(file)
    assert said(spmdctx.Plan.load(file), "donate_argnums")
    options = {"mode": "semi_auto_parallel", "memory_bytes": budget, "strategy_ckpt_load_file": str(file)}
    assert not said(plan(adam, *args, donate_argnums=(0, 1), **options), "donate_argnums")

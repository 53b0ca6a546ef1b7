"""The parallel optimizer on state of any type and shape: split or named, with the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx

MODES = ["semi_auto_parallel", "data_parallel"]
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (32, 64))


def planned(step, mode, level, *args, **options):
    config = {"optimizer_level": level, "parallel_optimizer_threshold": 0}
    own = spmdctx.parallel(step, parallel_mode=mode, enable_parallel_optimizer=True, parallel_optimizer_config=config, **options)
    return own, own.plan(*args)


def check(step, mode, level, *args, **options):
    """Runs a step split and on one device; returns the roles, the paths of whole inputs and the notes."""
    own, plan = planned(step, mode, level, *args, **options)
    for got, wanted in zip(jax.tree.leaves(own(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    whole = {leaf.path for leaf in plan.inputs if not any(leaf.sharding)}
    return {leaf.path: leaf.role.value for leaf in plan.inputs}, whole, " ".join(plan.notes)


def sm3(w, rows, columns, x):
    """Statistics of rows and columns, a mask of bools, and signs of the last update."""
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["w"] * w["s"]) ** 2))(w)
    square = jnp.minimum(rows["sum"][:, None], columns["sum"]) + gradient["w"] ** 2
    update = jnp.where(rows["mask"][:, None], gradient["w"] / jnp.sqrt(square + 1e-3), 0) + 0.01 * columns["signs"]
    rows = {"sum": square.max(1), "mask": ~rows["mask"]}
    columns = {"sum": square.max(0), "signs": jnp.sign(update).astype(jnp.int8)}
    return {"w": w["w"] - 0.1 * update, "s": w["s"] - gradient["s"]}, rows, columns, value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["level1", "level3"])
def test_statistics_of_another_rank_and_type_are_optimizer_state(mode, level):
    w = {"w": jax.random.normal(KEYS[1], (64, 48)) / 8, "s": jnp.ones(48)}
    rows = {"sum": jnp.ones(64), "mask": jnp.arange(64) % 2 == 0}
    columns = {"sum": jnp.ones(48), "signs": jnp.zeros((64, 48), jnp.int8)}
    roles, whole, _ = check(sm3, mode, level, w, rows, columns, X)
    assert {roles[f"rows/{name}"] for name in rows} | {roles[f"columns/{name}"] for name in columns} == {"optimizer"}
    assert roles["w/w"] == roles["w/s"] == "parameter"
    assert whole == (set() if level == "level3" else {"w/w", "w/s"})


def power(state, x):
    """A gradient of low rank with an error that is fed back, all in one argument; nothing is named for what it is."""
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["kernel"]["w"])
    error = gradient + state["kernel"]["left"]
    basis = jnp.linalg.qr(error @ state["kernel"]["basis"])[0]
    update = basis @ (basis.T @ error)
    kernel = {"w": state["kernel"]["w"] - 0.1 * update, "left": error - update, "basis": error.T @ basis, "idle": state["kernel"]["idle"]}
    return {"kernel": kernel}, value


def test_state_beside_its_parameter_is_told_from_unused_parameters():
    kernel = {"w": jnp.ones((64, 40)) / 8, "left": jnp.zeros((64, 40)), "basis": jax.random.normal(KEYS[2], (40, 4)), "idle": jnp.ones(24)}
    roles, whole, _ = check(power, "semi_auto_parallel", "level1", {"kernel": kernel}, X)
    assert roles["state/kernel/left"] == roles["state/kernel/basis"] == "optimizer"
    assert roles["state/kernel/w"] == roles["state/kernel/idle"] == "parameter"
    assert whole == {"state/kernel/w", "state/kernel/idle"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_frozen_integers_are_weights_and_what_stays_whole_is_named(mode, level):
    def step(w, frozen, seen, x):
        def loss(w):
            table = frozen["codes"].astype(jnp.float32) / 64
            return jnp.mean(jnp.where(frozen["on"], x @ (table + w) + x[:, :1] * seen["mean"][:40], 0) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, {"mean": 0.9 * seen["mean"], "odd": seen["odd"] + 1}, value

    frozen = {"codes": jax.random.randint(KEYS[3], (64, 40), -99, 99, jnp.int8), "on": jnp.arange(40) % 3 > 0}
    seen = {"mean": jnp.ones(43), "odd": jnp.zeros((3, 5), jnp.int32)}
    _, whole, notes = check(step, mode, level, jnp.ones((64, 40)), frozen, seen, X, batch_argnums=(3,))
    assert {"frozen/codes", "frozen/on"}.isdisjoint(whole) == (level == "level3")
    assert "'seen/odd' [3, 5]" in notes
    assert "'seen/mean' [43]" in notes or level != "level3"


def stacked(multiply):
    """A step with momentum of layers that a scan runs over, whose update multiplies each layer's matrices."""

    def update(m):
        unit = m / (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) + 1e-6)
        return multiply(unit)

    def step(w, m, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0] ** 2))(w)
        m = 0.9 * m + gradient
        return w - 0.1 * update(m), m, value

    return step


def unrolled(x):
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


def looped(x):
    return jax.lax.fori_loop(0, 6, lambda _, x: 1.5 * x - 0.5 * x @ (x.mT @ x), x)


@pytest.mark.parametrize("multiply", [unrolled, looped, jax.vmap(unrolled)])
@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
@pytest.mark.parametrize("mode", MODES)
def test_products_of_a_stacked_update_are_not_repeated(multiply, level, mode):
    """Products of small layers are: that takes less time than reducing their gradients whole."""
    shape = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.float32)
    args = shape, shape, jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    _, plan = planned(stacked(multiply), mode, level, *args, topology="tpu-v5e", device_num=8)
    found = {leaf.path: leaf.sharding for leaf in plan.inputs}
    assert found["m"] == (("data",), (), ())
    assert found["w"] == ((), ("data",), ()) if level == "level3" else not any(found["w"])
    assert not any("repeat each other's work" in note for note in plan.notes)


def test_a_stacked_update_without_products_stays_split_inside_its_layers():
    shape = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
    args = shape, shape, jax.ShapeDtypeStruct((64, 512), jnp.float32)
    _, plan = planned(stacked(jnp.sign), "data_parallel", "level1", *args, topology="tpu-v5e", device_num=8)
    assert {leaf.path: leaf.sharding for leaf in plan.inputs}["m"] == ((), ("data",), ())


def test_a_stacked_update_has_the_numbers_of_one_device():
    w = jax.random.normal(KEYS[1], (8, 64, 64)) / 8
    check(stacked(unrolled), "data_parallel", "level1", w, w / 9, X)
    check(stacked(looped), "semi_auto_parallel", "level3", w, w / 9, X)

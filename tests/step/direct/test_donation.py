"""Arrays that are deleted, or donated and in two places: an error by path or a copy, on one device and on eight, never an end."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx
from spmdctx import DonationError

MODES = ["data_parallel", "semi_auto_parallel", "auto_parallel"]


def array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def update(params, target, x):
    """Moves params towards target, and keeps all of them in use."""
    new = {name: value - 0.1 * (value - target[name]) + 0.01 * jnp.sum(x) for name, value in params.items()}
    return new, sum(jnp.sum(value**2) for value in target.values())


def plain(params, x):
    return {name: value * 2 + jnp.sum(x) for name, value in params.items()}


def step_of(fn, num_devices=8, mode="auto_parallel", **options):
    return spmdctx.parallel(fn, parallel_mode=mode, devices=jax.devices()[:num_devices], **options)


def params_of():
    return {"a": array(0, 16, 8), "b": array(1, 16, 8)}


def host(tree):
    return jax.tree.map(np.asarray, tree)


def close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), host(one), host(other))


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a_state_used_again_after_it_was_donated_is_named(mode, num_devices):
    step, x = step_of(plain, num_devices, mode, donate_argnums=0), array(2, 16)
    first = params_of()
    second = step(first, x)
    third = step(second, x)
    for _ in range(2):
        with pytest.raises(DonationError, match=r"params/a \(float32\[16,8\]\), params/b(.|\n)*fix: "):
            step(second, x)
    third = step(third, x)
    with pytest.raises(DonationError, match="params/a"):
        step({**third, "a": second["a"]}, x)
    assert np.isfinite(np.asarray(step(third, x)["a"])).all()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_deleted_array_is_named_by_steps_that_donate_nothing(num_devices):
    train, evaluate = step_of(plain, num_devices, donate_argnums=0), step_of(lambda params, x: jnp.sum(params["a"]) * x, num_devices)
    state, x = train(params_of(), array(2, 16)), array(3, 16)
    evaluate(state, x)
    train(state, x)
    with pytest.raises(DonationError, match="params/a"):
        evaluate(state, x)
    x.delete()
    with pytest.raises(DonationError, match=r"or their delete\(\) was called(.|\n)*x \(float32\[16\]\)"):
        evaluate(params_of(), x)


def test_verify_and_init_name_deleted_arrays():
    step, gone = step_of(plain, donate_argnums=0), params_of()
    gone["b"].delete()
    with pytest.raises(DonationError, match="params/b"):
        step.verify(gone, array(2, 16))
    with pytest.raises(DonationError, match=r"value \(float32"):
        step.init(lambda value: {"a": value, "b": value + 1}, gone["b"], batch=array(2, 16))
    assert step.plan(gone, array(2, 16)).inputs  # a plan reads shapes only


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_donated_batch_passed_again_is_named_or_runs(num_devices):
    step, x = step_of(plain, num_devices, donate_argnames=("x",)), array(2, 16)
    placed = step_of(plain, num_devices).in_shardings(params_of(), x)[1]
    x = jax.device_put(x, placed)
    step(params_of(), x)
    if x.is_deleted():
        with pytest.raises(DonationError, match="x "):
            step(params_of(), x)
    else:
        step(params_of(), x)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("mode", MODES)
def test_one_array_in_two_donated_places_gives_right_numbers(mode, num_devices):
    step, x = step_of(plain, num_devices, mode, donate_argnums=0), array(2, 16)
    shared = array(0, 16, 8)
    want = plain({"a": shared, "b": shared}, x)
    want_again = plain(want, x)
    state = step({"a": shared, "b": shared}, x)
    assert any("params/b shares its memory with params/a" in note for note in step.notes)
    close(state, want)
    state = step(state, x)
    close(state, want_again)
    alias = state["a"]
    close(step({"a": alias, "b": alias}, x), plain(host({"a": want_again["a"], "b": want_again["a"]}), x))


@pytest.mark.parametrize("num_devices", [1, 8])
def test_an_array_that_is_donated_and_passed_undonated_stays_the_callers(num_devices):
    step, x = step_of(update, num_devices, donate_argnums=0), array(2, 16)
    params = params_of()
    want = update(params, params, x)
    new, size = step(params, params, x)
    close((new, size), want)
    assert not params["a"].is_deleted()
    target = new
    for _ in range(3):
        want = update(host(new), host(target), x)
        new, size = step(new, target, x)
        close((new, size), want)


def test_two_arrays_of_one_memory_are_found():
    step, x = step_of(update, donate_argnums=0), array(2, 16)
    params, _ = step(params_of(), params_of(), x)
    shards = {name: [shard.data for shard in value.addressable_shards] for name, value in params.items()}
    target = {name: jax.make_array_from_single_device_arrays(value.shape, value.sharding, shards[name]) for name, value in params.items()}
    want = update(host(params), host(params), x)
    close(step(params, target, x), want)
    close(target, host(target))


def test_keys_in_two_donated_places_give_right_numbers():
    def step(state):
        return {name: jax.random.split(key)[0] for name, key in state.items()}

    key = jax.random.key(3)
    found = step_of(step, donate_argnums=0)({"one": key, "two": key})
    want = jax.random.key_data(jax.random.split(jax.random.key(3))[0])
    assert all((jax.random.key_data(one) == want).all() for one in found.values())


@pytest.mark.parametrize("num_devices", [1, 8])
def test_objects_that_share_an_array_keep_right_numbers(num_devices):
    class Pair(nnx.Module):
        def __init__(self):
            shared = array(0, 8, 8)
            self.online, self.target = nnx.Param(shared), nnx.Param(shared)

    def step(pair, x):
        self_target = pair.target[...]
        pair.target[...] = 0.5 * (self_target + pair.online[...])
        pair.online[...] = pair.online[...] + jnp.sum(x)
        return jnp.sum(pair.target[...])

    split, pair, x = step_of(step, num_devices, donate_argnums=0), Pair(), array(1, 16)
    reference, plain_step = Pair(), nnx.jit(step)
    for _ in range(3):
        close(split(pair, x), plain_step(reference, x))
    pair.online.set_value(pair.target.get_raw_value())
    reference.online.set_value(jnp.copy(reference.target.get_raw_value()))
    close(split(pair, x), plain_step(reference, x))
    old = pair.online.get_raw_value()
    split(pair, x)
    pair.online.set_value(old)
    with pytest.raises(DonationError, match="pair/online"):
        split(pair, x)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_donating_step_runs_inside_of_jit_and_grad_before_and_after_calls(num_devices):
    step, x = step_of(plain, num_devices, donate_argnums=0), array(2, 16)
    total = jax.jit(lambda params, x: sum(jnp.sum(value) for value in step(params, x).values()))
    want = total(params_of(), x)
    step(params_of(), x)
    close(total(params_of(), x), want)
    close(jax.grad(total)(params_of(), x), jax.tree.map(lambda value: jnp.full_like(value, 2), params_of()))


def test_an_error_of_the_users_own_is_not_taken_for_one_of_donation():
    def check(value):
        raise ValueError("the user's own")

    def step(params, x):
        jax.experimental.io_callback(check, None, x)
        return plain(params, x)

    one = step_of(step, 1, donate_argnums=0)
    for _ in range(2):
        params, x = params_of(), array(2, 16)
        with pytest.raises(Exception, match="the user's own") as caught:
            jax.block_until_ready(one(params, x))
        assert not isinstance(caught.value, DonationError)


def test_a_look_at_the_arrays_costs_little_of_a_small_step():
    def step(params, x):
        return {name: value * 1.5 + jnp.sum(x) for name, value in params.items()}

    split, x = step_of(step, mode="data_parallel", donate_argnums=0), array(2, 16)
    state = {str(index): array(index, 16, 8) for index in range(12)}
    for _ in range(3):
        state = split(state, x)
    jax.block_until_ready(state)
    buffers = split._last.entry.buffers
    assert buffers.fit(jax.tree.leaves((state, x)))
    looks, calls = [], []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            buffers.fit(jax.tree.leaves((state, x)))
            buffers.keep(jax.tree.leaves(state))
        looks.append((time.perf_counter() - begin) / 10)
        begin = time.perf_counter()
        state = split(state, x)
        jax.block_until_ready(state)
        calls.append(time.perf_counter() - begin)
    print(f"{min(looks) * 1e6:.1f} of {min(calls) * 1e6:.1f} us")
    assert min(looks) < 0.1 * min(calls)


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "auto_parallel"])
@pytest.mark.parametrize("run", [lambda step, *args: step(*args), lambda step, *args: step.verify(*args)], ids=["call", "verify"])
def test_shapes_can_be_planned_but_not_run(mode, run):
    step = spmdctx.parallel(lambda w, x: x @ w, parallel_mode=mode)
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    assert step.plan(*shapes).inputs[0].shape == (8, 8)
    with pytest.raises(TypeError, match=r"(?s)gets shapes where it needs arrays.*w, x"):
        run(step, *shapes)

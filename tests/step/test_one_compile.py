"""Every step compiles once: on one device and on eight, in every mode, with every kind of state, wherever the state comes from."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import spmdctx

TX = optax.adam(1e-3)
LINEN = linen.Dense(8)
MODES = ["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dropout, self.second = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.frozen = nnx.Variable(jnp.ones(8))

    def __call__(self, x):
        return self.second(self.dropout(x)) * self.frozen


def counted_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def counted_linen_step(state, x):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
    return state.apply_gradients(grads=gradients), loss


def counted_pytree_step(params, opt_state, count, x):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((x @ params["w"] + params["b"]) ** 2))(params)
    updates, opt_state = TX.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, count + 1, loss


def create_objects():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, TX, wrt=nnx.Param)


def create_linen():
    return (TrainState.create(apply_fn=LINEN.apply, params=LINEN.init(jax.random.key(0), jnp.ones((1, 8))), tx=TX),)


def create_pytree():
    params = {"w": jnp.ones((8, 16)), "b": jnp.zeros(16)}
    return params, TX.init(params), 0


KINDS = {
    "nnx": (counted_step, create_objects, lambda state, result: state),
    "linen": (counted_linen_step, create_linen, lambda state, result: result[:1]),
    "pytrees": (counted_pytree_step, create_pytree, lambda state, result: result[:3]),
}


@contextmanager
def compiles():
    """Collects the names of what JAX's backends compile inside."""
    names = []

    def listen(event, _, **details):
        if event.endswith("backend_compile_duration"):
            names.append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def step_of(fn, num_devices, **options):
    return spmdctx.parallel(fn, devices=jax.devices()[:num_devices], **options)


def calls(step, state, after, x, names):
    """Calls the step four times; returns how often it was compiled, and all that was compiled after the first call."""
    state = after(state, step(*state, x))
    first = len(names)
    for _ in range(3):
        state = after(state, step(*state, x))
    return sum("counted" in name for name in names), names[first:]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_four_calls_compile_once(kind, mode, num_devices):
    fn, create, after = KINDS[kind]
    donated = {} if mode in MODES[::2] else {"donate_argnums": tuple(range(len(create())))}
    step = step_of(fn, num_devices, parallel_mode=mode, **donated)
    with compiles() as names:
        assert calls(step, create(), after, jnp.ones((16, 8)), names) == (1, [])


@pytest.mark.parametrize(
    ("begin", "num_devices"),
    [("init", 1), ("init", 8), ("plan", 1), ("restore", 1), ("restore", 8), ("audit", 1), ("placed batch", 1), ("NumPy batch", 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_after_whatever_came_before_compile_once(kind, begin, num_devices, tmp_path):
    fn, create, after = KINDS[kind]
    step, x = step_of(fn, num_devices, parallel_mode="auto_parallel"), jnp.ones((16, 8))
    state = create()
    if begin == "init":
        made = step.init(create if len(state) > 1 else lambda: create()[0], batch=x)
        state = made if len(state) > 1 else (made,)
    with compiles() as names:
        if begin == "restore":
            with spmdctx.CheckpointManager(tmp_path) as checkpoints:
                checkpoints.save(1, state)
                checkpoints.wait()
                state = checkpoints.restore(state).state
        elif begin in ("plan", "audit"):
            getattr(step, begin)(*state, x)
        elif begin == "placed batch":
            step.plan(*state, x)
            x = step.shard_batch(x)
        elif begin == "NumPy batch":
            x = np.ones((16, 8), np.float32)
        assert calls(step, state, after, x, names) == (1, [])


def counted_key_step(params, key, x):
    key, own = jax.random.split(key)
    return params + jax.random.normal(own, x.shape).sum(), key


def counted_late_step(params, x, count, rate):
    return params * rate + x.sum(), count + 1, {"mean": x.mean()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_comes_back_compiles_once(make_key, mode):
    step, state = step_of(counted_key_step, 8, parallel_mode=mode), (jnp.ones((8, 16)), make_key(0))
    with compiles() as names:
        assert calls(step, state, lambda state, result: result, jnp.ones((16, 8)), names) == (1, [])


@pytest.mark.parametrize("mode", MODES)
def test_state_after_the_batch_compiles_once(mode):
    step, params, count, x = step_of(counted_late_step, 8, parallel_mode=mode), jnp.ones((8, 16)), 0, jnp.ones((16, 8))
    with compiles() as names:
        for rate in (0.5, 0.25, 0.125):
            params, count, _ = step(params, x, count, rate)
    assert sum("counted" in name for name in names) == 1
    assert step.plan(params, x, count, rate).inputs[-1].path == "rate"


def test_an_object_replaced_between_calls_compiles_once():
    step, (model, optimizer) = step_of(counted_step, 1, parallel_mode="auto_parallel"), create_objects()
    with compiles() as names:
        for value in (jnp.zeros(8), np.zeros(8, np.float32), jax.device_put(jnp.zeros(8), jax.devices()[0])):
            step(model, optimizer, jnp.ones((16, 8)))
            model.second.bias.set_value(value)
    assert sum("counted" in name for name in names) == 1


def test_an_average_that_the_step_returns_beside_objects_compiles_once():
    def counted_average_step(model, optimizer, average, x):
        loss = counted_step(model, optimizer, x)
        return jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, nnx.state(model, nnx.Param)), loss

    step, (model, optimizer) = step_of(counted_average_step, 1, parallel_mode="stand_alone"), create_objects()
    average = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    with compiles() as names:
        for _ in range(4):
            average, _ = step(model, optimizer, average, jnp.ones((16, 8)))
    assert sum("counted" in name for name in names) == 1

"""MicroBatchInterleaved: parts of a batch side by side on the same devices give one device's numbers, whatever runs around them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextError, StrategyError

WIDTH = 8
X, Y = (jax.random.normal(jax.random.key(seed), (32, WIDTH)) for seed in (0, 1))
MODES = [
    {"parallel_mode": "stand_alone"},
    {"parallel_mode": "data_parallel", "gradients_mean": True},
    {"parallel_mode": "auto_parallel"},
    {"parallel_mode": "semi_auto_parallel", "grad_accumulation_step": 2},
    {"parallel_mode": "auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 4},
]


def params(count=4):
    return [0.3 * jax.random.normal(jax.random.key(number), (WIDTH, WIDTH)) for number in range(count)]


def loss(params, x, y):
    for own in params:
        x = x + jnp.tanh(x @ own)
    return jnp.mean((x - y) ** 2), {"out": x, "mean": x.mean(), "same": jnp.arange(3)}


def assert_close(got, want, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("count", [1, 2])
def test_parts_give_one_device_s_numbers(options, count):
    def step(params, x, y):
        return spmdctx.value_and_grad(spmdctx.MicroBatchInterleaved(loss, count), has_aux=True)(params, x, y)

    assert_close(spmdctx.parallel(step, **options)(params(), X, Y), jax.value_and_grad(loss, has_aux=True)(params(), X, Y))


def test_parts_and_micro_batches_are_put_around_a_loss_in_either_order():
    want = jax.grad(loss, has_aux=True)(params(), X, Y)
    parts, cell = spmdctx.MicroBatchInterleaved, spmdctx.PipelineCell
    for wrapped in (cell(parts(loss, 2), 4), parts(cell(loss, 4), 2), cell(parts(parts(loss, 2), 2), 2)):
        step = spmdctx.parallel(
            lambda params, x, y, wrapped=wrapped: spmdctx.grad(wrapped, has_aux=True)(params, x, y),
            parallel_mode="auto_parallel",
            pipeline_stages=2,
        )
        assert_close(step(params(), X, Y), want)
        assert_close(wrapped(params(), X, Y), loss(params(), X, Y))


def test_equations_of_parts_take_turns():
    def step(params, x, y):
        return spmdctx.grad(spmdctx.MicroBatchInterleaved(lambda *given: loss(*given)[0]))(params, x, y)

    captured = spmdctx.parallel(step, parallel_mode="auto_parallel")._entry_of((params(), X, Y), {}).captured
    products = [eqn.invars for eqn in captured.jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    weights = captured.jaxpr.jaxpr.invars[:4]
    order = [weights.index(atom) for atoms in products for atom in atoms if atom in weights]
    assert order[:8] == [0, 0, 1, 1, 2, 2, 3, 3]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(jnp.tanh(layer(x)))
        return x


@pytest.mark.parametrize(("stages", "order"), [(1, (0, 1)), (2, (0, 2, 1, 3))])
def test_statistics_pass_from_part_to_part_as_between_micro_batches(stages, order):
    def stepped(parts, x, y, **options):
        def step(model, optimizer, x, y):
            wrapped = spmdctx.MicroBatchInterleaved(lambda model: jnp.mean((model(x) - y) ** 2), parts)
            value, gradient = spmdctx.value_and_grad(wrapped)(model)
            optimizer.update(model, gradient)
            return value

        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        value = spmdctx.parallel(step, **options)(model, optimizer, x, y)
        return value, nnx.to_pure_dict(nnx.state(model))

    got = stepped(2, X, Y, parallel_mode="auto_parallel", pipeline_stages=stages, grad_accumulation_step=stages)
    x, y = (in_turn(batch, order) for batch in (X, Y))
    assert_close(got, stepped(1, x, y, parallel_mode="stand_alone", grad_accumulation_step=len(order)))


def in_turn(batch, order):
    """Puts what parts run one after the other where micro-batches, which are every so many-th element, run so."""
    found = np.array(batch)
    for place, number in enumerate(order):
        found[place :: len(order)] = batch[number :: len(order)]
    return jnp.asarray(found)


def test_a_key_gives_each_part_noise_of_its_own():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))

    net = Dropped()
    given = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)["params"]

    def step(params, x, key):
        def one(params, x, key):
            out = net.apply({"params": params}, x, rngs={"dropout": key})
            return jnp.mean(out**2), out

        return spmdctx.grad(spmdctx.MicroBatchInterleaved(one, 2), has_aux=True)(params, x, key)

    x = jnp.repeat(X[::2], 2, 0)
    _, out = spmdctx.parallel(step, parallel_mode="auto_parallel")(given, x, jax.random.key(2))
    assert not np.array_equal(out[::2] == 0, out[1::2] == 0)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, None])
def test_a_number_of_parts_is_positive(count):
    with pytest.raises(ContextError, match="MicroBatchInterleaved"):
        spmdctx.MicroBatchInterleaved(loss, count)


@pytest.mark.parametrize("options", [MODES[2], MODES[4]])
def test_a_batch_that_does_not_divide_into_parts_is_refused(options):
    def step(params, x, y):
        return spmdctx.grad(spmdctx.MicroBatchInterleaved(loss, 3), has_aux=True)(params, x, y)

    with pytest.raises(StrategyError, match=r"into 3 interleaved parts, but its size 32"):
        spmdctx.parallel(step, **options).plan(params(), X, Y)


@pytest.mark.parametrize("options", [one for one in MODES if one["parallel_mode"] == "data_parallel" or "grad_accumulation_step" in one])
def test_a_loss_that_takes_one_number_of_rows_only_is_refused_by_its_line(options):
    def fixed(params, x, y):
        return loss(params, x.reshape(32, 2, WIDTH // 2).reshape(32, WIDTH), y)

    def step(params, x, y):
        return spmdctx.value_and_grad(fixed, has_aux=True)(params, x, y)

    with pytest.raises(StrategyError, match=r"cannot be traced for the rows of one device or micro-batch: cannot reshape") as caught:
        spmdctx.parallel(step, **options).plan(params(), X, Y)
    assert "test_parts.py" in str(caught.value)
    assert "of (32, 8)" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)

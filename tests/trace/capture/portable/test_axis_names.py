"""Axis names that nothing binds: one error, which names the axis and the user's line and says what to do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax import lax

import spmdctx

W, X = jnp.ones((16, 4)), jnp.ones((8, 16))


def averaged(w, x):
    return lax.pmean(x @ w, "batch")


def placed(w, x):
    return x @ w + lax.axis_index("batch")


def gathered(w, x):
    return lax.all_gather(x @ w, ("model", "batch"))


def permuted(w, x):
    return lax.ppermute(x @ w, "batch", [(0, 1)])


def in_a_loop(w, x):
    return lax.scan(lambda c, x: (c + lax.psum(x @ w, "batch"), None), jnp.zeros(4), x)[0]


def normalized(w, x):
    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
    state = {"params": {"scale": W[0], "bias": W[0]}, "batch_stats": {"mean": W[0], "var": W[0]}}
    return norm.apply(state, x @ w, mutable=["batch_stats"])[0]


def scaled(w, x):
    return DynamicScale().value_and_grad(lambda w: jnp.mean(x @ w), axis_name="batch")(w)[2]


STEPS = [averaged, placed, gathered, permuted, in_a_loop, normalized, scaled]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_error_names_the_axis_and_the_line(step):
    with pytest.raises(spmdctx.UnsupportedError) as caught:
        spmdctx.plan(step, W, X, parallel_mode="auto_parallel")
    text = str(caught.value)
    assert f"'{'model' if step is gathered else 'batch'}'" in text
    first = step.__code__.co_firstlineno
    lines = [f"test_axis_names.py:{line} " for line in range(first + 1, first + 4)]
    assert any(line in text for line in lines), text
    assert "jnp.mean" in text
    assert "axis_name=" in text
    assert isinstance(caught.value.__cause__, NameError)


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel", "semi_auto_parallel", "stand_alone"])
def test_every_mode_says_so(mode):
    with pytest.raises(spmdctx.UnsupportedError, match="names the axis 'batch'"):
        spmdctx.parallel(averaged, parallel_mode=mode)(W, X)


def test_a_loss_of_each_device_says_so():
    def step(w, x):
        return spmdctx.value_and_grad(lambda w: lax.pmean(jnp.mean(x @ w), "batch"))(w)

    with pytest.raises(spmdctx.UnsupportedError, match="names the axis 'batch'"):
        spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=True)(W, X)


def test_the_way_out_works():
    step = spmdctx.parallel(
        lambda w, x: jax.vmap(lambda x: averaged(w, x), axis_name="batch", out_axes=None)(x), parallel_mode="auto_parallel"
    )
    assert jnp.allclose(step(W, X), (X @ W).mean(0))


def test_other_names_that_are_not_defined_stay_what_they_are():
    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        spmdctx.plan(lambda x: undefined + x, X, parallel_mode="auto_parallel")  # noqa: F821  the fault that is tested

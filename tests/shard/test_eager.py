"""Eager calls of what is sharded: compiled, run split, equal to the plain call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import spmdctx.context.layers as context
from spmdctx.shard.decorate import shard

X = jnp.arange(64.0).reshape(8, 8)
W = jnp.arange(64.0).reshape(8, 8) / 64


@pytest.fixture(autouse=True, params=["semi_auto_parallel", "auto_parallel"])
def _mode(request):
    options = {"search_mode": "sharding_propagation"} if request.param == "auto_parallel" else {}
    with context.auto_parallel_context(parallel_mode=request.param, device_num=8, **options):
        yield


def test_a_function_runs_split():
    result = shard(jnp.matmul, ((2, 4), (4, 1)), ((2, 4),))(X, W)
    np.testing.assert_allclose(result, X @ W, rtol=1e-6)
    assert result.sharding.shard_shape(result.shape) == (4, 2)


def test_static_arguments_stay_python_values():
    total = shard(lambda x, axis, keepdims=False: x.sum(axis, keepdims=keepdims), ((8, 1),))
    np.testing.assert_allclose(total(X, 1, keepdims=True), X.sum(1, keepdims=True))
    np.testing.assert_allclose(total(X, 0), X.sum(0))


def test_an_nnx_module_runs_split_and_is_updated():
    plain, ours = (nnx.BatchNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))
    result = shard(ours, ((8, 1),))(X)
    np.testing.assert_allclose(result, plain(X), rtol=1e-5)
    np.testing.assert_allclose(ours.mean[...], plain.mean[...], rtol=1e-6)


def test_a_linen_module_applies_split():
    model = linen.Dense(8)
    variables = model.init(jax.random.key(0), X)
    result = shard(model, ((2, 1),), ((2, 4),), parameter_plan={"kernel": (1, 4)}).apply(variables, X)
    np.testing.assert_allclose(result, model.apply(variables, X), rtol=1e-5)
    assert result.sharding.shard_shape(result.shape) == (4, 2)


def test_a_second_call_does_not_trace_again():
    traces = []

    def fn(x):
        traces.append(x)
        return jnp.tanh(x)

    sharded = shard(fn, ((8, 1),))
    sharded(X)
    sharded(X + 1)
    assert len(traces) == 1

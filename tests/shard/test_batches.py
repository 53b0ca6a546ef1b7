"""`shard(cross_batch=True)`: statistics of each device's own part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import StrategyError, UnsupportedError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
W = np.ones((4, 4), np.float32)


def normalised(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), x.mean()


def run(function, *args, **options):
    return spmdctx.parallel(function, **{"parallel_mode": "semi_auto_parallel", **options})


def step(cross_batch):
    norm = spmdctx.shard(normalised, ((8, 1),), cross_batch=cross_batch)

    def forward(w, x):
        out, mean = norm(x @ w)
        return out, mean

    return forward


def test_statistics_are_those_of_each_part():
    out, mean = run(step(True))(W, X)
    parts = [normalised(X[2 * place : 2 * place + 2] @ W) for place in range(8)]
    np.testing.assert_allclose(out, np.concatenate([part[0] for part in parts]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mean, np.mean([part[1] for part in parts]), rtol=1e-5)


@pytest.mark.parametrize("cross_batch", [True, False])
def test_no_statistics_cross_devices(cross_batch):
    forward = run(step(cross_batch))
    large = [row.payload_bytes for row in forward.plan(W, X).collectives if row.payload_bytes > 4]
    # The mean of the rows and that of the variance are one equation.
    assert large == ([] if cross_batch else [16, 16])
    assert forward.audit(W, X).ok


def test_gradients_go_through():
    norm = spmdctx.shard(lambda x: normalised(x)[0], ((4, 1),), cross_batch=True)

    def backward(w, x):
        return w - jax.grad(lambda w: (norm(x @ w) ** 3).mean())(w)

    def want(w, x):
        return w - jax.grad(lambda w: jnp.mean(jax.vmap(lambda part: normalised(part)[0])((x @ w).reshape(4, 4, 4)) ** 3))(w)

    np.testing.assert_allclose(run(backward, device_num=4)(W, X), want(W, X), rtol=1e-4, atol=1e-5)


def test_in_stand_alone_it_is_the_function_itself():
    with pytest.warns(spmdctx.errors.ContextWarning, match="no effect"):
        out, _ = run(step(True), parallel_mode="stand_alone")(W, X)
    np.testing.assert_allclose(out, normalised(X @ W)[0], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(UnsupportedError, match="cross_batch is of functions"):
        spmdctx.shard(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ((8, 1),), cross_batch=True)
    with pytest.raises(StrategyError, match="cross_batch needs in_strategy"):
        spmdctx.shard(normalised, None, cross_batch=True)
    count = spmdctx.shard(lambda x: jnp.sum(x > 0), ((8, 1),), cross_batch=True)
    with pytest.raises(StrategyError, match="differs between devices"):
        run(lambda w, x: (count(x), w)).plan(W, X)

"""`step.verify` of pipelines whose micro-batches draw random numbers: it compares with the same micro-batches on one device."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import spmdctx

X = jax.random.normal(jax.random.key(0), (16, 8))
WEIGHTS = [jax.random.normal(key, (8, 8)) / 3 for key in jax.random.split(jax.random.key(1), 2)]


def loss(weights, key, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape) - 1) ** 2)


def with_key(weights, key, x):
    value, grads = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=4))(weights, key, x)
    return jax.tree.map(lambda old, new: old - 0.1 * new, weights, grads), value


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jnp.tanh(self.first(x))))


def with_dropout(model, x):
    return spmdctx.value_and_grad(spmdctx.PipelineCell(lambda model, x: jnp.mean((model(x) - 1) ** 2), micro_size=4))(model, x)


@pytest.mark.parametrize(("function", "args"), [(with_key, (WEIGHTS, jax.random.key(2), X)), (with_dropout, (Layers(nnx.Rngs(3)), X))])
def test_micro_batches_that_draw_are_compared_with_themselves_on_one_device(function, args):
    report = spmdctx.parallel(function, parallel_mode="semi_auto_parallel", pipeline_stages=2, device_num=2).verify(*args)
    assert report.ok, str(report)
    assert any("the same micro-batches on one device" in sentence for sentence in report.explanations)

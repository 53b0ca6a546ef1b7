"""Steps that cut the batch themselves, into micro-batches for example: the parts are split like the batch."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from tests.zoo.matrix import split_share

BATCH, WIDTH, HIDDEN = 32, 16, 64


def loss(weights, x):
    return (jnp.tanh(x @ weights[0]) @ weights[1]).mean()


def updated(weights, gradients):
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)


def scanned(weights, x):
    def body(sums, part):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, part)), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return updated(weights, jax.lax.scan(body, zeros, x.reshape(4, -1, WIDTH))[0])


def looped(weights, x):
    def body(index, sums):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, jax.lax.dynamic_slice_in_dim(x, index * 8, 8)))

    return updated(weights, jax.lax.fori_loop(0, 4, body, jax.tree.map(jnp.zeros_like, weights)))


def divided(weights, x):
    first, second = (jax.grad(loss)(weights, part) for part in jnp.split(x, 2))
    return updated(weights, jax.tree.map(jnp.add, first, second))


def sliced(weights, x):
    first, second = (jax.grad(loss)(weights, x[start : start + 16]) for start in (0, 16))
    return updated(weights, jax.tree.map(jnp.add, first, second))


def doubled(weights, x):
    def both(weights):
        hidden = x @ weights[0]
        return (jnp.concatenate([jnp.tanh(hidden), jnp.sin(hidden)]) @ weights[1]).mean()

    return updated(weights, jax.grad(both)(weights))


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH), (BATCH, WIDTH)
    up, down, x = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return [up / 4, down / 8], x


@pytest.mark.parametrize("step", [scanned, looped, divided, sliced, doubled])
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_parts_of_a_batch_are_split_like_the_batch(step, mode):
    parallel = spmdctx.parallel(step, parallel_mode=mode)
    assert split_share(parallel.plan(*arguments())) > 0.85
    report = parallel.audit(*arguments())
    assert report.ok, str(report)
    assert parallel.verify(*arguments()).ok


def test_micro_batches_that_the_devices_divide_are_dealt_again_and_not_gathered():
    plan = spmdctx.parallel(scanned, parallel_mode="data_parallel", device_num=4, enable_alltoall=True).plan(*arguments())
    assert "all_to_all" in {row.kind for row in plan.collectives}
    assert "all_gather" not in {row.kind for row in plan.collectives}


def test_auto_parallel_splits_micro_batches_by_propagation():
    plan = spmdctx.parallel(scanned, parallel_mode="auto_parallel", search_mode="sharding_propagation").plan(*arguments())
    assert split_share(plan) > 0.85

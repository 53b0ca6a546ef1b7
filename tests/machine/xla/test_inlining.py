"""XLA on TPU (compiled only) inlines calls before it partitions them: what a call and its caller both gather is gathered once."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

import spmdctx
from spmdctx.errors import ContextWarning
from spmdctx.machine.xla.collectives.inlining import merged_scopes
from tests.audit.compile_only import need_gpu, need_tpu

BATCH, HEADS, LENGTH, FEATURES, WIDTH = 8, 3, 256, 128, 128
BLOCK = BlockSizes(*[128] * 3, BATCH, *[128] * 7)
"""All of the batch is in one block, so devices take it whole."""
kernel = partial(flash_attention, causal=True, block_sizes=BLOCK)


def turned(x):
    return x.swapaxes(1, 2)


@jax.custom_vjp
def attend(q, k, v):
    return turned(kernel(turned(q), turned(k), turned(v)))


def backward(saved, g):
    _, pull = jax.vjp(kernel, *map(turned, saved))
    return tuple(map(turned, pull(turned(g))))


attend.defvjp(lambda *args: (attend(*args), args), backward)


def in_own_derivative(q, k, v):
    return turned(attend(turned(q), turned(k), turned(v)))


def attention_step(function):
    def loss(w, x):
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, w[name]) for name in "qkv")
        return jnp.mean(jnp.einsum("bhsk,hkd->bsd", function(q, k, v), w["o"]).astype(jnp.float32) ** 2)

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(jnp.subtract, w, gradient), value

    into, out = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((WIDTH, HEADS, FEATURES), (HEADS, FEATURES, WIDTH)))
    return step, {**dict.fromkeys("qkv", into), "o": out}, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)


ATTENTION = {
    "plain": (kernel, 3),
    "own derivative": (in_own_derivative, 3),
    "remat without barrier": (jax.checkpoint(kernel, prevent_cse=False), 3),
    "remat": (jax.checkpoint(kernel), 6),
}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_on_tpu_kernels_of_both_passes_share_gathers_unless_a_barrier_is_between(kind, mode):
    function, count = ATTENTION[kind]
    step, *args = attention_step(function)
    step = spmdctx.parallel(step, devices=need_tpu(), parallel_mode=mode)
    assert sum(one.kind == "all_gather" for one in step.plan(*args).collectives) == count
    report = step.audit(*args)
    assert report.ok, str(report)


def product(a, b):
    return a @ b


UP = spmdctx.shard(product, ((1, 1), (1, 8)), ((1, 8),))
DOWN = spmdctx.shard(product, ((1, 8), (8, 1)), ((1, 1),))


def block(x, weights):
    for up, down in weights:
        x = x + DOWN(jnp.sin(UP(x, up)), down)
    return jnp.tanh(x)


@jax.custom_vjp
def computed_again(x, weights):
    return block(x, weights)


computed_again.defvjp(lambda *args: (computed_again(*args), args), lambda saved, g: jax.vjp(block, *saved)[1](g))

BLOCKS = {
    "plain": block,
    "own derivative": computed_again,
    "remat without barrier": jax.checkpoint(block, prevent_cse=False),
}


def block_step(function):
    def step(weights, x):
        value, gradient = jax.value_and_grad(lambda weights: jnp.mean(function(x, weights) ** 2))(weights)
        return jax.tree.map(jnp.subtract, weights, gradient), value

    keys = jax.random.split(jax.random.key(0), 3)
    pair = jax.random.normal(keys[0], (64, 256)) / 8, jax.random.normal(keys[1], (256, 64)) / 16
    return step, [pair, pair], jax.random.normal(keys[2], (128, 64))


def need_cpu():
    return jax.devices()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("devices", "is_shared"), [(need_tpu, True), (need_gpu, False), (need_cpu, False)])
def test_on_tpu_what_a_body_without_barrier_computes_again_is_communicated_once(kind, devices, is_shared):
    (step, *args), (plain, *_) = block_step(BLOCKS[kind]), block_step(block)
    step, plain = (spmdctx.parallel(one, devices=devices(), parallel_mode="semi_auto_parallel") for one in (step, plain))
    counts = [len(one.plan(*args).collectives) for one in (step, plain)]
    assert (counts[0] == counts[1]) == (is_shared or kind == "plain")
    report = step.audit(*args)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", BLOCKS)
def test_bodies_that_are_inlined_have_the_numbers_of_one_device(kind):
    step, *args = block_step(BLOCKS[kind])
    got = spmdctx.parallel(step, parallel_mode="semi_auto_parallel")(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextWarning)  # shard() splits nothing on one device
        wanted = jax.jit(block_step(block)[0])(*args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


def test_calls_within_inlined_calls_end_up_in_the_outermost_one():
    assert merged_scopes([(1, 0), (3, 2), (4, 3)], [0, 1, 2, 3, 4, 5]) == [0, 0, 2, 2, 2, 5]
    assert merged_scopes([], (0, 1)) == (0, 1)

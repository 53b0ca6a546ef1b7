"""Kernels that XLA's partitioner knows nothing of: every device runs them as planned, on TPU (compiled only) and in numbers on CPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import make_splash_mha
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask, MultiHeadMask
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.errors import UnsupportedError
from tests.audit.compile_only import need_tpu

MODES = ["auto_parallel", "data_parallel", "semi_auto_parallel"]


def product(left, right, interpret):
    """Multiplies matrices by a kernel with a grid."""

    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    (rows, depth), columns = left.shape, right.shape[1]
    block = min(rows, 128)
    specs = [pl.BlockSpec((block, depth), lambda i: (i, 0)), pl.BlockSpec((depth, columns), lambda i: (0, 0))]
    shape = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    out = pl.BlockSpec((block, columns), lambda i: (i, 0))
    return pl.pallas_call(kernel, out_shape=shape, grid=(rows // block,), in_specs=specs, out_specs=out, interpret=interpret)(left, right)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(left, right, interpret):
    return product(left, right, interpret)


dot.defvjp(
    lambda left, right, interpret: (product(left, right, interpret), (left, right)),
    lambda interpret, saved, g: (product(g, saved[1].T, interpret), product(saved[0].T, g, interpret)),
)


def squared(x, interpret):
    """Squares elements by a kernel without a grid."""

    def kernel(x, out):
        out[...] = x[...] * x[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)


def scanned(w, x, interpret):
    return jax.lax.scan(lambda h, own: (jnp.tanh(dot(h, own, interpret)), None), x, w)[0]


def mapped(w, x, interpret):
    return jax.vmap(lambda rows: dot(rows, w[0], interpret))(x.reshape(2, -1, x.shape[-1]))


def checkpointed(w, x, interpret):
    return jax.checkpoint(lambda w, x: jnp.sin(dot(x, w[0], interpret)))(w, x)


def branched(w, x, interpret):
    return jax.lax.cond(x[0, 0] > 0, lambda: dot(x, w[0], interpret), lambda: dot(x, w[1], interpret))


def step_of(model, interpret):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(model(w, x, interpret) ** 2))(w)
        metric = squared(gradient.reshape(-1, gradient.shape[-1]), interpret).sum()
        return w - gradient, (value, metric)

    return step


@pytest.mark.parametrize(("model", "mode"), [(scanned, "auto_parallel"), (mapped, "data_parallel"), (branched, "semi_auto_parallel")])
def test_tpu_compiles_kernels_that_are_split_and_whole(model, mode):
    step = spmdctx.parallel(step_of(model, False), devices=need_tpu(), parallel_mode=mode)
    args = jax.ShapeDtypeStruct((2, 128, 128), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)
    assert any("pallas_call is computed whole" in note for note in step.plan(*args).notes)
    assert "tpu_custom_call" in step.lower(*args).compile().as_text()
    report = step.audit(*args)
    assert report.ok, str(report)


BATCH, HEADS, LENGTH, FEATURES = 8, 8, 256, 128


def attending(split):
    """A training step of JAX's own attention kernel for TPU, with the strategy of its operands if one is given."""
    attend = partial(flash_attention, causal=True)
    if split is not None:
        attend = spmdctx.shard(attend, (split,) * 3, (split,))

    def loss(w, x):
        q, k, v = ((x @ w[name]).reshape(BATCH, LENGTH, HEADS, FEATURES).swapaxes(1, 2) for name in "qkv")
        out = attend(q, k, v).swapaxes(1, 2).reshape(x.shape)
        return jnp.mean((out @ w["o"]).astype(jnp.float32) ** 2)

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(jnp.subtract, w, gradient), value

    weights = {name: jax.ShapeDtypeStruct((HEADS * FEATURES,) * 2, jnp.bfloat16) for name in "qkvo"}
    return step, weights, jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS * FEATURES), jnp.bfloat16)


@pytest.mark.parametrize(
    ("mode", "split", "heads"),
    [
        ("data_parallel", None, {(1, 8)}),
        ("auto_parallel", None, {(1, 8), (8, 1), (2, 4), (4, 2)}),
        ("semi_auto_parallel", (2, 4, 1, 1), {(4, 2)}),
    ],
)
def test_devices_share_batch_and_heads_of_jax_s_attention_kernel(mode, split, heads):
    step, *args = attending(split)
    step = spmdctx.parallel(step, devices=need_tpu(), parallel_mode=mode)
    assert not any("pallas_call" in note for note in step.plan(*args).notes)
    calls = [line for line in step.lower(*args).compile().as_text().splitlines() if "tpu_custom_call" in line]
    found = re.findall(rf"bf16\[(\d+),(\d+),{LENGTH},{FEATURES}\]", " ".join(line.split(" custom-call(")[0] for line in calls))
    assert len(calls) == 3
    assert {(int(batch), int(own)) for batch, own in found} <= heads
    report = step.audit(*args)
    assert report.ok, str(report)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_the_audit_reads_programs_whose_kernels_have_metadata_of_several_lines(mode):
    attend = jax.vmap(make_splash_mha(MultiHeadMask([CausalMask((LENGTH,) * 2)] * HEADS), head_shards=1, q_seq_shards=1))

    def step(w, x):
        heads = x.reshape(BATCH, LENGTH, HEADS, FEATURES).swapaxes(1, 2)
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(attend(heads * w, heads, heads).astype(jnp.float32) ** 2))(w)
        return w - gradient, value

    args = jax.ShapeDtypeStruct((FEATURES,), jnp.float32), jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS * FEATURES), jnp.float32)
    report = spmdctx.parallel(step, devices=need_tpu(), parallel_mode=mode).audit(*args)
    assert report.ok, str(report)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [scanned, mapped, checkpointed, branched])
def test_kernels_have_the_numbers_of_one_device(model, mode):
    args = jax.random.normal(jax.random.key(0), (2, 16, 16)) / 4, jax.random.normal(jax.random.key(1), (32, 16))
    plain = step_of(model, True)
    got = spmdctx.parallel(plain, parallel_mode=mode)(*args)
    for own, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(plain)(*args)), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-5)


def partitioned(rule, partition, function, **options):
    """Returns a function with the author's own partitioner, and a gradient that has none."""
    own = custom_partitioning(function)
    own.def_partition(partition=partition, sharding_rule=rule, **options)
    wrapped = jax.custom_vjp(own)
    wrapped.defvjp(lambda *args: (own(*args), args), lambda args, g: jax.vjp(function, *args)[1](g))
    return wrapped


def by_rows(mesh, args, _result):
    rows, weights = (arg.sharding for arg in args)
    return mesh, lambda x, w: jnp.tanh(x) @ w, NamedSharding(mesh, P(rows.spec[0], None)), (rows, weights)


def by_depth(mesh, args, _result):
    axes = args[0].sharding.spec[1]

    def local(x, w):
        found = x @ w
        return found if axes is None else jax.lax.psum(found, axes)

    return mesh, local, NamedSharding(mesh, P(None, None)), tuple(arg.sharding for arg in args)


def by_whim(mesh, args, _result):
    other = NamedSharding(mesh, P(None, None))
    return mesh, lambda x, w: x @ w, other, (other, other)


def tpu_step(function, mode="data_parallel", **options):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(function(x, w) ** 2))(w)
        return w - gradient, value

    args = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    return spmdctx.parallel(step, devices=need_tpu(), parallel_mode=mode, **options), args


def test_tpu_splits_a_custom_partitioning_op_as_its_author_says():
    rows = partitioned("r k, k n -> r n", by_rows, lambda x, w: jnp.tanh(x) @ w, need_replication_factors=("k", "n"))
    step, args = tpu_step(rows)
    assert step.plan(*args).inputs[1].sharding == (("data",), ())
    report = step.audit(*args)
    assert report.ok, str(report)
    text = step.lower(*args).compile().as_text()
    assert "f32[8,128]" in text
    assert "CustomSPMDPartitioning" not in text


def test_tpu_adds_up_what_a_custom_partitioning_op_contracts():
    function = partitioned("r k, k n -> r n", by_depth, lambda x, w: x @ w, reduction_factors=("k",))
    step, args = tpu_step(spmdctx.shard(function, in_strategy=((1, 8), (8, 1))), "semi_auto_parallel", full_batch=True)
    report = step.audit(*args)
    assert report.ok, str(report)
    assert step.plan(*args).inputs[0].sharding == (("data",), ())


def test_a_partitioner_that_contradicts_its_rule_is_named():
    step, args = tpu_step(partitioned("r k, k n -> r n", by_whim, lambda x, w: x @ w, need_replication_factors=("k", "n")))
    with pytest.raises(UnsupportedError, match=r"(?s)partitioner of a custom_partitioning op.*test_kernels.py.*jax\.shard_map"):
        step.lower(*args)


def test_tpu_runs_a_custom_partitioning_op_without_a_rule_whole():
    step, args = tpu_step(partitioned(lambda *_: "r k, k n -> r n", by_whim, lambda x, w: x @ w))
    assert any("custom_partitioning is computed whole" in note for note in step.plan(*args).notes)
    assert step.audit(*args).ok

"""gradient_fp32_sync in planned modes: the type in which low-precision gradients are reduced, and what rounding costs."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.audit import audit_program
from spmdctx.machine.xla.collectives import ways
from tests.audit.compile_only import need_gpu, need_tpu
from tests.lowering.gradients import combined
from tests.lowering.gradients import step as twenty

TARGETS = {"tpu": (need_tpu, "tpu-v5e"), "gpu": (need_gpu, "h100")}
BF16 = jnp.bfloat16


def step(weights, x, differentiate=jax.value_and_grad):
    """Products, biases, a table that is looked up and read again as a matrix, and a convolution: every way to make a gradient."""

    def loss(weights, x):
        hidden = jnp.tanh(x @ weights["first"] + weights["bias"])
        hidden = hidden[:, :256] + weights["table"][jnp.arange(x.shape[0]) % 8]
        hidden = jax.lax.conv_general_dilated(hidden[:, None, :], weights["filter"], (1,), "SAME")[:, 0]
        return jnp.mean((hidden @ weights["table"].T).astype(jnp.float32) ** 2)

    value, gradients = differentiate(loss)(weights, x)
    return value, jax.tree.map(lambda one, more: one - (0.1 * more).astype(one.dtype), weights, gradients)


def own_step(weights, x):
    return step(weights, x, spmdctx.value_and_grad)


WAYS = {
    "of the global loss": (step, {"parallel_mode": "data_parallel"}),
    "of each device's loss": (own_step, {"parallel_mode": "data_parallel", "gradients_mean": True}),
    "of micro-batches": (own_step, {"parallel_mode": "semi_auto_parallel", "grad_accumulation_step": 4}),
    "of each device's micro-batches": (own_step, {"parallel_mode": "data_parallel", "gradients_mean": True, "grad_accumulation_step": 4}),
}


def arguments(dtype=BF16):
    shapes = {"first": (512, 512), "bias": (512,), "table": (8, 256), "filter": (1, 1, 3)}
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return weights, jax.ShapeDtypeStruct((64, 512), dtype)


def gradients_reduced_in(text):
    """Types of the tensors with dimensions that a program reduces; scalars are the loss."""
    found = Counter()
    for one in combined(text):
        assert one.kind == "all_reduce"
        found.update(dtype for dtype, shape in zip(one.dtypes, one.shapes, strict=True) if np.prod(shape) > 1)
    return set(found)


@pytest.mark.parametrize(("sync", "dtype"), [(True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", TARGETS)
def test_bfloat16_gradients_are_reduced_in_the_type_that_was_asked_for(backend, way, sync, dtype):
    (need, topology), (function, options) = TARGETS[backend], WAYS[way]
    parallel = spmdctx.parallel(function, devices=need(), topology=topology, gradient_fp32_sync=sync, **options)
    compiled = parallel.lower(*arguments()).compile()
    assert gradients_reduced_in(compiled.as_text()) == {dtype}
    report = audit_program(parallel.plan(*arguments()), compiled, ways.WAYS)
    assert report.ok, str(report)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sync", "dtype"), [(True, "f32"), (False, "bf16")])
def test_before_the_cpu_compiler_promotes_types_they_are_those_asked_for_too(sync, dtype, way, tmp_path):
    function, options = WAYS[way]
    parallel = spmdctx.parallel(function, gradient_fp32_sync=sync, **options)
    parallel.lower(*arguments()).compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": ".*partitioning.*"})
    (dump,) = tmp_path.glob("*jit_*step*after_spmd-partitioning*.txt") or tmp_path.glob("*after_*partitioning*.txt")
    reduced = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-reduce\(", dump.read_text())
    assert {own for own, dims in reduced if dims} == {dtype}


def test_the_bytes_that_a_plan_predicts_follow():
    plans = [spmdctx.parallel(step, parallel_mode="data_parallel", gradient_fp32_sync=sync).plan(*arguments()) for sync in (True, False)]
    wide, low = (sum(row.payload_bytes for row in plan.collectives if row.payload_bytes > 4) for plan in plans)
    assert wide == 2 * low
    assert plans[0].cost.communication_s > plans[1].cost.communication_s


def test_float32_gradients_are_none_of_it():
    texts = []
    for sync in (True, False):
        parallel = spmdctx.parallel(step, parallel_mode="data_parallel", gradient_fp32_sync=sync)
        texts.append(parallel.lower(*arguments(jnp.float32)).as_text())
    assert texts[0] == texts[1]


def test_a_cast_parameters_gradient_stays_in_float32_to_the_end():
    """Parameters in float32, computed with in bfloat16: nothing is rounded between the product and the optimizer."""

    def mixed(weights, x):
        gradients = jax.grad(lambda own: jnp.sum((x @ own.astype(BF16)).astype(jnp.float32)))(weights)
        return weights - gradients

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(1, 2, size=(64, 16)), BF16)
    weights = jnp.zeros((16, 8))
    wanted = -np.asarray(x, np.float64).sum(0)[:, None] * np.ones((1, 8))
    errors = []
    for sync in (True, False):
        lowered = spmdctx.parallel(mixed, parallel_mode="data_parallel", gradient_fp32_sync=sync).lower(weights, x)
        got = lowered.compile(compiler_options={"xla_allow_excess_precision": False})(weights, x)
        errors.append(np.abs(np.asarray(got) / wanted - 1).max())
    assert errors[0] < 1e-6
    assert errors[1] > 1e-4


def test_rounding_falls_against_a_reference_in_float64():
    """Every device's part is rounded before the sum in one case, the sum once in the other. CPU must not keep more than it is told to."""

    def reduced(weights, x):
        return jax.grad(lambda own: jnp.sum((x @ own).astype(jnp.float32)))(weights)

    x = jnp.asarray(np.random.default_rng(1).uniform(1, 2, size=(512, 64)), BF16)
    weights = jnp.zeros((64, 8), BF16)
    exact = np.asarray(x, np.float64).sum(0)[:, None]
    errors = []
    for sync in (True, False):
        lowered = spmdctx.parallel(reduced, parallel_mode="data_parallel", gradient_fp32_sync=sync).lower(weights, x)
        got = lowered.compile(compiler_options={"xla_allow_excess_precision": False})(weights, x)
        assert got.dtype == BF16
        errors.append(np.abs(np.asarray(got, np.float64) / exact - 1).max())
    assert errors[0] <= 2**-8  # half a unit of the last place
    assert errors[0] < errors[1]


def test_loops_and_remat_are_widened_inside():
    def scanned(weights, x):
        def loss(weights):
            body = jax.checkpoint(lambda hidden, own: (jnp.tanh(hidden @ own), None))
            return jnp.mean(jax.lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda one, more: one - more, weights, jax.grad(loss)(weights))

    args = jax.ShapeDtypeStruct((4, 256, 256), BF16), jax.ShapeDtypeStruct((64, 256), BF16)
    parallel = spmdctx.parallel(scanned, parallel_mode="data_parallel", devices=need_tpu(), topology="tpu-v5e")
    assert gradients_reduced_in(parallel.lower(*args).compile().as_text()) == {"float32"}


def test_buckets_hold_widened_gradients():
    weights, x = [jax.ShapeDtypeStruct((256 + 8 * index, 512), BF16) for index in range(20)], jax.ShapeDtypeStruct((64, 512), BF16)
    parallel = spmdctx.parallel(
        twenty, parallel_mode="data_parallel", devices=need_tpu(), topology="tpu-v5e", all_reduce_fusion_config=[3, 10]
    )
    program = combined(parallel.lower(weights, x).compile().as_text())
    counts = sorted(sum(np.prod(shape) > 1 for shape in one.shapes) for one in program)
    assert [count for count in counts if count] == [3, 7, 10]
    assert {dtype for one in program for dtype in one.dtypes} == {"float32"}


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("equation", ["ka,bck->abc", "ka,kbc->abc", "nka,nbck->nabc", "ka,kb->ab", "kla,bckl->abc"])
def test_products_that_a_backend_cannot_add_up_in_float32_run(equation, dtype):
    sizes = dict(zip("kabcnl", (16, 4, 3, 5, 2, 2), strict=True))
    operands = equation.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(0), 2)
    arrays = [jax.random.normal(key, [sizes[dim] for dim in dims], dtype) for key, dims in zip(keys, operands, strict=True)]
    strategy = tuple(tuple(4 if dim == "k" else 1 for dim in dims) for dims in operands)

    def step(left, right):
        return spmdctx.shard(lambda left, right: jnp.einsum(equation, left, right), strategy)(left, right)

    planned = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", device_num=4, dataset_strategy="full_batch")
    assert "dot_general" in planned.lower(*arrays).as_text()
    made, expected = planned(*arrays), jnp.einsum(equation, *[array.astype(jnp.float32) for array in arrays])
    assert sum(one.kind == "all_reduce" for one in combined(planned.lower(*arrays).compile().as_text())) == 1
    np.testing.assert_allclose(np.asarray(made, np.float32), expected, rtol=1e-2, atol=1e-2)


def test_gpus_make_gradients_of_convolutions_of_bfloat16_operands():
    """cuDNN has no such convolution into float32: its operands would be converted, and no matrix unit of bfloat16 used."""

    def convolved(weights, x):
        gradients = jax.grad(lambda own: jnp.mean(jnp.tanh(_conv(_conv(x, own["a"]), own["b"])).astype(jnp.float32) ** 2))(weights)
        return jax.tree.map(lambda one, more: one - (0.1 * more).astype(one.dtype), weights, gradients)

    shapes = {"a": jax.ShapeDtypeStruct((3, 3, 16, 32), BF16), "b": jax.ShapeDtypeStruct((3, 3, 32, 16), BF16)}
    run = spmdctx.parallel(convolved, devices=need_gpu(), topology="h100", parallel_mode="data_parallel", gradient_fp32_sync=True)
    args = shapes, jax.ShapeDtypeStruct((64, 16, 16, 16), BF16)
    compiled = run.lower(*args).compile()
    made = re.findall(r"= \((\w+)\[[\d,]*\][^(]*custom-call\(.*__cudnn\$convBackwardFilter", compiled.as_text())
    assert set(made) == {"bf16"}
    assert gradients_reduced_in(compiled.as_text()) == {"float32"}
    assert audit_program(run.plan(*args), compiled, ways.WAYS).ok


def _conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

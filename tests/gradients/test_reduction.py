"""How gradients are reduced: in which type, in which buckets, and which parameters are left out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import StrategyError, UnsupportedError
from spmdctx.gradients.options import GradientOptions
from spmdctx.gradients.reduce import buckets_of, groups_of
from spmdctx.ir.mesh import LogicalMesh
from tests.audit.compile_only import need_gpu, need_tpu

N = 8
LAYERS = 20


def chain_loss(params, x):
    for index in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{index:02d}"])
    return jnp.mean(x**2)


def chain_step(params, x):
    value, gradients = spmdctx.value_and_grad(chain_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def chain(dtype=jnp.float32):
    """Twenty parameters of different widths, so that an operand's shape says whose gradient it is."""
    sizes = [128 + 8 * index for index in range(LAYERS)] + [128]
    params = {f"w{index:02d}": jax.ShapeDtypeStruct((sizes[index], sizes[index + 1]), dtype) for index in range(LAYERS)}
    return params, jax.ShapeDtypeStruct((64, sizes[0]), dtype)


def options_of(count=8, buckets=None):
    return GradientOptions(LogicalMesh.of({"data": count}), False, True, True, 1, buckets)


def test_buckets_end_where_the_indices_say():
    assert buckets_of(range(20), options_of(buckets=(3, 10))) == [(0, 1, 2), (3, 4, 5, 6, 7, 8, 9), tuple(range(10, 20))]
    assert buckets_of([2, 0, 1], options_of(buckets=(1, 5))) == [(2,), (0, 1)]
    assert buckets_of(range(3), options_of()) == [(0, 1, 2)]


def test_every_bucket_has_groups_of_its_own():
    groups = [tuple(groups_of(4, number)[0]) for number in range(24)]
    assert len(set(groups)) == 24
    assert all(sorted(group) == [0, 1, 2, 3] for group in groups)
    with pytest.raises(UnsupportedError, match="Gradients of 2 devices can be kept apart in 2 buckets"):
        groups_of(2, 2)


def reductions(text):
    """Element counts of the gradients in each compiled all_reduce, as sorted tuples; scalars, such as the loss, are left out."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= (.*?) all-reduce(?:-start)?\((.*?)\), ", line)
        if match and "to_apply" in line:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found.append(sorted(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes))
    return sorted([size for size in sizes if size > 1] for sizes in found)


@pytest.mark.parametrize(("backend", "accumulated"), [("tpu", 1), ("tpu", 4), ("gpu", 1)])
def test_index_buckets_are_the_operands_of_the_compiled_all_reduces(backend, accumulated):
    devices = need_tpu() if backend == "tpu" else need_gpu()
    params, x = chain()
    step = spmdctx.parallel(
        chain_step,
        parallel_mode="data_parallel",
        devices=devices,
        all_reduce_fusion_config=[3, 10],
        grad_accumulation_step=accumulated,
    )
    sizes = [leaf.shape[0] * leaf.shape[1] for leaf in params.values()]
    buckets = [sizes[:3], sizes[3:10], sizes[10:]]
    got = reductions(step.lower(params, x).compile().as_text())
    if backend == "gpu":  # one flat operand per all_reduce, into which the scalar loss goes too
        assert sorted(total - total % 8 for (total,) in got) == sorted(sum(bucket) for bucket in buckets)
    else:
        assert got == sorted(sorted(bucket) for bucket in buckets)
    assert step.audit(params, x).ok


def test_the_plan_names_the_gradients_of_each_bucket():
    params, x = chain()
    step = spmdctx.parallel(chain_step, parallel_mode="data_parallel", all_reduce_fusion_config=[2, 18])
    text = "".join(step.plan(params, x).notes)
    assert "0 w00, 1 w01 | 2 w02, " in text
    assert " | 18 w18, 19 w19" in text
    gradients = step.plan(params, x).gradients
    assert [(one.path, one.bucket) for one in gradients] == [(f"w{n:02}", (n >= 2) + (n >= 18)) for n in range(20)]
    rows = [line.split()[-2:] for line in str(step.plan(params, x)).splitlines()]
    assert ["19", "w19"] in rows


@pytest.mark.parametrize("float32", [True, False])
def test_low_precision_gradients_are_summed_in_the_type_that_is_asked_for(float32):
    def step(w, x):
        return w, spmdctx.grad(lambda w: jnp.mean(x @ w).astype(jnp.float32))(w)

    args = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16), jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)
    run = spmdctx.parallel(step, parallel_mode="data_parallel", gradient_fp32_sync=float32, batch_argnums=1)
    text = run.lower(*args).as_text()
    assert re.search(r'"stablehlo.all_reduce".*?\) : \(tensor<16x8x(\w+)>\)', text, re.DOTALL)[1] == ("f32" if float32 else "bf16")
    assert run.plan(*args).collectives[0].payload_bytes == 16 * 8 * (4 if float32 else 2)


def test_summing_in_float32_rounds_less():
    def step(w, x):
        return w, spmdctx.grad(lambda w: (x @ w).sum().astype(jnp.float32))(w)

    x = np.random.default_rng(0).normal(size=(64, 4)).astype(jnp.bfloat16)
    w = jnp.ones((4, 2), jnp.bfloat16)
    parts = [np.asarray(jax.grad(lambda w, x=x[8 * place : 8 * place + 8]: (x @ w).sum())(w), np.float64) for place in range(N)]
    exact = np.sum(parts, axis=0)
    run = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=False, batch_argnums=1)
    error = np.abs(np.asarray(run(w, x)[1], np.float64) - exact).max()
    assert error <= np.abs(exact).max() * 2**-8


def test_layerwise_parameters_are_split_and_not_reduced():
    def loss(params, x):
        return jnp.mean((x @ params["shared"] * params["own"].sum()) ** 2)

    def step(params, x):
        value, gradients = spmdctx.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    params = {"own": jnp.arange(16.0) + 1, "shared": jnp.ones((3, 2))}
    run = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=False, layerwise_parallel=["*/own"])
    after, _ = run(params, x)
    want = []
    for place in range(N):
        own = {"own": params["own"][2 * place : 2 * place + 2], "shared": params["shared"]}
        want.append(jax.grad(loss)(own, x[2 * place : 2 * place + 2]))
    np.testing.assert_allclose(after["own"], params["own"] - np.concatenate([one["own"] for one in want]), rtol=1e-5)
    np.testing.assert_allclose(after["shared"], params["shared"] - sum(one["shared"] for one in want), rtol=1e-5)
    assert after["own"].sharding.spec[0] == "data"
    assert [row.payload_bytes for row in run.plan(params, x).collectives] == [24, 4]


def test_layerwise_is_metadata_of_a_variable_too():
    class Module(nnx.Module):
        def __init__(self):
            self.own = nnx.Param(jnp.arange(8.0) + 1, layerwise_parallel=True)
            self.shared = nnx.Param(jnp.ones((3, 2)))

    def step(model, x):
        _, gradients = spmdctx.value_and_grad(lambda model, x: jnp.mean(x @ model.shared[...] * model.own[...].sum()))(model, x)
        return gradients

    run = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=False)
    gradients = run(Module(), np.ones((8, 3), np.float32))
    np.testing.assert_allclose(gradients["own"][...], np.full(8, 3.0))


def test_a_layerwise_parameter_must_divide():
    def step(w, x):
        return w - spmdctx.grad(lambda w: jnp.mean(x @ w))(w)

    with pytest.raises(StrategyError, match="dimension 0 of 'w' over 8 devices, but its size 3"):
        spmdctx.plan(step, jnp.ones((3, 2)), np.ones((8, 3)), parallel_mode="data_parallel", layerwise_parallel=["w"])

"""Modules of steps whose losses each device computes by itself: `spmdctx.value_and_grad` in data_parallel and hybrid_parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import spmdctx
from spmdctx.errors import UnsupportedError
from tests.step.export.exported import as_pytrees, bits, collectives, loaded
from tests.step.export.test_export import CHAIN, HALF, PARAMS, X, branching, chain, half, scanned

MEAN = {"parallel_mode": "data_parallel", "gradients_mean": True}


def descending(loss):
    def made(value_and_grad):
        def step(params, x):
            value, grads = value_and_grad(loss)(params, x)
            return jax.tree.map(lambda old, new: (old - 0.1 * new).astype(old.dtype), params, grads), value

        return step

    return made


def with_aux(value_and_grad):
    def step(params, x):
        def loss(params, x):
            return chain(params, x), {"rows": x @ params["w0"], "count": 3, "most": jnp.max(x)}

        (value, aux), grads = value_and_grad(loss, has_aux=True)(params, x)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value, aux

    return step


def in_a_loop(value_and_grad):
    def step(params, x):
        def body(params, _):
            value, grads = value_and_grad(chain)(params, x)
            return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value

        return lax.scan(body, params, None, length=3)

    return step


def twice(value_and_grad):
    step = descending(chain)(value_and_grad)

    @jax.jit
    def both(params, x):
        params, first = step(params, x)
        params, second = step(params, 2 * x)
        return params, first + second

    return both


def seeded(params, x):
    """Numbers, a key and arrays that the loss makes or closes over."""
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape[-1:])
    return jnp.mean(jnp.where(kept, x @ params["w0"] * jnp.arange(64.0), -jnp.inf).max(-1) ** 2) + 1.5


def convolving(params, x):
    kernel = params["w0"][:9, :4].reshape(3, 3, 1, 4)
    y = lax.conv_general_dilated(x.reshape(-1, 8, 8, 1), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


@pytest.mark.filterwarnings("ignore:gradients are summed", "ignore:Buckets")
@pytest.mark.parametrize(
    ("made", "params", "options"),
    [
        pytest.param(descending(chain), CHAIN, {"gradients_mean": False}, id="sums"),
        pytest.param(descending(scanned), PARAMS, {}, id="scan-remat"),
        pytest.param(descending(branching), PARAMS, {"parallel_mode": "hybrid_parallel"}, id="branches"),
        pytest.param(descending(half), HALF, {"gradient_fp32_sync": True}, id="widened"),
        pytest.param(descending(chain), CHAIN, {"all_reduce_fusion_config": [1, 2]}, id="buckets"),
        pytest.param(descending(chain), CHAIN, {"enable_parallel_optimizer": True, "grad_accumulation_step": 2}, id="micro-optimizer"),
        pytest.param(descending(seeded), CHAIN, {}, id="keys-consts"),
        pytest.param(descending(convolving), CHAIN, {}, id="windows"),
        pytest.param(with_aux, CHAIN, {}, id="aux"),
        pytest.param(in_a_loop, CHAIN, {}, id="loop"),
        pytest.param(twice, CHAIN, {}, id="two"),
    ],
)
def test_local_losses_compile_and_compute_the_same_with_the_gradients_of_jax(tmp_path, made, params, options):
    split = spmdctx.parallel(made(spmdctx.value_and_grad), **{**MEAN, **options})
    plan = split.plan(params, X)
    plan.export("jax", tmp_path / "m.py")
    exported = loaded(tmp_path / "m.py")["parallel"](made(jax.value_and_grad))
    own = collectives(split.lower(params, X).compile(), plan)
    assert collectives(exported.lower(params, X).compile(), plan) == own
    assert sum(own.values())
    jax.tree.map(np.testing.assert_array_equal, exported(params, X), split(params, X))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.norm = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return jnp.mean(self.dropout(self.norm(nnx.gelu(self.layer(x)))) ** 2)


def test_a_local_loss_of_an_nnx_model_keeps_its_statistics_and_keys(tmp_path):
    def made(value_and_grad):
        def step(model, optimizer, x):
            value, grads = value_and_grad(lambda model: model(x))(model)
            optimizer.update(model, grads)
            return value

        return step

    model = Model(nnx.Rngs(0))
    args = (model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), X)
    split = spmdctx.parallel(made(spmdctx.value_and_grad), **MEAN)
    plan = split.plan(*args)
    plan.export("jax", tmp_path / "m.py")
    functional, given = as_pytrees(made(nnx.value_and_grad), args, 2)
    exported = loaded(tmp_path / "m.py")["parallel"](functional)
    assert collectives(exported.lower(*given).compile(), plan) == collectives(split.lower(*args).compile(), plan)
    found, wanted = exported(*given), split(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves((nnx.state(args[:2]), wanted)), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_numbers_outside_of_a_local_loss_may_change_and_those_inside_are_checked(tmp_path):
    def step(rate, scale):
        def made(params, x):
            value, grads = jax.value_and_grad(lambda params: scale * chain(params, x))(params)
            return jax.tree.map(lambda old, new: old - rate * new, params, grads), value

        return made

    def own(params, x):
        value, grads = spmdctx.value_and_grad(lambda params: 2.0 * chain(params, x))(params)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value

    spmdctx.parallel(own, **MEAN).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    module = loaded(tmp_path / "m.py")
    still, value = module["parallel"](step(0.0, 2.0))(CHAIN, X)
    np.testing.assert_array_equal(still["w0"], CHAIN["w0"])
    np.testing.assert_allclose(value, 2 * chain(CHAIN, X), rtol=1e-5)
    with pytest.raises(ValueError, match="a number in a loss"):
        module["parallel"](step(0.1, 3.0))(CHAIN, X)
    assert "jax.value_and_grad" in module["__doc__"]


def test_losses_that_no_module_can_hold_are_named(tmp_path):
    split = spmdctx.parallel(descending(chain)(spmdctx.value_and_grad), parallel_mode="semi_auto_parallel", grad_accumulation_step=2)
    with pytest.raises(UnsupportedError, match="micro-batches of a loss of the whole batch"):
        split.plan(CHAIN, X).export("jax", tmp_path / "m.py")

    def step(params, x):
        grads = spmdctx.grad(chain)(params, x)
        decay = spmdctx.grad(lambda params: sum(jnp.sum(one**2) for one in params.values()))(params)
        return jax.tree.map(lambda old, new, own: old - 0.1 * (new + own), params, grads, decay)

    with pytest.raises(UnsupportedError, match="one reads nothing of the batch"):
        spmdctx.parallel(step, **MEAN).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    assert not (tmp_path / "m.py").exists()

"""Drop-ins of value_and_grad and grad: those of JAX and nnx, where no option of the context changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx

X = np.arange(16.0, dtype=np.float32).reshape(8, 2)


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def loss_with_aux(w, x):
    return loss(w, x), x.shape


def module_loss(module, x):
    return jnp.mean(module(x) ** 2)


def test_gradients_of_arrays_are_those_of_jax():
    w = jnp.ones(2)
    value, gradient = spmdctx.value_and_grad(loss)(w, X)
    np.testing.assert_array_equal(value, loss(w, X))
    np.testing.assert_array_equal(gradient, jax.grad(loss)(w, X))
    np.testing.assert_array_equal(spmdctx.grad(loss, argnums=1)(w, X), jax.grad(loss, argnums=1)(w, X))


def test_auxiliary_values_come_through():
    (_, aux), _ = spmdctx.value_and_grad(loss_with_aux, has_aux=True)(jnp.ones(2), X)
    assert aux == (8, 2)


def test_options_of_jax_pass_through():
    gradient = spmdctx.grad(lambda n: (2 * n).astype(jnp.float32), allow_int=True)(jnp.int32(3))
    assert gradient.dtype == jax.dtypes.float0


@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.Param)])
def test_gradients_of_nnx_objects_are_those_of_nnx(argnums):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    value, gradients = spmdctx.value_and_grad(module_loss, argnums=argnums)(module, X)
    np.testing.assert_array_equal(value, module_loss(module, X))
    np.testing.assert_array_equal(gradients["kernel"][...], nnx.grad(module_loss)(module, X)["kernel"][...])


def test_eager_calls_and_steps_of_one_device_are_those_of_jax():
    np.testing.assert_array_equal(spmdctx.grad(loss)(jnp.ones(2), X), jax.grad(loss)(jnp.ones(2), X))
    step = spmdctx.parallel(lambda w, x: w - spmdctx.grad(loss)(w, x), parallel_mode="stand_alone")
    np.testing.assert_allclose(step(jnp.ones(2), X), jnp.ones(2) - jax.grad(loss)(jnp.ones(2), X), rtol=1e-6)

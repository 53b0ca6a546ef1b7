"""Values move by their rounding error: by a share of themselves, and below the normal numbers of a narrow type by its least spacing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.step.verify.noise.rounding import Noise


def moved(values, dtype, number):
    array = jnp.asarray(values, dtype)
    return np.asarray(Noise.sample(number, array.size, 1.0).moved(array, 1), np.float64), np.asarray(array, np.float64)


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn"])
def test_a_value_below_the_normal_ones_may_round_to_zero_and_never_turns(dtype):
    least = float(jnp.finfo(dtype).smallest_subnormal)
    found = np.stack([moved([least, -least, 0.0, 2 * least], dtype, number)[0] for number in range(20)])
    assert set(found[:, 0]) == {0.0, 2 * least}
    assert set(found[:, 1]) == {0.0, -2 * least}
    assert set(found[:, 2]) == {0.0}
    assert set(found[:, 3]) == {least, 3 * least}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_normal_value_moves_by_its_spacing(dtype):
    given = [1.5, -3e-3, 1e-4]
    for number in range(5):
        found, before = moved(given, dtype, number)
        step = np.abs(found - before) / np.abs(before)
        assert np.all((step > 0) & (step <= 2 * float(jnp.finfo(dtype).eps)))


def test_a_second_moment_that_underflows_is_no_fault():
    """Adam's division by a root that float16 keeps, or rounds to zero, is finite in one program and infinite in another."""

    def step(params, mu, nu, x):
        gradient = jax.grad(lambda params: jnp.sum((x @ params).astype(jnp.float32)))(params)
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
        return params - 0.001 * mu / (jnp.sqrt(nu) + jnp.float16(1e-8)), mu, nu

    sizes = np.exp(np.linspace(np.log(2e-5), np.log(2e-3), 64))
    x = np.broadcast_to(sizes, (16, 64)).astype(np.float16) / 16
    zeros = jnp.zeros((64, 4), jnp.float16)
    args = (jnp.ones((64, 4), jnp.float16), zeros, zeros, jnp.asarray(x))
    for mode in ("data_parallel", "auto_parallel"):
        assert spmdctx.parallel(step, parallel_mode=mode, batch_argnums=3).verify(*args).ok

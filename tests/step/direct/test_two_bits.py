"""Integers of two bits between CPU devices, at which XLA ends the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx

WEIGHTS = jnp.ones((64, 8), jnp.int2)
LEVEL3 = {
    "parallel_mode": "data_parallel",
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"optimizer_level": "level3", "parallel_optimizer_threshold": 0},
}


def step(weights, x):
    return weights, jnp.sum(x @ weights.astype(x.dtype))


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_a_step_that_moves_them_is_refused_with_its_line(dtype):
    parallel = spmdctx.parallel(step, **LEVEL3)
    weights = WEIGHTS.astype(dtype)
    assert parallel.audit(weights, jnp.ones((8, 64))).ok
    with pytest.raises(spmdctx.UnsupportedError, match=f"moves {dtype} between CPU devices") as error:
        parallel(weights, jnp.ones((8, 64)))
    assert "all_gather over data" in str(error.value)


@pytest.mark.parametrize(("dtype", "options"), [("int2", {"parallel_mode": "data_parallel"}), ("int4", LEVEL3)])
def test_others_run(dtype, options):
    weights, x = WEIGHTS.astype(dtype), jnp.arange(512.0).reshape(8, 64)
    kept, total = spmdctx.parallel(step, **options)(weights, x)
    assert kept.dtype == dtype
    np.testing.assert_allclose(total, jax.jit(step)(weights, x)[1], rtol=1e-6)

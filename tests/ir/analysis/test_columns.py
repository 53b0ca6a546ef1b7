"""Programs as arrays."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx


@pytest.mark.parametrize(("size", "fits"), [(2**29, True), (2**30, False)])
def test_a_tensor_beyond_64_bits_is_refused_by_its_shape(size, fits):
    shape = jax.ShapeDtypeStruct((size,), jnp.float32)

    def plan():
        return spmdctx.plan(lambda x: jnp.sum(x[:, None] * x), shape, parallel_mode="stand_alone", topology="cpu")

    if fits:
        assert plan().mesh == {"data": 1}
        return
    with pytest.raises(spmdctx.UnsupportedError, match="more than 2\\*\\*60 bytes") as error:
        plan()
    assert f"[{size}, {size}]" in str(error.value)

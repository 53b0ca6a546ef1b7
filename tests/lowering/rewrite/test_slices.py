"""A dynamic slice beyond the end gives the same numbers when its blocks are cut out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.road import ops, run, trace

X = jnp.arange(32.0).reshape(16, 2)


def looped(x, start):
    return jax.lax.scan(lambda carry, row: (carry + row, jax.lax.dynamic_slice_in_dim(x, start, 4)), start, jnp.arange(3))[1]


@pytest.mark.parametrize("start", [14, 100, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, 4),
        lambda x, start: jnp.sin(jax.lax.dynamic_slice(x, (start, start), (8, 1))),
        lambda x, start: jax.lax.dynamic_slice_in_dim(x, start.astype(jnp.uint8), 4) * 2,
        looped,
    ],
    ids=["a result", "two starts", "narrow", "in a loop"],
)
def test_blocks_of_a_slice_beyond_the_end_are_of_that_slice(function, start):
    (cut,) = ops(trace(function, X, start := jnp.int32(start)), "dynamic_slice")
    run(function, X, start, pins={cut: (("data",), ())}).check()


@pytest.mark.parametrize("start", [14, 3])
def test_a_slice_of_a_slice_beyond_the_end_is_of_that_slice(start):
    def twice(x, start):
        return jax.lax.dynamic_slice_in_dim(jax.lax.dynamic_slice_in_dim(x, start, 8), start, 4)

    *_, last = ops(trace(twice, X, start := jnp.int32(start)), "dynamic_slice")
    found = run(twice, X, start, pins={last: (("data",), ())})
    first = min(int(start), 8) + min(int(start), 4)
    np.testing.assert_array_equal(found.got[0], X[first : first + 4])

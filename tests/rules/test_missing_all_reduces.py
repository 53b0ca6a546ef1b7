"""Reductions for which XLA has no all-reduce: what they reduce stays whole, in every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from benchmarks.split_checks import FREE_LINKS

NUMBERS = np.random.RandomState(0).randint(0, 7, (16, 8))
COMPLEX = jnp.asarray(NUMBERS + 1j * NUMBERS.T.reshape(16, 8), jnp.complex64)
INTEGERS = jnp.asarray(NUMBERS, jnp.int32)
ROWS = jnp.asarray(NUMBERS[:, 0])

STEPS = {
    "the smallest complex number": (lambda x: lax.reduce_min_p.bind(x, axes=(0,), out_sharding=None), COMPLEX),
    "the largest complex number": (lambda x: lax.reduce_max_p.bind(x, axes=(0, 1), out_sharding=None), COMPLEX),
    "the bits that all have": (lambda x: lax.reduce_and_p.bind(x, axes=(0,)), INTEGERS),
    "the bits that one has": (lambda x: lax.reduce_or_p.bind(x, axes=(1,)), INTEGERS.astype(jnp.uint8)),
    "a reducer that is one equation": (lambda x: lax.reduce(x, np.int32(-1), lax.bitwise_and, (0,)), INTEGERS),
    "rows of complex numbers, the largest kept": (lambda x: jnp.zeros((7, 8), x.dtype).at[ROWS].max(x), COMPLEX),
    "a sum of complex numbers": (lambda x: x.sum(), COMPLEX),
    "whether all hold": (lambda x: (x > 0).all(), INTEGERS),
    "a parity": (lambda x: lax.reduce_xor(x, axes=(0,)), INTEGERS),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("search_mode", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
def test_a_reduction_compiles_whatever_its_types(name, search_mode):
    fn, x = STEPS[name]
    options = {"parallel_mode": "auto_parallel", "search_mode": search_mode, "topology": FREE_LINKS, "dataset_strategy": "data_parallel"}
    found = spmdctx.parallel(fn, device_num=8, batch_argnums=0, **options)(x)
    np.testing.assert_allclose(found, jax.jit(fn)(x), rtol=1e-5)


@pytest.mark.parametrize("name", ["a sum of complex numbers", "whether all hold"])
def test_a_reduction_that_there_is_stays_split(name):
    fn, x = STEPS[name]
    options = {"parallel_mode": "auto_parallel", "topology": FREE_LINKS, "dataset_strategy": "data_parallel"}
    plan = spmdctx.parallel(fn, device_num=8, batch_argnums=0, **options).plan(x)
    assert "all_reduce" in [row.kind for row in plan.collectives]

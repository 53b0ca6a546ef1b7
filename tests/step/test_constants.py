"""Steps of little more than constants: no arguments, no ops, results that are literals. They run in every mode as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx

MODES = [
    {"parallel_mode": "data_parallel"},
    {"parallel_mode": "semi_auto_parallel"},
    {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"},
    {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"},
    {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming"},
]
X = jnp.arange(128.0).reshape(16, 8)
W = {"w": X, "scale": jnp.float32(3)}

STEPS = {
    "iota": (lambda: lax.iota("int32", 16),),
    "sum of ones": (lambda: jnp.ones(3).sum(),),
    "product of ones": (lambda: jnp.ones((8, 8)) @ jnp.ones((8, 8)),),
    "random bits": (lambda: jax.random.normal(jax.random.key(0), (16, 16)),),
    "a key": (lambda: jax.random.split(jax.random.key(3), 4),),
    "constant array": (lambda: jnp.asarray(np.arange(16.0)) * 2,),
    "loop": (lambda: lax.scan(lambda c, i: (c + i, c), 0.0, jnp.arange(8.0)),),
    "nothing": (lambda x: None, X),
    "the argument": (lambda x: (x, x), X),
    "literal": (lambda: 3.0,),
    "literals of all types": (lambda x: (1.0, 2, True, {"a": 4.0}), X),
    "gradient of a comparison": (jax.grad(lambda x: jnp.where(x > 1.0, 1.0, 0.0)), 2.0),
    "gradient of floor": (jax.grad(lambda x: jnp.sum(jnp.floor(x))), X),
    "gradient of nothing": (jax.value_and_grad(lambda x: jnp.sum(lax.stop_gradient(x))), X),
    "literal in the place of state": (lambda p, x: ({"w": p["w"] - x.mean(), "scale": 1.0}, 0.0), W, X),
    "literals in the place of bare state": (lambda w, x: (0.0, x), 1.0, X),
    "literals out of a loop": (lambda x: lax.scan(lambda c, i: (1.0, (2.0, i)), 0.0, x), X),
    "literals out of branches": (lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0), X),
    "literals out of a remat": (jax.checkpoint(lambda x: (x.sum(), 3.0)), X),
}


def _numbers(tree):
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in map(jnp.asarray, jax.tree.leaves(tree))]
    return [np.asarray(jax.random.key_data(leaf) if own else leaf) for leaf, own in zip(jax.tree.leaves(tree), is_key, strict=True)]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_steps_of_constants_run_as_on_one_device(mode):
    for name, (function, *args) in STEPS.items():
        step = spmdctx.parallel(function, device_num=8, **mode)
        got, want = step(*args), jax.jit(function)(*args)
        assert jax.tree.structure(got) == jax.tree.structure(want), name
        for own, one in zip(_numbers(got), _numbers(want), strict=True):
            assert own.dtype == one.dtype, name
            np.testing.assert_allclose(own, one, rtol=1e-6, err_msg=name)
        assert step.audit(*args).ok, name


def _double(x):
    return x + x


GROWN = {
    "padded": lambda x: jnp.sin(lax.pad(x, 0.0, [(1, 3, 0), (1, 0, 0)])),
    "padded to the devices": lambda x: jnp.sin(lax.pad(x, 0.0, [(6, 0, 0), (7, 0, 0)])),
    "padded between": lambda x: jnp.sin(lax.pad(x, 0.0, [(0, 0, 7), (0, 15, 3)])),
    "repeated": lambda x: jnp.broadcast_to(x, (2, 16)) * 2,
    "joined": lambda x: jnp.concatenate([x] * 8, 1) * 2,
}


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("device_num", [2, 8])
def test_a_pinned_dimension_of_one_may_grow(name, device_num):
    x = jnp.arange(1.0, 3.0).reshape(2, 1)
    for mode in MODES[1:]:
        step = spmdctx.parallel(lambda x: GROWN[name](spmdctx.shard(_double, ((1, 1),))(x)), device_num=device_num, **mode)
        np.testing.assert_allclose(step(x), GROWN[name](_double(x)), rtol=1e-5)

"""parameter_broadcast: the values of device 0 on every device before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.step.broadcast import from_first_device

X = np.ones((8, 4), np.float32)


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def differing(values):
    """An array that JAX takes for replicated, with a value of its own on each device."""
    shards = [jax.device_put(value, device) for value, device in zip(values, jax.devices(), strict=True)]
    return jax.make_array_from_single_device_arrays(shards[0].shape, NamedSharding(mesh(), P()), shards)


def replicas(array):
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def step(params, x):
    return jax.tree.map(lambda leaf: leaf * 1, params), x.sum()


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_replicas_are_those_of_device_0_before_the_first_step(mode, broadcast):
    params = {"w": differing([np.full((4, 4), place, np.float32) for place in range(8)])}
    run = spmdctx.parallel(step, parallel_mode=mode, parameter_broadcast=broadcast)
    after, _ = run(params, X)
    assert [int(own[0, 0]) for own in replicas(after["w"])] == ([0] * 8 if broadcast else list(range(8)))
    run(params, X)
    assert int(replicas(params["w"])[7][0, 0]) == 7


def test_later_steps_are_left_alone():
    run = spmdctx.parallel(step, parallel_mode="data_parallel", parameter_broadcast=True)
    run({"w": jnp.zeros((4, 4))}, X)
    after, _ = run({"w": differing([np.full((4, 4), place, np.float32) for place in range(8)])}, X)
    assert int(replicas(after["w"])[7][0, 0]) == 7


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"], ids=lambda name: name
)
def test_every_bit_comes_over(dtype):
    rng = np.random.default_rng(0)
    size = jnp.dtype(dtype).itemsize
    patterns = [rng.integers(0, 256, (16, size), dtype=np.uint8).view(np.uint8) for _ in range(8)]
    values = [
        np.arange(16) % (place + 2) == 0 if dtype == "bool" else bits.view(jnp.dtype(dtype))[:, 0] for place, bits in enumerate(patterns)
    ]
    (got,) = from_first_device([differing(values)], mesh())
    for own in replicas(got):
        np.testing.assert_array_equal(own.view(np.uint8), values[0].view(np.uint8))


def test_keys_come_over():
    keys = [jax.device_put(jax.random.key(place), device) for place, device in enumerate(jax.devices())]
    array = jax.make_array_from_single_device_arrays((), NamedSharding(mesh(), P()), keys)
    (got,) = from_first_device([array], mesh())
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(jax.random.key_data(shard.data), jax.random.key_data(jax.random.key(0)))


def test_modules_keep_what_they_got():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model.kernel.set_raw_value(differing([np.full((4, 4), place, np.float32) for place in range(8)]))
    run = spmdctx.parallel(lambda model, x: model(x).sum(), parallel_mode="data_parallel", parameter_broadcast=True)
    run(model, X)
    assert [int(own[0, 0]) for own in replicas(model.kernel.get_raw_value())] == [0] * 8


def test_layerwise_parameters_stay_as_they_are():
    params = {"w": differing([np.full((8, 4), place, np.float32) for place in range(8)]), "own": jnp.arange(8.0)}
    run = spmdctx.parallel(step, parallel_mode="data_parallel", parameter_broadcast=True, layerwise_parallel=["*/w"])
    after, _ = run(params, X)
    assert {int(own[0, 0]) for own in replicas(after["w"])} != {0}
    reasons = {leaf.path: leaf.reason for leaf in run.plan(params, X).inputs}
    assert reasons["params/w"] == "layerwise_parallel: each device has its own"

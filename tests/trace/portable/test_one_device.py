"""What a step says of one device has no effect on several: it plans, costs and computes as without it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import spmdctx

MODES = ("auto_parallel", "semi_auto_parallel", "data_parallel")
MAXTEXT = (
    *("diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_autoregressive"),
    *("tensor", "tensor_transpose", "expert", "autoregressive", "sequence"),
)
W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (32, 16))


def mesh(*names, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names, axis_types=(kind,) * len(names))


ONE = mesh("data", "model")
ABSTRACT = AbstractMesh((1, 1), ("data", "model"))


def step(constrain, w, x):
    def loss(w):
        h = jnp.tanh(constrain(x @ w))
        return jnp.mean(constrain(h @ w.T) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def on(sharding):
    return lambda x: lax.with_sharding_constraint(x, sharding)


def mapped(body, spec=P("data", "model"), over=ONE, **options):
    return jax.shard_map(body, mesh=over, in_specs=(spec,), out_specs=spec, **options)


def plain(x):
    return x


def looped(x):
    def body(x):
        x, _ = lax.scan(lambda c, _: (lax.psum(c * 0.9, "model"), None), x, None, length=2)
        return lax.cond(lax.axis_index("data") == 0, lambda x: lax.psum(x, "model"), lambda x: x + 1, x)

    return mapped(body, check_vma=False)(x)


def collected(x):
    """Each collective over axes of one device, whole dimensions and new ones."""
    x = lax.psum(x, ("data", "model")) + lax.axis_index("model") - lax.stop_gradient(lax.pmin(lax.stop_gradient(x), "data") * 0)
    x = lax.all_gather(x, "data")[0] + lax.all_gather(x, ("data", "model"), tiled=True, axis=1)
    x = lax.ppermute(x, "model", [(0, 0)]) + lax.ppermute(x, "model", [])
    x = lax.psum_scatter(x[None], "data") + lax.psum_scatter(x, "model", tiled=True)
    return lax.all_to_all(lax.all_to_all(x, "data", 0, 1, tiled=True), "model", 1, 0, tiled=True) / 6


def collected_plainly(x):
    return 6 * x / 6


WRITTEN = {
    "whole": (on(NamedSharding(ONE, P())), plain),
    "split": (on(NamedSharding(ONE, P("data", "model"))), plain),
    "abstract mesh": (on(NamedSharding(ABSTRACT, P(("data", "model")))), plain),
    "free dims": (on(NamedSharding(ONE, P(P.UNCONSTRAINED, "model"))), plain),
    "single device": (on(SingleDeviceSharding(jax.devices()[0])), plain),
    "another device": (on(SingleDeviceSharding(jax.devices()[3])), plain),
    "device_put": (lambda x: jax.device_put(x, jax.devices()[0]), plain),
    "device_put to a mesh": (lambda x: jax.device_put(x, NamedSharding(ONE, P("data"))), plain),
    "jit": (jax.jit(lambda x: x * 2, in_shardings=NamedSharding(ONE, P("data")), out_shardings=NamedSharding(ONE, P())), lambda x: x * 2),
    "jit with an array": (jax.jit(lambda x: x + W[0], out_shardings=NamedSharding(ONE, P("model"))), lambda x: x + W[0]),
    "shard_map": (mapped(lambda x: x * 1.5), lambda x: x * 1.5),
    "shard_map of an abstract mesh": (mapped(jnp.tanh, over=ABSTRACT), jnp.tanh),
    "shard_map in one": (
        mapped(
            lambda x: jax.shard_map(
                lambda x: lax.psum(x, "model"), in_specs=P(None, "model"), out_specs=P(), axis_names={"model"}, check_vma=False
            )(x),
            P("data"),
            axis_names={"data"},
            check_vma=False,
        ),
        plain,
    ),
    "some axes": (mapped(lambda x: lax.psum(x, "data"), P("data"), axis_names={"data"}, check_vma=False), plain),
    "remat": (jax.checkpoint(lambda x: jnp.sin(on(NamedSharding(ONE, P()))(jnp.sin(x)))), lambda x: jnp.sin(jnp.sin(x))),
    "vmap": (jax.vmap(on(NamedSharding(ONE, P("data")))), plain),
}


def tests():
    for name, (constrain, free) in WRITTEN.items():
        yield pytest.param(constrain, free, id=name)
    yield pytest.param(looped, lambda x: x * 0.81, id="loops")
    yield pytest.param(mapped(collected, check_vma=False), collected_plainly, id="collectives")


@pytest.mark.parametrize(("constrain", "free"), list(tests()))
def test_the_plan_costs_what_it_costs_without(constrain, free):
    structs = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((8192, 4096), jnp.float32)]
    plans = [
        spmdctx.plan(partial(step, one), *structs, parallel_mode="auto_parallel", device_num=8, topology="tpu-v5p")
        for one in (constrain, free)
    ]
    assert plans[0].cost.total_s <= 1.02 * plans[1].cost.total_s

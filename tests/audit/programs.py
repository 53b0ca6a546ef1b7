"""Small programs whose collectives are known by hand, for any backend's devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdctx.ir.mesh import LogicalMesh

DATA = LogicalMesh.of({"data": 8})
DATA_MODEL = LogicalMesh.of({"data": 2, "model": 4})
LAYERS = 4


def named(devices, mesh):
    own = Mesh(np.array(devices[:8]).reshape(mesh.shape), mesh.names)
    return lambda *parts: NamedSharding(own, P(*parts))


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def compile_text(function, shardings, results, *arguments):
    return jax.jit(function, in_shardings=shardings, out_shardings=results).lower(*arguments).compile().as_text()


def data_parallel(devices, dtype="float32"):
    """Gradients [256, 128] and [128, 256] of two weights and a float32 loss, each summed over data."""
    at = named(devices, DATA)

    def step(first, second, batch):
        def loss(first, second):
            return jnp.sum(jnp.tanh(jnp.tanh(batch @ first) @ second).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(first, second)
        return value, gradients

    arguments = (shape(256, 128, dtype=dtype), shape(128, 256, dtype=dtype), shape(64, 256, dtype=dtype))
    return compile_text(step, (at(), at(), at("data")), (at(), (at(), at())), *arguments)


def megatron(devices):
    """Forward and backward of a [256, 1024] x [1024, 256] pair split over model; the batch of 64 over data.

    Over model: activations [32, 256] forward, and their cotangent [32, 256] backward. Over data: the loss, and each
    weight's gradient, [256, 256] on a device.
    """
    at = named(devices, DATA_MODEL)

    def step(first, second, batch):
        def loss(first, second, batch):
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch @ first), at("data", "model"))
            return jnp.sum(jax.lax.with_sharding_constraint(hidden @ second, at("data")) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(first, second, batch)

    split = (at(None, "model"), at("model"), at("data"))
    return compile_text(step, split, (at(), split), shape(256, 1024), shape(1024, 256), shape(64, 256))


def sharded_weights(devices):
    """Two [256, 256] weights stored split over data, gathered at their use; gradients stored split too."""
    at = named(devices, DATA)

    def step(weights, batch):
        def loss(weights):
            whole = [jax.lax.with_sharding_constraint(one, at()) for one in weights]
            return jnp.sum(jnp.tanh(jnp.tanh(batch @ whole[0]) @ whole[1]) ** 2)

        return jax.grad(loss)(weights)

    stored = [at("data"), at("data")]
    return compile_text(step, (stored, at("data")), stored, [shape(256, 256)] * 2, shape(256, 256))


def nested_scans(devices):
    """An all_reduce of [32, 256] over model in a scan of 3 in a scan of 5."""
    at = named(devices, DATA_MODEL)

    def forward(first, second, batch):
        def inner(batch, _):
            hidden = jax.lax.with_sharding_constraint(batch @ first, at("data", "model"))
            return jax.lax.with_sharding_constraint(jnp.tanh(hidden @ second), at("data")), None

        def outer(batch, _):
            return jnp.sin(jax.lax.scan(inner, batch, None, length=3)[0]), None

        return jax.lax.scan(outer, batch, None, length=5)[0]

    split = (at(None, "model"), at("model"), at("data"))
    return compile_text(forward, split, at("data"), shape(256, 512), shape(512, 256), shape(64, 256))


def accumulated(devices):
    """The gradient [256, 256] of one weight, summed over 4 micro-batches in a scan."""
    at = named(devices, DATA)

    def step(weight, batches):
        def body(total, batch):
            return total + jax.grad(lambda one: jnp.sum(jnp.tanh(batch @ one) ** 2))(weight), None

        return jax.lax.scan(body, jnp.zeros_like(weight), batches)[0]

    return compile_text(step, (at(), at(None, "data")), at(), shape(256, 256), shape(4, 64, 256))


def three_projections(devices):
    """Backward of three [256, 512] projections of one input, split over model: three terms of one cotangent [32, 256]."""
    at = named(devices, DATA_MODEL)

    def backward(first, second, third, batch):
        def loss(batch):
            outs = [jax.lax.with_sharding_constraint(jnp.tanh(batch @ one), at("data", "model")) for one in (first, second, third)]
            return jnp.sum(outs[0] * outs[1] + outs[2])

        return jax.grad(loss)(batch)

    weights = (at(None, "model"),) * 3
    return compile_text(backward, (*weights, at("data")), at("data"), *[shape(256, 512)] * 3, shape(64, 256))


def branch_and_while(devices):
    """An all_reduce of [32, 256] over model in one branch, and one in a loop whose length is data."""
    at = named(devices, DATA_MODEL)

    def forward(first, second, batch, count):
        def layer(batch):
            hidden = jax.lax.with_sharding_constraint(batch @ first, at("data", "model"))
            return jax.lax.with_sharding_constraint(jnp.tanh(hidden @ second), at("data"))

        batch = jax.lax.cond(count > 3, layer, jnp.sin, batch)
        return jax.lax.while_loop(lambda state: state[0] < count, lambda state: (state[0] + 1, layer(state[1])), (0, batch))[1]

    split = (at(None, "model"), at("model"), at("data"), at())
    return compile_text(forward, split, at("data"), shape(256, 512), shape(512, 256), shape(64, 256), shape(dtype="int32"))


def moved_dimension(devices):
    """[64, 128] split over data moves from dimension 0 to dimension 1, and back over model's neighbour axis order."""
    at = named(devices, DATA)

    def forward(batch):
        return jnp.sin(jax.lax.with_sharding_constraint(batch, at(None, "data")))

    return compile_text(forward, at("data"), at(None, "data"), shape(64, 128))

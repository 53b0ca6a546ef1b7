"""Steps over small networks, cut for servers that run in the process of the test."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdctx

SIZES = {"w1": (8, 16), "w2": (16, 16), "w3": (16, 4), "bias": (4,), "scale": ()}


def parameters(dtype=float):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape) / 4, dtype) for name, shape in SIZES.items()}


def batch(number=0, size=12):
    rng = np.random.default_rng(100 + number)
    return jnp.asarray(rng.normal(size=(size, 8))), jnp.asarray(rng.normal(size=(size, 4)))


def loss(params, x, y):
    hidden = jnp.tanh(jnp.tanh(x @ params["w1"]) @ params["w2"])
    return jnp.mean((params["scale"] * hidden @ params["w3"] + params["bias"] - y) ** 2)


def step_of(tx):
    def step(state, given):
        params, own = state
        value, grads = spmdctx.value_and_grad(loss)(params, *given)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), {"loss": value, "norm": optax.tree.norm(grads)}

    return step


def state_of(tx):
    params = parameters()
    return params, tx.init(params)


def served(fn, num_servers, num_parts, **options):
    """A step whose state would lie on servers."""
    spmdctx.set_ps_context(enable_ps=True, num_servers=num_servers)
    return spmdctx.parallel(fn, parallel_mode="stand_alone", grad_accumulation_step=num_parts, **options)


def largest_difference(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(own) - np.asarray(other)).max(initial=0)) for own, other in pairs)

"""A small step for a pipeline: few leaves, so that little is compiled."""

import jax
import jax.numpy as jnp
import optax

import spmdctx

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.scale(-0.1))
MICRO = 4


def loss(params, batch):
    """A mean of squares; the first weight is read at both ends if there is no last one, and stacked layers are scanned."""
    x = batch["x"] @ params["first"]
    if isinstance(params["layers"], list):
        for weight in params["layers"]:
            x = x + jnp.tanh(x @ weight)
    else:
        x, _ = jax.lax.scan(lambda x, weight: (x + jnp.tanh(x @ weight), None), x, params["layers"])
    last = params["last"] if "last" in params else params["first"].T
    return jnp.mean((x @ last - batch["y"]) ** 2)


def step(params, state, batch):
    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=MICRO))(params, batch)
    update, state = TX.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


def state_of(num_layers=2, width=16, *, tied=True, stacked=False):
    keys = jax.random.split(jax.random.key(0), num_layers + 2)
    first, last, *layers = (jax.random.normal(key, (width, width)) / width**0.5 for key in keys)
    params = {"first": first, "layers": jnp.stack(layers) if stacked else layers} | ({} if tied else {"last": last})
    return params, TX.init(params)


def batch_of(rows=16, width=16):
    x, y = (jax.random.normal(jax.random.key(seed), (rows, width)) for seed in (1, 2))
    return {"x": x, "y": y}


def parallel(stages=2, **options):
    return spmdctx.parallel(step, **{"parallel_mode": "auto_parallel", "pipeline_stages": stages, **options})

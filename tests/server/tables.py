"""A recommender of three tables and a dense tower, whose ids come from several features and repeat inside a batch."""

import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdctx
from spmdctx.server.initial import server_init, server_table

ROWS = {"deep": (2000, 4), "wide": (2000,), "user": (1501, 3)}
OPTIMIZERS = {
    "clip and adagrad": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.1)),
    "momentum": lambda: optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "clip and adamw": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))),
}


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    tables = {name: server_table(shape, jnp.float64, init=jax.random.normal, key=next(keys)) for name, shape in ROWS.items()}
    return {**tables, "w1": jax.random.normal(next(keys), (15, 8)) / 4, "w2": jax.random.normal(next(keys), (8,)) / 3}


def loss(params, items, users, labels):
    deep = jnp.take(params["deep"], items, axis=0).reshape(len(items), -1)
    hidden = jnp.tanh(jnp.concatenate([deep, params["user"][users]], 1) @ params["w1"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(hidden @ params["w2"] + params["wide"][items].sum(1), labels))


def step_of(optimizer, loss=loss):
    def step(state, batch):
        params, own = state
        value, gradients = spmdctx.value_and_grad(loss)(params, *batch)
        updates, own = optimizer.update(gradients, own, params)
        return (optax.apply_updates(params, updates), own), value

    return step


def batch(number, size=12):
    own = np.random.default_rng(1000 + number)
    return own.zipf(1.3, (size, 3)) % 2000, own.integers(-1501, 1501, size), own.integers(0, 2, size).astype(float)


def main():
    """Trains as a worker of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    steps = parser.parse_args().steps
    jax.config.update("jax_enable_x64", True)
    run, state = made()
    for number in range(steps):
        state, value = run(state, batch(number))
        print("STEP", number, float(value).hex(), flush=True)
    print("STATE", digest(state), flush=True)


def made():
    optimizer = optax.adam(1e-2)
    params = parameters()
    return spmdctx.parallel(step_of(optimizer), parallel_mode="stand_alone"), (params, server_init(optimizer.init, params))


def digest(state):
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


if __name__ == "__main__":
    main()

"""Small steps whose weights are split by hand in semi_auto_parallel, with Adam, so that what a plan is is known beforehand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import spmdctx

ROWS, SEQ, WIDTH, HIDDEN, HEADS, EXPERTS, VOCAB = 16, 32, 64, 128, 8, 8, 512
OPTIMIZER = optax.adam(1e-3)


def shaped(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def trained(loss, parameters, batch, pins=None, **options):
    """The plan of a step of Adam; `pins` constrains parameters by their paths, by tuples of mesh axes."""

    def step(state, batch):
        parameters, moments = state
        if pins:
            parameters = {
                name: jax.lax.with_sharding_constraint(one, jax.P(*pins.get(name, ()))) if name in pins else one
                for name, one in parameters.items()
            }
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    state = parameters, jax.eval_shape(OPTIMIZER.init, parameters)
    return spmdctx.parallel(step, **{"device_num": 8, **options}).plan(state, batch)


def shard(fn, *strategy):
    return fn if not strategy or strategy[0] is None else spmdctx.shard(fn, in_strategy=tuple(strategy))


MLP = {"up": shaped(WIDTH, HIDDEN), "down": shaped(HIDDEN, WIDTH)}
MLP_BATCH = {"x": shaped(ROWS, SEQ, WIDTH), "y": shaped(ROWS, SEQ, WIDTH)}


def mlp_loss(up=None, down=None):
    """A layer of two products, whose operands are split as `up` and `down` say."""
    first, second = shard(jnp.matmul, *(up or ())), shard(jnp.matmul, *(down or ()))

    def loss(parameters, batch):
        hidden = jax.nn.gelu(first(batch["x"], parameters["up"]))
        return jnp.mean((second(hidden, parameters["down"]) - batch["y"]) ** 2)

    return loss


LANGUAGE = {"embedding": shaped(VOCAB, WIDTH), **MLP, "lm_head": shaped(WIDTH, VOCAB)}
TOKENS = {"x": shaped(ROWS, SEQ, dtype=jnp.int32), "y": shaped(ROWS, SEQ, dtype=jnp.int32)}


def language_loss(table=None, up=None, down=None, head=None):
    look, first, second, last = (
        shard(lambda table, ids: table[ids], *(table or ())),
        *(shard(jnp.matmul, *(one or ())) for one in (up, down, head)),
    )

    def loss(parameters, batch):
        x = look(parameters["embedding"], batch["x"])
        x = x + second(jax.nn.gelu(first(x, parameters["up"])), parameters["down"])
        logits = last(x, parameters["lm_head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss


ATTENTION = {
    "q_proj": shaped(WIDTH, HEADS, WIDTH // HEADS),
    "k_proj": shaped(WIDTH, HEADS, WIDTH // HEADS),
    "v_proj": shaped(WIDTH, HEADS, WIDTH // HEADS),
    "o_proj": shaped(HEADS, WIDTH // HEADS, WIDTH),
}


def attention_loss(inward=None, outward=None):
    project = shard(lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w), *(inward or ()))
    join = shard(lambda x, w: jnp.einsum("bshk,hkd->bsd", x, w), *(outward or ()))

    def loss(parameters, batch):
        q, k, v = (project(batch["x"], parameters[name]) for name in ("q_proj", "k_proj", "v_proj"))
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        return jnp.mean((join(jnp.einsum("bhqs,bshk->bqhk", weights, v), parameters["o_proj"]) - batch["y"]) ** 2)

    return loss


MOE = {"router": shaped(WIDTH, EXPERTS), "experts_up": shaped(EXPERTS, WIDTH, HIDDEN), "experts_down": shaped(EXPERTS, HIDDEN, WIDTH)}


def moe_loss(up=None, down=None):
    first, second = (shard(lambda x, w: jnp.einsum("ebd,edf->ebf", x, w), *(one or ())) for one in (up, down))

    def loss(parameters, batch):
        x = batch["x"].reshape(-1, WIDTH)
        gates = jax.nn.softmax(x @ parameters["router"])
        inside = jnp.einsum("te,td->etd", gates, x)
        made = second(jax.nn.gelu(first(inside, parameters["experts_up"])), parameters["experts_down"])
        return jnp.mean((made.sum(0).reshape(batch["y"].shape) - batch["y"]) ** 2)

    return loss


CONVOLUTION = {"stem": shaped(3, 3, 16, 32), "deep": shaped(3, 3, 32, 32), "classifier": shaped(32, 16)}
IMAGES = {"x": shaped(ROWS, 16, 16, 16), "y": shaped(ROWS, 16)}


def convolution_loss(stem=None, deep=None):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    first, second = shard(convolve, *(stem or ())), shard(convolve, *(deep or ()))

    def loss(parameters, batch):
        x = jax.nn.relu(second(jax.nn.relu(first(batch["x"], parameters["stem"])), parameters["deep"]))
        return jnp.mean((x.mean((1, 2)) @ parameters["classifier"] - batch["y"]) ** 2)

    return loss

"""Right training steps whose results rounding moves in many ways, for `benchmarks.verify_sweep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from flax.linen import fp8_ops
from flax.training import dynamic_scale
from jax.experimental import io_callback

import spmdctx
from spmdctx.models.presets import preset
from spmdctx.models.training import create, train_step
from tests.zoo import CASES, UNSPLIT

Step = Callable[..., Any]
Program = tuple[Step, tuple[Any, ...]]
BATCH, SEQ, WIDTH, HEADS, WORDS = 16, 16, 32, 4, 48

TYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adam": lambda: optax.adam(1e-3),
    "sgd": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-3),
    "factored": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "sign": lambda: optax.sign_sgd(1e-3),
    "bfloat16": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
}


def _numbers(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def _tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, (BATCH, SEQ)).astype(np.int32)


def _trained(loss: Step, params: Any, batch: tuple[Any, ...], optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    def step(state: Any, *batch: Any) -> Any:
        value, gradients = value_and_grad(loss)(state["params"], *batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    params = jax.tree.map(jnp.asarray, params)
    return step, ({"params": params, "optimizer": optimizer.init(params)}, *batch)


def _cross_entropy(logits: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.roll(tokens, -1, 1)).mean()


# Transformers


def haiku_like(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """A transformer over a dict of dicts, as dm-haiku makes: modules by path, `w` and `b`; pre-norm, biases everywhere."""
    layers = ("transformer/layer_0", "transformer/layer_1")
    params: dict[str, dict[str, np.ndarray]] = {"transformer/embed": {"embeddings": _numbers(WORDS, WIDTH, seed=1, size=0.02)}}
    params["transformer"] = {"positional_embeddings": _numbers(SEQ, WIDTH, seed=2, size=0.02)}
    for number, layer in enumerate(layers):
        shapes = dict.fromkeys(("query", "key", "value", "linear"), (WIDTH, WIDTH))
        names = {f"{layer}/attn/{name}": shape for name, shape in shapes.items()}
        names |= {f"{layer}/mlp/linear": (WIDTH, 4 * WIDTH), f"{layer}/mlp/linear_1": (4 * WIDTH, WIDTH)}
        for index, (name, shape) in enumerate(names.items()):
            weight = _numbers(*shape, seed=10 * number + index + 3, size=shape[0] ** -0.5)
            params[name] = {"w": weight, "b": np.zeros(shape[1], np.float32)}
        for name in ("layer_norm", "layer_norm_1"):
            params[f"{layer}/{name}"] = {"scale": np.ones(WIDTH, np.float32), "offset": np.zeros(WIDTH, np.float32)}

    def linear(params: Any, name: str, x: Any) -> Any:
        return x @ params[name]["w"].astype(dtype) + params[name]["b"].astype(dtype)

    def norm(params: Any, name: str, x: Any) -> Any:
        x = x.astype(jnp.float32)
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        scale, offset = params[name]["scale"], params[name]["offset"]
        return (scale * jax.lax.rsqrt(variance + 1e-5) * (x - mean) + offset).astype(dtype)

    def loss(params: Any, tokens: Any) -> Any:
        table = params["transformer/embed"]["embeddings"].astype(dtype)
        x = table[tokens] + params["transformer"]["positional_embeddings"].astype(dtype)
        mask = np.tril(np.ones((SEQ, SEQ), bool))
        for layer in layers:
            h = norm(params, f"{layer}/layer_norm", x)
            query, key, value = (
                linear(params, f"{layer}/attn/{name}", h).reshape(*h.shape[:2], HEADS, -1) for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bthd,bThd->bhtT", query, key) / np.sqrt(WIDTH // HEADS).astype(dtype)
            weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(dtype).min))
            mixed = jnp.einsum("bhtT,bThd->bthd", weights, value).reshape(h.shape)
            x = x + linear(params, f"{layer}/attn/linear", mixed)
            h = norm(params, f"{layer}/layer_norm_1", x)
            x = x + linear(params, f"{layer}/mlp/linear_1", jax.nn.gelu(linear(params, f"{layer}/mlp/linear", h)))
        return _cross_entropy(x @ table.T, tokens)

    return _trained(loss, params, (_tokens(),), optimizer, value_and_grad)


class _Block(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=self.dtype)(h, h, mask=nn.make_causal_mask(x[..., 0]))
        h = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(h)


def linen_attention(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """A block of linen around MultiHeadDotProductAttention, whose key biases have no true gradient."""
    net = _Block(dtype)
    x, y = _numbers(BATCH, SEQ, WIDTH, seed=1), _numbers(BATCH, SEQ, WIDTH, seed=2)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net.apply({"params": params}, x).astype(jnp.float32) - y) ** 2)

    return _trained(loss, net.init(jax.random.key(0), x)["params"], (x, y), optimizer, value_and_grad)


def scanned(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """Layers in a scan, each recomputed, with rotary positions and a gated activation."""
    params = {"embed": _numbers(WORDS, WIDTH, seed=1, size=0.1), "final": np.ones(WIDTH, np.float32)}
    stacked = {name: _numbers(3, WIDTH, WIDTH, seed=seed, size=0.2) for seed, name in enumerate(("q", "k", "v", "o"), 2)}
    stacked |= {"gate": _numbers(3, WIDTH, 64, seed=7, size=0.2), "up": _numbers(3, WIDTH, 64, seed=8, size=0.2)}
    params["layers"] = stacked | {"down": _numbers(3, 64, WIDTH, seed=9, size=0.1), "norm": np.ones((3, WIDTH), np.float32)}

    def normed(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(dtype)

    def rotated(x: Any) -> Any:
        angle = jnp.arange(SEQ)[:, None, None] / 100 ** (jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
        first, second = jnp.split(x, 2, -1)
        sine, cosine = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    def layer(x: Any, weights: Any) -> Any:
        cast = {name: weight.astype(dtype) for name, weight in weights.items() if name != "norm"}
        h = normed(x, weights["norm"])
        query, key, value = ((h @ cast[name]).reshape(*h.shape[:2], HEADS, -1) for name in "qkv")
        x = x + jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True).reshape(x.shape) @ cast["o"]
        h = normed(x, weights["norm"])
        return x + (jax.nn.silu(h @ cast["gate"]) * (h @ cast["up"])) @ cast["down"], None

    def loss(params: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"].astype(dtype)[tokens], params["layers"])
        return _cross_entropy(normed(x, params["final"]) @ params["embed"].astype(dtype).T, tokens)

    return _trained(loss, params, (_tokens(),), optimizer, value_and_grad)


def decoder(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """The decoder of the command line, in one layer."""
    config = dataclasses.replace(preset("tiny"), num_layers=1, max_seq=24, dtype=np.dtype(dtype).name)
    model, state = create(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, config.max_seq)).astype(np.int32)
    return train_step, (model, state, {"inputs": tokens, "targets": np.roll(tokens, -1, 1)})


# Normalisation, random numbers, scales and the host


class _Normed(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.up, self.norm = nnx.Linear(16, 64, dtype=dtype, rngs=rngs), nnx.BatchNorm(64, dtype=dtype, rngs=rngs)
        self.wide = nnx.Dropout(0.5, rngs=rngs, broadcast_dims=(0,))
        self.dropout, self.down = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(64, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(self.wide(nnx.relu(self.norm(self.up(x))))))


def batch_norm(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """A bias before BatchNorm, which has no true gradient, and dropout that a dimension shares."""

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss(model: Any) -> Any:
            out = model(x).astype(jnp.float32)
            return jnp.mean((out - y) ** 2), out

        (value, out), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return value, out

    model = _Normed(dtype, nnx.Rngs(0, dropout=7))
    return step, (model, nnx.Optimizer(model, optimizer, wrt=nnx.Param), _numbers(32, 16), _numbers(32, 8, seed=1))


def scaled(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step, scale: float = 2.0**10) -> Program:
    """A loss under flax's DynamicScale; a scale that is too large overflows, and the step is skipped."""
    params = {"up": _numbers(16, 64, size=0.3), "bias": np.zeros(64, np.float32), "down": _numbers(64, 4, seed=1, size=0.3)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        low = jax.tree.map(lambda param: param.astype(dtype), params)
        hidden = jax.nn.gelu(x.astype(dtype) @ low["up"] + low["bias"])
        return jnp.mean(((hidden @ low["down"]).astype(jnp.float32) - y) ** 2)

    def step(params: Any, state: Any, scale: Any, x: Any, y: Any) -> Any:
        scale, is_finite, value, gradients = scale.value_and_grad(loss)(params, x, y)
        updates, made = optimizer.update(gradients, state, params)
        kept = partial(jax.tree.map, partial(jnp.where, is_finite))
        return kept(optax.apply_updates(params, updates), params), kept(made, state), scale, value

    params = jax.tree.map(jnp.asarray, params)
    start = dynamic_scale.DynamicScale(growth_interval=1, scale=jnp.float32(scale))
    return step, (params, optimizer.init(params), start, _numbers(64, 16, seed=2), _numbers(64, 4, seed=3))


class _Fp8(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(64, dtype=self.dtype, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x))
        return nn.Dense(32, dtype=self.dtype, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)


def fp8(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """Products in eight bits, whose scales and histories come back as gradients."""
    net, x = _Fp8(dtype), _numbers(64, 32) * np.linspace(0.1, 5, 64, dtype=np.float32)[:, None]
    variables = net.init(jax.random.key(1), x)

    def step(variables: Any, state: Any, x: Any) -> Any:
        value, gradients = value_and_grad(lambda variables: jnp.mean((net.apply(variables, x).astype(jnp.float32) - x) ** 2))(variables)
        updates, state = optimizer.update(gradients["params"], state, variables["params"])
        return {**gradients, "params": optax.apply_updates(variables["params"], updates)}, state, value

    return step, (variables, optimizer.init(variables["params"]), x)


def host(dtype: Any, optimizer: optax.GradientTransformation, value_and_grad: Step) -> Program:
    """The host answers in the middle of a loss, and is told of it, in order and not."""

    def masked(x: Any) -> np.ndarray:
        kept = np.array(x)
        kept[::2] = 0
        return kept

    def loss(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x.astype(dtype) @ params["w"].astype(dtype))
        answer = jax.pure_callback(masked, jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), jax.lax.stop_gradient(hidden))
        io_callback(lambda _: None, None, jax.lax.stop_gradient(hidden), ordered=True)
        jax.debug.callback(lambda _: None, jax.lax.stop_gradient(answer))
        return jnp.mean((hidden + answer).astype(jnp.float32) ** 2)

    return _trained(loss, {"w": _numbers(16, 32)}, (_numbers(64, 16, seed=1),), optimizer, value_and_grad)


def _zoo(name: str, flavor: str) -> Callable[..., Program]:
    (one,) = (one for one in CASES if (one.name, one.flavor) == (name, flavor))
    return lambda dtype, optimizer, value_and_grad: one.make(UNSPLIT, dtype)


OWN: dict[str, Callable[..., Program]] = {
    "haiku": haiku_like,
    "attention": linen_attention,
    "scanned": scanned,
    "decoder": decoder,
    "batch_norm": batch_norm,
    "scaled": scaled,
    "overflow": partial(scaled, scale=2.0**40),
    "fp8": fp8,
    "host": host,
}
"""Programs of an own optimizer and type of arithmetic; the decoder has its own optimizer."""

ZOO: dict[str, Callable[..., Program]] = {f"{one.name}-{one.flavor}": _zoo(one.name, one.flavor) for one in CASES}
"""The models of `tests.zoo`, under AdamW, with parameters of the type of the arithmetic."""

VALUE_AND_GRAD = {"local": spmdctx.value_and_grad, "micro": spmdctx.value_and_grad}
"""Modes whose programs take gradients by spmdctx."""

"""Plain losses over pytrees, in which nothing knows of a pipeline."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, WORDS, HEADS = 16, 32, 24, 2


def decoder(key: Any, num_layers: int, *, tied: bool = True, stacked: bool = False, times: int = 1) -> dict[str, Any]:
    """Parameters of a small decoder, or of one that is so many times as wide."""
    width, hidden = WIDTH * times, HIDDEN * times

    def weight(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    def layer(key: Any) -> dict[str, Any]:
        shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
        shapes |= {"up": (width, hidden), "gate": (width, hidden), "down": (hidden, width)}
        own = {name: weight(one, *shape) for one, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)}
        return {**own, "norm1": jnp.ones(width), "norm2": jnp.ones(width)}

    first, last, *keys = jax.random.split(key, num_layers + 2)
    layers = [layer(one) for one in keys]
    params = {"embed": weight(first, WORDS, width), "norm": jnp.ones(width)}
    params["layers"] = jax.tree.map(lambda *own: jnp.stack(own), *layers) if stacked else layers
    return params if tied else {**params, "head": weight(last, width, WORDS)}


def normalized(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x: Any) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(0, x.shape[3], 2) / x.shape[3])
    cos, sin, (one, other) = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None], (x[..., ::2], x[..., 1::2])
    return jnp.stack([one * cos - other * sin, one * sin + other * cos], -1).reshape(x.shape)


def layer(own: Any, x: Any) -> Any:
    batch, length, _ = x.shape
    h = normalized(x, own["norm1"])
    q, k, v = ((h @ own[name]).reshape(batch, length, HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k))
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ own["o"]
    h = normalized(x, own["norm2"])
    return x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]


def loss(params: Any, batch: Any, *, remat: bool = False) -> Any:
    """Cross-entropy of the next word."""
    words, targets = batch
    x, one = params["embed"][words], jax.checkpoint(layer) if remat else layer
    if isinstance(params["layers"], dict):
        x, _ = jax.lax.scan(lambda x, own: (one(own, x), None), x, params["layers"])
    else:
        for own in params["layers"]:
            x = one(own, x)
    logits = normalized(x, params["norm"]) @ params.get("head", params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def batch(key: Any, size: int, length: int = 8) -> Any:
    return tuple(jax.random.randint(one, (size, length), 0, WORDS) for one in jax.random.split(key))

"""More programs for `benchmarks.stage_peaks` on GPU: written after what they judge, and left as they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.stage_models import Array, How, Layer, Model, Text, Zeros, attend, heads_of, layer_norm, layers_through, shapes_of


def gpt(size: Text, how: How, *, rate: float = 0.1) -> Model:
    """A decoder with a tied table, learned places, and dropout behind every block, like GPT-2; each layer has a key of its own."""
    width = size.width

    def dropped(x: Array, key: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)

    def layer(own: Layer, x: Array, key: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"] + own["b"], 3, -1))
        x = x + dropped(attend(q, k, v, causal=True) @ own["o"] + own["bo"], jax.random.fold_in(key, 0))
        y = layer_norm(x, own["s2"], own["c2"])
        return x + dropped(jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"] + own["bd"], jax.random.fold_in(key, 1))

    def loss(params: Any, batch: Any) -> Array:
        if how.compute:
            params = jax.tree.map(lambda leaf: leaf.astype(how.compute), params)
        one = jax.checkpoint(layer, policy=how.policy) if how.remat else layer
        x = params["embedding"][batch[0]] + params["places"]
        for number, own in enumerate(params["layers"]):
            x = one(own, x, jax.random.key(number))
        logits = layer_norm(x, params["scale"]) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch[1]).mean()

    def params() -> Any:
        zeros = _zeros(size)
        vectors = dict.fromkeys(["s1", "c1", "s2", "c2", "bo", "bd"], width)
        wide = {"qkv": (width, 3 * width), "b": 3 * width, "o": (width, width)}
        fed = {"up": (width, size.hidden), "bu": size.hidden, "down": (size.hidden, width)}
        ends = {"embedding": (size.vocabulary, width), "places": (size.length, width), "scale": width}
        return {**shapes_of(zeros, **ends), "layers": [shapes_of(zeros, **vectors, **wide, **fed) for _ in range(size.layers)]}

    words = jax.ShapeDtypeStruct((size.rows, size.length), "int32")
    return Model(loss, jax.eval_shape(params), (words, words))


def tabular(size: Text, how: How) -> Model:
    """Gated residual layers over rows of features, without attention: `length` features in, one number out."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s"])
        return x + (jax.nn.sigmoid(y @ own["gate"]) * jnp.tanh(y @ own["up"])) @ own["down"]

    def loss(params: Any, batch: Any) -> Array:
        x = layers_through(layer, how, params["layers"], jax.nn.silu(batch[0] @ params["in"]))
        return jnp.mean(jnp.square(((x @ params["head"])[:, 0] - batch[1]).astype(jnp.float32)))

    def params() -> Any:
        zeros = _zeros(size)
        layers: Any = [
            shapes_of(zeros, s=width, gate=(width, size.hidden), up=(width, size.hidden), down=(size.hidden, width))
            for _ in range(size.layers)
        ]
        layers = jax.tree.map(lambda *own: jnp.stack(own), *layers) if how.scan else layers
        return {"in": zeros(size.length, width), "head": zeros(width, 1), "layers": layers}

    rows = jax.ShapeDtypeStruct((size.rows, size.length), size.dtype)
    return Model(loss, jax.eval_shape(params), (rows, jax.ShapeDtypeStruct((size.rows,), size.dtype)))


def perceiver(size: Text, how: How, *, places: int) -> Model:
    """`places` learned rows that look at all words in turn with their own, like Perceiver: each layer reads the words once more."""
    width = size.width

    def layer(own: Layer, state: Any) -> Any:
        x, words = state
        for name, read in (("1", words), ("2", None)):
            y = layer_norm(x, own["s" + name])
            left = y if read is None else read
            q, k, v = (heads_of(one @ own[part + name], size.heads) for part, one in (("q", y), ("k", left), ("v", left)))
            x = x + attend(q, k, v, causal=False) @ own["o" + name]
        y = layer_norm(x, own["s"])
        return x + jax.nn.gelu(y @ own["up"]) @ own["down"], words

    def loss(params: Any, batch: Any) -> Array:
        words = params["embedding"][batch[0]]
        x = jnp.broadcast_to(params["rows"], (words.shape[0], places, width))
        x, _ = layers_through(layer, how, params["layers"], (x, words))
        logits = (x.mean(1) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def params() -> Any:
        zeros = _zeros(size)
        square = {part + name: (width, width) for part in "qkvo" for name in "12"}
        fed = {"s": width, "s1": width, "s2": width, "up": (width, size.hidden), "down": (size.hidden, width)}
        ends = {"embedding": (size.vocabulary, width), "rows": (places, width), "head": (width, 1000)}
        return {**shapes_of(zeros, **ends), "layers": [shapes_of(zeros, **square, **fed) for _ in range(size.layers)]}

    words = jax.ShapeDtypeStruct((size.rows, size.length), "int32")
    return Model(loss, jax.eval_shape(params), (words, jax.ShapeDtypeStruct((size.rows,), "int32")))


def _zeros(size: Text) -> Zeros:
    def zeros(*own: int) -> Array:
        return jnp.zeros(own, size.dtype)

    return zeros

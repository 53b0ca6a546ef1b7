"""More programs of real sizes for `benchmarks.stage_peaks`: written after everything was tuned, and left as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.stage_models import (
    Array,
    How,
    Layer,
    Model,
    Text,
    Zeros,
    attend,
    heads_of,
    language_model,
    layer_norm,
    layers_through,
    regression,
    rms_norm,
    rotate,
    shapes_of,
)


def phi(size: Text, how: How) -> Model:
    """A decoder whose attention and perceptron read the same norm, with half of each head turned, like Phi."""
    width = size.width

    def turn(x: Array) -> Array:
        turned, still = jnp.split(x, 2, -1)
        return jnp.concatenate([rotate(turned), still], -1)

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s"], own["c"])
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"] + own["b"], 3, -1))
        found = attend(turn(q), turn(k), v, causal=True) @ own["o"] + own["bo"]
        return x + found + jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"] + own["bd"]

    def init(zeros: Zeros) -> Layer:
        vectors = dict.fromkeys(["s", "c", "bo", "bd"], width)
        wide = {"qkv": (width, 3 * width), "b": 3 * width, "o": (width, width)}
        return shapes_of(zeros, **vectors, **wide, up=(width, size.hidden), bu=size.hidden, down=(size.hidden, width))

    return language_model(size, how, layer, init)


def qwen(size: Text, how: How, *, groups: int) -> Model:
    """A decoder with biases and norms of queries and keys, whose groups of keys are repeated, like Qwen."""
    width, part = size.width, size.width // size.heads

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q = rotate(rms_norm(heads_of(y @ own["q"] + own["bq"], size.heads), own["sq"]))
        k = rotate(rms_norm(heads_of(y @ own["k"] + own["bk"], groups), own["sk"]))
        k, v = (jnp.repeat(one, size.heads // groups, 2) for one in (k, heads_of(y @ own["v"] + own["bv"], groups)))
        x = x + attend(q, k, v, causal=True) @ own["o"]
        y = rms_norm(x, own["s2"])
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        keys, wide = groups * part, (width, size.hidden)
        products = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        vectors = {"bq": width, "bk": keys, "bv": keys, "sq": part, "sk": part, "s1": width, "s2": width}
        return shapes_of(zeros, **products, **vectors, gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init)


def mixture(size: Text, how: How, *, experts: int, room: int) -> Model:
    """A decoder that sends each word to its best expert, up to `room` words of a row to one, by products with masks, like GShard."""
    width = size.width

    def experts_of(own: Layer, x: Array) -> Array:
        gates = jax.nn.softmax((x @ own["route"]).astype(jnp.float32))
        best = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jnp.cumsum(best, 1) * best - 1
        sent = (jax.nn.one_hot(place.astype(int), room) * best[..., None]).astype(x.dtype)
        found = jnp.einsum("btec,btd->becd", sent, x)
        found = jnp.einsum("becf,efd->becd", jax.nn.gelu(jnp.einsum("becd,edf->becf", found, own["up"])), own["down"])
        return jnp.einsum("btec,becd->btd", sent * (gates * best)[..., None].astype(x.dtype), found)

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"])
        q, k, v = (heads_of(y @ own[name], size.heads) for name in "qkv")
        x = x + attend(q, k, v, causal=True) @ own["o"]
        return x + experts_of(own, layer_norm(x, own["s2"]))

    def init(zeros: Zeros) -> Layer:
        square = dict.fromkeys("qkvo", (width, width))
        fed = {"route": (width, experts), "up": (experts, width, size.hidden), "down": (experts, size.hidden, width)}
        return shapes_of(zeros, **square, **fed, s1=width, s2=width)

    return language_model(size, how, layer, init)


def vision(size: Text, how: How) -> Model:
    """A transformer of pictures with scaled branches, like CaiT."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["n1"], own["c1"])
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"] + own["b"], 3, -1))
        x = x + own["g1"] * (attend(q, k, v, causal=False) @ own["o"] + own["bo"])
        y = layer_norm(x, own["n2"], own["c2"])
        return x + own["g2"] * (jax.nn.gelu(y @ own["up"] + own["bu"], approximate=False) @ own["down"] + own["bd"])

    def init(zeros: Zeros) -> Layer:
        vectors = dict.fromkeys(["n1", "c1", "n2", "c2", "g1", "g2", "bo", "bd"], width)
        wide = {"qkv": (width, 3 * width), "b": 3 * width, "o": (width, width)}
        return shapes_of(zeros, **vectors, **wide, up=(width, size.hidden), bu=size.hidden, down=(size.hidden, width))

    return regression(size, how, layer, init, inputs=588, classes=1000)


def translation(size: Text, how: How) -> Model:
    """An encoder, and a decoder whose every layer reads what the encoder made, like T5."""
    width = size.width

    def block(own: Layer, x: Array, source: Array, name: str, *, causal: bool) -> Array:
        y = rms_norm(x, own["s" + name])
        read = y if source is None else source
        q, k, v = (heads_of(left @ own[part + name], size.heads) for part, left in (("q", y), ("k", read), ("v", read)))
        return x + attend(q, k, v, causal=causal) @ own["o" + name]

    def fed(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s"])
        return x + (jax.nn.gelu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def encode(own: Layer, x: Array) -> Array:
        return fed(own, block(own, x, None, "1", causal=False))

    def decode(own: Layer, state: Any) -> Any:
        x, memory = state
        return fed(own, block(own, block(own, x, None, "1", causal=True), memory, "2", causal=False)), memory

    def loss(params: Any, batch: Any) -> Array:
        memory = layers_through(encode, how, params["encoder"], params["embedding"][batch[0]])
        x, _ = layers_through(decode, how, params["decoder"], (params["embedding"][batch[1]], rms_norm(memory, params["scale"])))
        logits = (x @ params["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, batch[1][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def params() -> Any:
        zeros = partial(jnp.zeros, dtype=size.dtype)

        def init(*names: str) -> Layer:
            square = {part + name: (width, width) for name in names for part in "qkvo"}
            scales = {"s" + name: width for name in ("", *names)}
            wide = (width, size.hidden)
            return shapes_of(lambda *own: zeros(own), **square, **scales, gate=wide, up=wide, down=(size.hidden, width))

        ends = {"embedding": zeros((size.vocabulary, width)), "head": zeros((width, size.vocabulary)), "scale": zeros((width,))}
        layers = range(size.layers)
        return {**ends, "encoder": [init("1") for _ in layers], "decoder": [init("1", "2") for _ in layers]}

    words = jax.ShapeDtypeStruct((size.rows, size.length), "int32")
    return Model(loss, jax.eval_shape(params), (words, words))


def recurrence(size: Text, how: How) -> Model:
    """A decoder of gated linear recurrences, made with an associative scan in float32, like Griffin's blocks without attention."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        left, right = y @ own["a"], jax.nn.gelu(y @ own["b"])
        decay = jax.nn.sigmoid((left @ own["r"] + own["br"]).astype(jnp.float32))
        fed = (1 - decay) * left.astype(jnp.float32)
        _, found = jax.lax.associative_scan(lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1]), (decay, fed), axis=1)
        x = x + (found.astype(x.dtype) * right) @ own["o"]
        y = rms_norm(x, own["s2"])
        return x + (jax.nn.gelu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        square, wide = dict.fromkeys("abro", (width, width)), (width, size.hidden)
        return shapes_of(zeros, **square, br=width, s1=width, s2=width, gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init)

"""Programs of real sizes for `benchmarks.stage_peaks`: losses over pytrees, written apart from the models of the library.

A model is a loss and the shapes of its parameters and batch; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Array = Any
Layer = Mapping[str, Array]
Zeros = Callable[..., Array]


class Model(NamedTuple):
    """A loss of parameters and a batch, and their shapes."""

    loss: Callable[[Any, Any], Array]
    params: Any
    batch: Any


class Text(NamedTuple):
    """The size of a model of text: layers, width, heads, hidden features, rows, words of a row, vocabulary."""

    layers: int
    width: int
    heads: int
    hidden: int
    rows: int
    length: int
    vocabulary: int = 32768
    dtype: str = "bfloat16"


class How(NamedTuple):
    """How layers run: recomputed, what a recomputed layer keeps, in a scan, in another type than the parameters are stored in."""

    remat: bool = False
    policy: Any = None
    scan: bool = False
    compute: str = ""


def rms_norm(x: Array, scale: Array) -> Array:
    """Divides by the root of the mean square, taken in float32."""
    square = jnp.mean(jnp.square(x).astype(jnp.float32), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def layer_norm(x: Array, scale: Array | float = 1.0, bias: Array | float = 0.0) -> Array:
    """Subtracts the mean and divides by the deviation."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + bias


def heads_of(x: Array, heads: int) -> Array:
    """Divides features by heads: (rows, words, features) to (rows, words, heads, features of a head)."""
    return x.reshape(*x.shape[:2], heads, -1)


def attend(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Attention of heads, with a softmax in float32; the result has the heads' features side by side."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.asarray(-1e9, scores.dtype))
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def rotate(x: Array) -> Array:
    """Rotary positions, the halves of a head turned against each other."""
    length, size = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = (found[None, :, None].astype(x.dtype) for found in (jnp.cos(angles), jnp.sin(angles)))
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def shapes_of(zeros: Zeros, **sizes: int | tuple[int, ...]) -> dict[str, Array]:
    """Zeros by name."""
    return {name: zeros(*(size if isinstance(size, tuple) else (size,))) for name, size in sizes.items()}


def layers_through(layer: Callable[[Layer, Array], Array], how: How, layers: Any, x: Array) -> Array:
    """Runs `x` through all layers."""
    one = jax.checkpoint(layer, policy=how.policy) if how.remat else layer
    if how.scan:
        return jax.lax.scan(lambda state, own: (one(own, state), None), x, layers)[0]
    for own in layers:
        x = one(own, x)
    return x


def language_model(
    size: Text,
    how: How,
    layer: Callable[[Layer, Array], Array],
    init: Callable[[Zeros], Layer],
    *,
    final: Callable[[Array, Array], Array] = rms_norm,
    tied: bool = False,
    cap: float = 0.0,
) -> Model:
    """Look-up, layers, a last norm, logits and their cross entropy; `cap` bounds the logits by a tanh."""

    def loss(params: Any, batch: Any) -> Array:
        if how.compute:
            params = jax.tree.map(lambda leaf: leaf.astype(how.compute), params)
        x = layers_through(layer, how, params["layers"], params["embedding"][batch[0]])
        logits = final(x, params["scale"]) @ (params["embedding"].T if tied else params["head"])
        logits = cap * jnp.tanh(logits / cap) if cap else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch[1]).mean()

    def params() -> Any:
        zeros = partial(jnp.zeros, dtype=size.dtype)
        layers: Any = [init(lambda *own: zeros(own)) for _ in range(size.layers)]
        layers = jax.tree.map(lambda *own: jnp.stack(own), *layers) if how.scan else layers
        head = {} if tied else {"head": zeros((size.width, size.vocabulary))}
        return {"embedding": zeros((size.vocabulary, size.width)), "scale": zeros((size.width,)), "layers": layers, **head}

    words = jax.ShapeDtypeStruct((size.rows, size.length), "int32")
    return Model(loss, jax.eval_shape(params), (words, words))


def regression(
    size: Text, how: How, layer: Callable[[Any, Any], Array], init: Callable[[Zeros], Layer], *, inputs: int, classes: int
) -> Model:
    """Rows of `inputs` features at each place, layers, a mean over the places, and the squares of what `classes` are missed by."""

    def loss(params: Any, batch: Any) -> Array:
        x = layers_through(layer, how, params["layers"], batch[0] @ params["in"])
        return jnp.mean(jnp.square((x.mean(1) @ params["head"] - batch[1]).astype(jnp.float32)))

    def params() -> Any:
        def zeros(*own: int) -> Array:
            return jnp.zeros(own, size.dtype)

        return {"in": zeros(inputs, size.width), "head": zeros(size.width, classes), "layers": [init(zeros) for _ in range(size.layers)]}

    shape = (size.rows, size.length, inputs)
    return Model(
        loss,
        jax.eval_shape(params),
        (jax.ShapeDtypeStruct(shape, size.dtype), jax.ShapeDtypeStruct((size.rows, classes), size.dtype)),
    )


def opt(size: Text, how: How) -> Model:
    """A decoder with biases, layer norms and relu, like OPT."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(y @ own[name] + own["b" + name], size.heads) for name in "qkv")
        x = x + attend(q, k, v, causal=True) @ own["o"] + own["bo"]
        y = layer_norm(x, own["s2"], own["c2"])
        return x + jax.nn.relu(y @ own["up"] + own["bu"]) @ own["down"] + own["bd"]

    return language_model(size, how, layer, lambda zeros: _biased(zeros, width, size.hidden))


def _biased(zeros: Zeros, width: int, hidden: int) -> Layer:
    square = dict.fromkeys("qkvo", (width, width))
    vectors = dict.fromkeys(["bq", "bk", "bv", "bo", "s1", "c1", "s2", "c2", "bd"], width)
    return shapes_of(zeros, **square, **vectors, up=(width, hidden), bu=hidden, down=(hidden, width))


def bert(size: Text, how: How) -> Model:
    """An encoder with norms behind its blocks and the exact GELU, like BERT."""

    def layer(own: Layer, x: Array) -> Array:
        q, k, v = (heads_of(x @ own[name] + own["b" + name], size.heads) for name in "qkv")
        x = layer_norm(x + attend(q, k, v, causal=False) @ own["o"] + own["bo"], own["s1"], own["c1"])
        hidden = jax.nn.gelu(x @ own["up"] + own["bu"], approximate=False)
        return layer_norm(x + hidden @ own["down"] + own["bd"], own["s2"], own["c2"])

    def final(x: Array, scale: Array) -> Array:
        return jax.nn.gelu(x) * scale

    return language_model(size, how, layer, lambda zeros: _biased(zeros, size.width, size.hidden), final=final)


def llama(size: Text, how: How, *, groups: int) -> Model:
    """A decoder with rotary positions, gated layers and keys shared by groups of heads, like LLaMA."""
    width, part = size.width, size.width // size.heads

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q, k = rotate(heads_of(y @ own["q"], size.heads)), rotate(heads_of(y @ own["k"], groups))
        v = heads_of(y @ own["v"], groups)
        q = q.reshape(*q.shape[:2], groups, size.heads // groups, part)
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k).astype(jnp.float32) * part**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((size.length, size.length), bool)), scores, -1e30)
        found = jnp.einsum("bgrts,bsgd->btgrd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + found.reshape(x.shape) @ own["o"]
        y = rms_norm(x, own["s2"])
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        keys, wide = (width, groups * part), (width, size.hidden)
        square = (width, width)
        return shapes_of(zeros, s1=width, s2=width, q=square, k=keys, v=keys, o=square, gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init)


def gemma(size: Text, how: How) -> Model:
    """A decoder with four norms a layer, tied tables and bounded logits, like Gemma 2."""
    width = size.width

    def norm(x: Array, scale: Array) -> Array:
        return rms_norm(x, 1 + scale)

    def layer(own: Layer, x: Array) -> Array:
        y = norm(x, own["s1"])
        q, k = (rotate(heads_of(y @ own[name], size.heads)) for name in "qk")
        x = x + norm(attend(q, k, heads_of(y @ own["v"], size.heads), causal=True) @ own["o"], own["s3"])
        y = norm(x, own["s2"])
        return x + norm((jax.nn.gelu(y @ own["gate"]) * (y @ own["up"])) @ own["down"], own["s4"])

    def init(zeros: Zeros) -> Layer:
        square, wide = dict.fromkeys("qkvo", (width, width)), (width, size.hidden)
        return shapes_of(zeros, **square, **dict.fromkeys(["s1", "s2", "s3", "s4"], width), gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init, final=norm, tied=True, cap=30.0)


def retention(size: Text, how: How) -> Model:
    """A decoder without softmax: products of queries and keys decay with the distance, like RetNet."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q, k, v = (heads_of(y @ own[name], size.heads) for name in "qkv")
        distance = jnp.arange(size.length)[:, None] - jnp.arange(size.length)[None]
        decay = jnp.where(distance >= 0, 0.97**distance, 0.0).astype(x.dtype)
        found = jnp.einsum("bhts,bshd->bthd", jnp.einsum("bthd,bshd->bhts", q, k) * decay, v)
        found = found * jax.lax.rsqrt(jnp.square(found).mean(-1, keepdims=True) + 1e-5)
        x = x + (found.reshape(x.shape) * jax.nn.silu(y @ own["gate"])) @ own["o"]
        return x + jax.nn.gelu(rms_norm(x, own["s2"]) @ own["up"]) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        square = dict.fromkeys(["q", "k", "v", "o", "gate"], (width, width))
        return shapes_of(zeros, **square, s1=width, s2=width, up=(width, size.hidden), down=(size.hidden, width))

    return language_model(size, how, layer, init)


def mixer(size: Text, how: How, *, mixed: int) -> Model:
    """Layers that mix places by `mixed` features and features by `hidden`, like MLP-Mixer."""
    width, length = size.width, size.length

    def layer(own: Layer, x: Array) -> Array:
        y = jnp.swapaxes(layer_norm(x, own["s1"]), 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(y @ own["a"] + own["ba"]) @ own["b"], 1, 2)
        return x + jax.nn.gelu(layer_norm(x, own["s2"]) @ own["up"] + own["bu"]) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        places = {"a": (length, mixed), "ba": mixed, "b": (mixed, length)}
        return shapes_of(zeros, **places, s1=width, s2=width, up=(width, size.hidden), bu=size.hidden, down=(size.hidden, width))

    return regression(size, how, layer, init, inputs=768, classes=1000)


def diffusion(size: Text, how: How) -> Model:
    """A transformer of diffusion, its norms shifted and scaled by the time, like DiT."""
    width = size.width

    def layer(own: Layer, x: Array, about: Array) -> Array:
        shifts = jnp.split((jax.nn.silu(about) @ own["m"] + own["bm"])[:, None], 6, -1)
        y = layer_norm(x) * (1 + shifts[0]) + shifts[1]
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"] + own["b"], 3, -1))
        x = x + shifts[2] * (attend(q, k, v, causal=False) @ own["o"])
        y = layer_norm(x) * (1 + shifts[3]) + shifts[4]
        return x + shifts[5] * (jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"])

    def loss(params: Any, batch: Any) -> Array:
        one = jax.checkpoint(layer) if how.remat else layer
        about = jax.nn.silu(batch[1] @ params["time"]) @ params["time2"]
        x = batch[0] @ params["in"] + params["places"]
        for own in params["layers"]:
            x = one(own, x, about)
        return jnp.mean(jnp.square((layer_norm(x) @ params["out"] - batch[2]).astype(jnp.float32)))

    def params() -> Any:
        def zeros(*own: int) -> Array:
            return jnp.zeros(own, size.dtype)

        wide = {"m": (width, 6 * width), "bm": 6 * width, "qkv": (width, 3 * width), "b": 3 * width, "o": (width, width)}
        fed = {"up": (width, size.hidden), "bu": size.hidden, "down": (size.hidden, width)}
        ends = {"in": (16, width), "places": (size.length, width), "time": (256, width), "time2": (width, width), "out": (width, 16)}
        return {**shapes_of(zeros, **ends), "layers": [shapes_of(zeros, **wide, **fed) for _ in range(size.layers)]}

    image = jax.ShapeDtypeStruct((size.rows, size.length, 16), size.dtype)
    return Model(loss, jax.eval_shape(params), (image, jax.ShapeDtypeStruct((size.rows, 256), size.dtype), image))

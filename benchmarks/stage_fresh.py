"""More programs for `benchmarks.stage_peaks`: written after the rules of memory for stages on GPU, before any of them was compiled.

`masked` and `gates` were written after what the others showed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

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
    rms_norm,
    rotate,
    shapes_of,
)


def speech(size: Text, how: How, *, bands: int = 80) -> Model:
    """An encoder of sound, like Whisper's: two convolutions over `bands` of frequency, the second with stride 2; a class for each frame."""
    width = size.width

    def convolved(x: Array, kernel: Array, stride: int) -> Array:
        return jax.nn.gelu(jax.lax.conv_general_dilated(x, kernel, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(y @ own[name], size.heads) for name in "qkv")
        x = x + attend(q + own["bq"], k, v + own["bv"], causal=False) @ own["o"]
        y = layer_norm(x, own["s2"], own["c2"])
        return x + jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"]

    def loss(params: Any, batch: Any) -> Array:
        x = convolved(convolved(batch[0], params["first"], 1), params["second"], 2) + params["places"]
        x = layer_norm(layers_through(layer, how, params["layers"], x), params["scale"])
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def params() -> Any:
        zeros, part = _zeros(size), (size.heads, width // size.heads)
        square, vectors = dict.fromkeys("qkvo", (width, width)), dict.fromkeys(["s1", "c1", "s2", "c2"], width)
        fed = {"up": (width, size.hidden), "bu": size.hidden, "down": (size.hidden, width), "bq": part, "bv": part}
        ends = {"first": (3, bands, width), "second": (3, width, width), "places": (size.length, width), "scale": width}
        layers = [shapes_of(zeros, **square, **vectors, **fed) for _ in range(size.layers)]
        return {**shapes_of(zeros, **ends, head=(width, size.vocabulary)), "layers": layers}

    sound = jax.ShapeDtypeStruct((size.rows, 2 * size.length, bands), size.dtype)
    return Model(loss, jax.eval_shape(params), (sound, jax.ShapeDtypeStruct((size.rows, size.length), "int32")))


def pairs(size: Text, how: How) -> Model:
    """An encoder of pairs of texts with two losses: a score from the first place, and the words at all places by a head of its own."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"], 3, -1))
        x = x + attend(rotate(q), rotate(k), v, causal=False) @ own["o"]
        gate, up = jnp.split(rms_norm(x, own["s2"]) @ own["fed"], 2, -1)
        return x + (jax.nn.gelu(gate) * up) @ own["down"]

    def loss(params: Any, batch: Any) -> Array:
        words, side, score, hidden = batch
        x = rms_norm(params["embedding"][words] + params["sides"][side], params["s0"])
        x = rms_norm(layers_through(layer, how, params["layers"], x), params["s"])
        pooled = jnp.tanh(x[:, 0] @ params["pool"]) @ params["score"]
        ranked = jnp.square((pooled[:, 0] - score).astype(jnp.float32)).mean()
        logits = jax.nn.gelu(x @ params["turn"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), words)
        return ranked + (losses * hidden).mean()

    def params() -> Any:
        zeros, square = _zeros(size), (width, width)
        ends = {"embedding": (size.vocabulary, width), "sides": (2, width), "s0": width, "s": width, "head": (width, size.vocabulary)}
        heads = {"pool": square, "score": (width, 1), "turn": square}
        own = {"qkv": (width, 3 * width), "o": square, "fed": (width, 2 * size.hidden), "down": (size.hidden, width)}
        layers = [shapes_of(zeros, **own, s1=width, s2=width) for _ in range(size.layers)]
        return {**shapes_of(zeros, **ends, **heads), "layers": layers}

    words = jax.ShapeDtypeStruct((size.rows, size.length), "int32")
    hidden = jax.ShapeDtypeStruct(words.shape, "float32")
    return Model(loss, jax.eval_shape(params), (words, words, jax.ShapeDtypeStruct((size.rows,), size.dtype), hidden))


def latent(size: Text, how: How, *, queries: int, keys: int, turned: int) -> Model:
    """A decoder whose queries and keys come from narrow rows, with `turned` features for the place that all heads share, like DeepSeek."""
    width, heads, part = size.width, size.heads, size.width // size.heads

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q = heads_of(rms_norm(y @ own["qa"], own["sq"]) @ own["qb"], heads)
        narrow, place = jnp.split(y @ own["ka"], [keys], -1)
        k, v = jnp.split(heads_of(rms_norm(narrow, own["sk"]) @ own["kb"], heads), 2, -1)
        place = jnp.broadcast_to(rotate(place[:, :, None]), (*k.shape[:3], turned))
        q = jnp.concatenate([q[..., :part], rotate(q[..., part:])], -1)
        x = x + attend(q, jnp.concatenate([k, place], -1), v, causal=True) @ own["o"]
        y = rms_norm(x, own["s2"])
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        q = {"qa": (width, queries), "sq": queries, "qb": (queries, heads * (part + turned))}
        k = {"ka": (width, keys + turned), "sk": keys, "kb": (keys, 2 * width)}
        wide = (width, size.hidden)
        return shapes_of(zeros, **q, **k, s1=width, s2=width, o=(width, width), gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init)


def skips(size: Text, how: How, *, inputs: int = 64) -> Model:
    """A transformer of pictures whose second half reads what the first one made, the last layer the first one's, like U-ViT."""
    width, half = size.width, size.layers // 2

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(part, size.heads) for part in jnp.split(y @ own["qkv"], 3, -1))
        x = x + attend(q, k, v, causal=False) @ own["o"] + own["bo"]
        y = layer_norm(x, own["s2"], own["c2"])
        return x + jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"] + own["bd"]

    def joined(own: Layer, x: Array, skip: Array) -> Array:
        return layer(own, jnp.concatenate([x, skip], -1) @ own["join"] + own["bj"])

    def loss(params: Any, batch: Any) -> Array:
        first, second = (jax.checkpoint(one) if how.remat else one for one in (layer, joined))
        x, kept = batch[0] @ params["in"] + params["places"] + (batch[1] @ params["time"])[:, None], []
        for own in params["layers"][:half]:
            x = first(own, x)
            kept.append(x)
        for own in params["layers"][half:]:
            x = second(own, x, kept.pop())
        found = layer_norm(x, params["s"]) @ params["out"]
        return jnp.mean(jnp.square((found - batch[2]).astype(jnp.float32)))

    def params() -> Any:
        zeros = _zeros(size)
        wide = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, size.hidden), "bu": size.hidden, "down": (size.hidden, width)}
        vectors, join = dict.fromkeys(["s1", "c1", "s2", "c2", "bo", "bd"], width), {"join": (2 * width, width), "bj": width}
        layers = [shapes_of(zeros, **wide, **vectors, **({} if number < half else join)) for number in range(2 * half)]
        ends = {"in": (inputs, width), "places": (size.length, width), "time": (256, width), "s": width, "out": (width, inputs)}
        return {**shapes_of(zeros, **ends), "layers": layers}

    image = jax.ShapeDtypeStruct((size.rows, size.length, inputs), size.dtype)
    return Model(loss, jax.eval_shape(params), (image, jax.ShapeDtypeStruct((size.rows, 256), size.dtype), image))


def windowed(size: Text, how: How, *, window: int) -> Model:
    """A decoder whose words see their own window and the one before, in blocks; one key for all heads, and a tied table, like Mistral."""
    width, part = size.width, size.width // size.heads
    blocks = size.length // window

    def looked(q: Array, k: Array, v: Array) -> Array:
        q = q.reshape(q.shape[0], blocks, window, size.heads, part)
        k, v = (one.reshape(one.shape[0], blocks, window, part) for one in (k, v))
        k, v = (jnp.concatenate([jnp.pad(one, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1], one], 2) for one in (k, v))
        far = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)[None]
        seen = (far >= 0) & (far < window)
        scores = jnp.einsum("bnqhd,bnkd->bnhqk", q, k).astype(jnp.float32) * part**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(q.dtype)
        return jnp.einsum("bnhqk,bnkd->bnqhd", weights, v).reshape(q.shape[0], size.length, width)

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        k, v = rotate((y @ own["k"])[:, :, None])[:, :, 0], y @ own["v"]
        x = x + looked(rotate(heads_of(y @ own["q"], size.heads)), k, v) @ own["o"]
        y = rms_norm(x, own["s2"])
        return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        square, wide = (width, width), (width, size.hidden)
        keys = {"q": square, "k": (width, part), "v": (width, part), "o": square}
        return shapes_of(zeros, **keys, s1=width, s2=width, gate=wide, up=wide, down=(size.hidden, width))

    return language_model(size, how, layer, init, tied=True)


def slopes(size: Text, how: How) -> Model:
    """A decoder with scores that fall with the distance, by a slope for each head, and squared relu, like BLOOM and Primer."""
    width = size.width

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(y @ own[name] + own["b" + name], size.heads) for name in "qkv")
        far = jnp.arange(size.length)[:, None] - jnp.arange(size.length)[None]
        slope = 2.0 ** (-8.0 * jnp.arange(1, size.heads + 1) / size.heads)
        bias = jnp.where(far >= 0, -slope[:, None, None] * far, -1e9)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5 + bias
        found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + found.reshape(x.shape) @ own["o"] + own["bo"]
        y = layer_norm(x, own["s2"], own["c2"])
        return x + jnp.square(jax.nn.relu(y @ own["up"] + own["bu"])) @ own["down"] + own["bd"]

    def init(zeros: Zeros) -> Layer:
        square, vectors = dict.fromkeys("qkvo", (width, width)), ["s1", "c1", "s2", "c2", "bq", "bk", "bv", "bo", "bd"]
        return shapes_of(
            zeros, **square, **dict.fromkeys(vectors, width), up=(width, size.hidden), bu=size.hidden, down=(size.hidden, width)
        )

    return language_model(size, how, layer, init, final=partial(layer_norm, bias=0.0))


def masked(size: Text, how: How, *, seen: int, inputs: int = 768) -> Model:
    """Pictures made again from `seen` of their patches: an encoder of these, and a narrow decoder of all places, like MAE."""
    width, narrow = size.width, size.width // 2

    def layer(own: Layer, x: Array) -> Array:
        y = layer_norm(x, own["s1"], own["c1"])
        q, k, v = (heads_of(part, x.shape[-1] // 64) for part in jnp.split(y @ own["qkv"] + own["b"], 3, -1))
        x = x + attend(q, k, v, causal=False) @ own["o"]
        y = layer_norm(x, own["s2"], own["c2"])
        return x + jax.nn.gelu(y @ own["up"] + own["bu"]) @ own["down"]

    def loss(params: Any, batch: Any) -> Array:
        patches, order = batch
        x = jnp.take_along_axis(patches @ params["in"] + params["places"], order[:, :seen, None], 1)
        x = layers_through(layer, how, params["layers"], x) @ params["narrow"]
        rest = jnp.broadcast_to(params["unseen"], (x.shape[0], size.length - seen, narrow))
        x = jnp.take_along_axis(jnp.concatenate([x, rest], 1), jnp.argsort(order, 1)[..., None], 1) + params["again"]
        found = layers_through(layer, how, params["decoder"], x) @ params["out"]
        return jnp.mean(jnp.square((found - patches).astype(jnp.float32)))

    def params() -> Any:
        zeros = _zeros(size)

        def init(own: int, hidden: int) -> Layer:
            wide = {"qkv": (own, 3 * own), "b": 3 * own, "o": (own, own), "up": (own, hidden), "bu": hidden, "down": (hidden, own)}
            return shapes_of(zeros, **wide, **dict.fromkeys(["s1", "c1", "s2", "c2"], own))

        ends = {"in": (inputs, width), "places": (size.length, width), "narrow": (width, narrow), "unseen": narrow}
        ends |= {"again": (size.length, narrow), "out": (narrow, inputs)}
        layers = {"layers": [init(width, size.hidden) for _ in range(size.layers)], "decoder": [init(narrow, size.hidden // 2)] * 4}
        return {**shapes_of(zeros, **ends), **layers}

    patches = jax.ShapeDtypeStruct((size.rows, size.length, inputs), size.dtype)
    return Model(loss, jax.eval_shape(params), (patches, jax.ShapeDtypeStruct((size.rows, size.length), "int32")))


def gates(size: Text, how: How, *, groups: int) -> Model:
    """A decoder whose attention is gated head by head, with norms of queries and keys, and relu without a gate behind it."""
    width, part = size.width, size.width // size.heads

    def layer(own: Layer, x: Array) -> Array:
        y = rms_norm(x, own["s1"])
        q = rotate(rms_norm(heads_of(y @ own["q"], size.heads), own["sq"]))
        k = rotate(rms_norm(heads_of(y @ own["k"], groups), own["sk"]))
        k, v = (jnp.repeat(one, size.heads // groups, 2) for one in (k, heads_of(y @ own["v"], groups)))
        opened = jax.nn.sigmoid((y @ own["g"]).astype(jnp.float32)).astype(x.dtype)
        found = heads_of(attend(q, k, v, causal=True), size.heads) * opened[..., None]
        x = x + found.reshape(x.shape) @ own["o"]
        return x + jax.nn.relu(rms_norm(x, own["s2"]) @ own["up"]) @ own["down"]

    def init(zeros: Zeros) -> Layer:
        keys, square = (width, groups * part), (width, width)
        products = {"q": square, "k": keys, "v": keys, "o": square, "g": (width, size.heads)}
        vectors = {"s1": width, "s2": width, "sq": part, "sk": part}
        return shapes_of(zeros, **products, **vectors, up=(width, size.hidden), down=(size.hidden, width))

    return language_model(size, how, layer, init)


def _zeros(size: Text) -> Zeros:
    def zeros(*own: int) -> Array:
        return jnp.zeros(own, size.dtype)

    return zeros

"""More training steps on plain pytrees, written after every price was tuned: windows, gates, retention, tables, rays, towers.

Programs are as those of `fresh_programs`. No price was changed for them before they were first measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.fresh_programs import LOW, Program, Weights, _batch_norm, _conv, _floats, _ints, _mixed
from benchmarks.plan_programs import _adam, _arrays, _cross_entropy, _gated, _norm


def _low(weights: Weights) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(LOW), weights)


def _layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    apart = wide - mean
    return (apart * lax.rsqrt(jnp.mean(apart * apart, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale + shift


def bert(devices: int, layers: int = 6, width: int = 768, heads: int = 12, length: int = 384, each: int = 40) -> Program:
    """An encoder of words with dropout and a table that is its own head, whose norms follow the sums."""
    batch = each * devices

    def dropped(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

    def loss(weights: Weights, words: Any, hidden: Any, seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed[0]), 2 * layers)
        table = weights["table"].astype(LOW)
        x = table[jnp.where(hidden % 7 == 0, 3, words)] + weights["place"].astype(LOW)
        for number, one in enumerate(map(_low, weights["layers"])):
            x = _layer_norm(x + dropped(_mixed(one, x, x, heads), keys[2 * number]), one["s1"], one["c1"])
            y = jax.nn.gelu(x @ one["up"] + one["b1"]) @ one["down"] + one["b2"]
            x = _layer_norm(x + dropped(y, keys[2 * number + 1]), one["s2"], one["c2"])
        return _cross_entropy(x @ table.T, words)

    block = {**dict.fromkeys("qkvo", (width, width)), "up": (width, 4 * width), "b1": (4 * width,), "down": (4 * width, width)}
    block |= dict.fromkeys(["b2", "s1", "c1", "s2", "c2"], (width,))
    weights = _arrays({"table": (30522, width), "place": (length, width), "layers": [block] * layers})
    return *_adam(loss, weights, _ints(batch, length), _ints(batch, length), _ints(1)), 30522


def grouped(devices: int, layers: int = 8, width: int = 1280, heads: int = 20, groups: int = 4, each: int = 8) -> Program:
    """A decoder whose queries share keys in groups and turn by place; its layers keep products and compute the rest again."""
    batch, length, part = each * devices, 1536, width // heads

    def turned(x: Any) -> Any:
        angle = jnp.arange(length)[:, None] * jnp.exp(-jnp.arange(part // 2) * (18.4 / part))
        one, two = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x.dtype)

    def layer(x: Any, weights: Weights) -> Any:
        own = _low(weights)
        y = _norm(x, own["n1"])
        query = turned((y @ own["q"]).reshape(batch, length, heads, part)).reshape(batch, length, groups, -1, part)
        key, value = ((y @ own[name]).reshape(batch, length, groups, part) for name in "kv")
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, turned(key)).astype(jnp.float32) * part**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", jax.nn.softmax(scores).astype(LOW), value)
        x = x + mixed.reshape(batch, length, width) @ own["o"]
        return x + _gated(own, _norm(x, own["n2"]))

    def loss(weights: Weights, words: Any) -> Any:
        run = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x = weights["table"].astype(LOW)[words[:, :-1]]
        for one in weights["layers"]:
            x = run(x, one)
        return _cross_entropy(_norm(x, weights["n"].astype(LOW)) @ weights["head"].astype(LOW), words[:, 1:])

    block = {"q": (width, width), "o": (width, width), "k": (width, groups * part), "v": (width, groups * part)}
    block |= {"up": (width, 3456), "gate": (width, 3456), "down": (3456, width), "n1": (width,), "n2": (width,)}
    weights = _arrays({"table": (32000, width), "head": (width, 32000), "n": (width,), "layers": [block] * layers})
    return *_adam(loss, weights, _ints(batch, length + 1)), 32000


def windows(devices: int, layers: int = 4, width: int = 384, heads: int = 12, side: int = 56, each: int = 32) -> Program:
    """Attention in windows of 7 x 7 that every second layer shifts, then pictures of half the side (Swin)."""
    batch, own = each * devices, 7

    def attend(weights: Weights, x: Any, shift: int) -> Any:
        size, taken = x.shape[1], x.shape[-1]
        x = jnp.roll(x, (-shift, -shift), (1, 2))
        x = x.reshape(batch, size // own, own, size // own, own, taken).transpose(0, 1, 3, 2, 4, 5).reshape(-1, own * own, taken)
        x = _mixed(weights, x, x, heads, weights["bias"].astype(jnp.float32))
        x = x.reshape(batch, size // own, size // own, own, own, taken).transpose(0, 1, 3, 2, 4, 5).reshape(batch, size, size, taken)
        return jnp.roll(x, (shift, shift), (1, 2))

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        x = _conv(pictures.astype(LOW), weights["patch"], 4)
        for level, stage in enumerate(weights["stages"]):
            if level:
                x = x.reshape(batch, side // 2, 2, side // 2, 2, width).transpose(0, 1, 3, 2, 4, 5).reshape(batch, side // 2, side // 2, -1)
                x = x @ weights["merge"].astype(LOW)
            for number, one in enumerate(map(_low, stage)):
                x = x + attend(one, _layer_norm(x, one["s1"], one["c1"]), own // 2 * (number % 2))
                x = x + jax.nn.gelu(_layer_norm(x, one["s2"], one["c2"]) @ one["up"]) @ one["down"]
        return _cross_entropy(jnp.mean(x, (1, 2)).astype(jnp.float32) @ weights["head"], labels)

    def block(taken: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {**dict.fromkeys("qkvo", (taken, taken)), "up": (taken, 4 * taken), "down": (4 * taken, taken)}
        return found | {"bias": (heads, 49, 49)} | dict.fromkeys(["s1", "c1", "s2", "c2"], (taken,))

    stages = [[block(width)] * (layers // 2), [block(2 * width)] * (layers // 2)]
    weights = _arrays({"patch": (4, 4, 3, width), "merge": (4 * width, 2 * width), "stages": stages, "head": (2 * width, 1000)})
    return *_adam(loss, weights, _floats(batch, 224, 224, 3), _ints(batch)), 1000


def gated_units(devices: int, layers: int = 8, width: int = 768, length: int = 512, each: int = 32) -> Program:
    """Perceptrons whose gates mix places (gMLP), in float32."""
    batch = each * devices

    def layer(weights: Weights, x: Any) -> Any:
        y = jax.nn.gelu(_layer_norm(x, weights["s1"], weights["c1"]) @ weights["up"])
        left, right = jnp.split(y, 2, -1)
        right = jnp.einsum("nl,bld->bnd", weights["along"], _layer_norm(right, weights["s2"], weights["c2"])) + weights["bias"][:, None]
        return x + (left * right) @ weights["down"]

    def loss(weights: Weights, words: Any) -> Any:
        x = weights["table"][words]
        for one in weights["layers"]:
            x = layer(one, x)
        return _cross_entropy(x @ weights["head"], words)

    block = {"up": (width, 4 * width), "down": (2 * width, width), "along": (length, length), "bias": (length,)}
    block |= {"s1": (width,), "c1": (width,), "s2": (2 * width,), "c2": (2 * width,)}
    weights = _arrays({"table": (16000, width), "head": (width, 16000), "layers": [block] * layers})
    return *_adam(loss, weights, _ints(batch, length)), 16000


def retention(devices: int, layers: int = 6, width: int = 1024, heads: int = 8, length: int = 2048, each: int = 6) -> Program:
    """Decayed products without a softmax, within chunks and by a scan from chunk to chunk."""
    batch, own, part = each * devices, 256, width // heads

    def mixed(weights: Weights, x: Any) -> Any:
        decay = 1 - 2.0 ** (-5.0 - jnp.arange(heads))
        within = jnp.exp((jnp.arange(own)[:, None] - jnp.arange(own)) * jnp.log(decay)[:, None, None])
        within = jnp.where(jnp.tril(jnp.ones((own, own), bool)), within, 0).astype(LOW)
        later = (decay[:, None] ** (jnp.arange(own) + 1.0)).astype(LOW)
        parts = ((x @ weights[name]).reshape(batch, length // own, own, heads, part).transpose(1, 0, 3, 2, 4) for name in "qkv")

        def chunk(state: Any, given: Any) -> Any:
            query, key, value = given
            scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * within
            found = jnp.einsum("bhqk,bhkd->bhqd", scores, value) + jnp.einsum(
                "bhqd,bhde->bhqe", query * later[..., None], state.astype(LOW)
            )
            kept = state * (decay**own)[:, None, None]
            return kept + jnp.einsum("bhkd,bhke->bhde", key * later[:, ::-1, None], value).astype(jnp.float32), found

        found = lax.scan(chunk, jnp.zeros((batch, heads, part, part)), tuple(parts))[1]
        return found.transpose(1, 0, 3, 2, 4).reshape(batch, length, width)

    def loss(weights: Weights, words: Any) -> Any:
        x = weights["table"].astype(LOW)[words]
        for one in map(_low, weights["layers"]):
            y = _norm(x, one["n1"])
            x = x + (jax.nn.silu(y @ one["g"]) * mixed(one, y)) @ one["o"]
            x = x + _gated(one, _norm(x, one["n2"]))
        return _cross_entropy(x[:, :-1] @ weights["head"].astype(LOW), words[:, 1:])

    block = {**dict.fromkeys("qkvgo", (width, width)), "up": (width, 2560), "gate": (width, 2560), "down": (2560, width)}
    weights = _arrays({"table": (32000, width), "head": (width, 32000), "layers": [{**block, "n1": (width,), "n2": (width,)}] * layers})
    return *_adam(loss, weights, _ints(batch, length)), 32000


def slim_convolutions(devices: int, depth: int = 3, each: int = 96) -> Program:
    """Depthwise convolutions between narrow products, with gates by channel and statistics of the batch (EfficientNet)."""
    batch = each * devices
    sides = ((32, 5), (64, 3), (128, 5))

    def block(weights: Weights, x: Any, stride: int) -> Any:
        y = jax.nn.silu(_batch_norm(_conv(x, weights["in"]), weights["n1"]))
        y = jax.nn.silu(_batch_norm(_conv(y, weights["mid"], stride, y.shape[-1]), weights["n2"]))
        gate = jax.nn.silu(jnp.mean(y, (1, 2)) @ weights["less"].astype(LOW)) @ weights["more"].astype(LOW)
        y = _batch_norm(_conv(y * jax.nn.sigmoid(gate)[:, None, None], weights["out"]), weights["n3"])
        return x + y if stride == 1 else y

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        x = jax.nn.silu(_batch_norm(_conv(pictures.astype(LOW), weights["stem"], 4), weights["n0"]))
        for stage in weights["stages"]:
            for place, one in enumerate(stage):
                x = block(one, x, 1 if place else 2)
        return _cross_entropy(jnp.mean(x, (1, 2)).astype(jnp.float32) @ weights["head"], labels)

    stages, taken = [], 32
    for made, size in sides:
        stage = []
        for place in range(depth):
            first = taken if not place else made
            inner = 4 * first
            stage.append({"in": (1, 1, first, inner), "mid": (size, size, 1, inner), "less": (inner, 16), "more": (16, inner)})
            stage[-1] |= {"out": (1, 1, inner, made), "n1": (2, inner), "n2": (2, inner), "n3": (2, made)}
        stages.append(stage)
        taken = made
    weights = _arrays({"stem": (3, 3, 3, 32), "n0": (2, 32), "stages": stages, "head": (taken, 1000)})
    return *_adam(loss, weights, _floats(batch, 256, 256, 3), _ints(batch)), 1000


def waves(devices: int, layers: int = 10, width: int = 256, length: int = 8192, each: int = 8) -> Program:
    """Causal convolutions along a line, each twice as wide apart as the last, with gates (WaveNet)."""
    batch = each * devices

    def along(x: Any, kernel: Any, apart: int) -> Any:
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, kernel, (1,), [(apart, 0)], rhs_dilation=(apart,), dimension_numbers=dims)

    def loss(weights: Weights, words: Any) -> Any:
        x, total = weights["table"].astype(LOW)[words], 0
        for number, one in enumerate(map(_low, weights["layers"])):
            left, right = jnp.split(along(x, one["conv"], 2**number), 2, -1)
            y = jnp.tanh(left) * jax.nn.sigmoid(right)
            total = total + y @ one["skip"]
            x = x + y @ one["out"]
        return _cross_entropy((jax.nn.relu(total) @ weights["head"].astype(LOW))[:, :-1], words[:, 1:])

    block = {"conv": (2, width, 2 * width), "skip": (width, width), "out": (width, width)}
    weights = _arrays({"table": (256, width), "layers": [block] * layers, "head": (width, 256)})
    return *_adam(loss, weights, _ints(batch, length)), 256


def clicks(devices: int, tables: int = 24, rows: int = 60000, width: int = 64, each: int = 16384) -> Program:
    """Rows of many tables, their products with each other, and perceptrons (DLRM), in float32."""
    batch = each * devices

    def through(layers: Any, x: Any) -> Any:
        for one in layers:
            x = jax.nn.relu(x @ one["kernel"] + one["bias"])
        return x

    def loss(weights: Weights, dense: Any, chosen: Any, clicked: Any) -> Any:
        found = [table[chosen[:, number]] for number, table in enumerate(weights["tables"])]
        own = through(weights["below"], dense)
        every = jnp.stack([own, *found], 1)
        products = jnp.einsum("bnd,bmd->bnm", every, every).reshape(batch, -1)
        logits = (through(weights["above"], jnp.concatenate([own, products], -1)) @ weights["last"])[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - logits * (clicked % 2))

    def chain(*sizes: int) -> Any:
        return [{"kernel": (one, two), "bias": (two,)} for one, two in pairwise(sizes)]

    shapes = {"tables": [(rows, width)] * tables, "below": chain(13, 512, 256, width), "last": (256, 1)}
    weights = _arrays({**shapes, "above": chain(width + (tables + 1) ** 2, 1024, 1024, 256)})
    return *_adam(loss, weights, _floats(batch, 13), _ints(batch, tables), _ints(batch)), rows


def attending_graph(devices: int, rounds: int = 3, width: int = 128, heads: int = 4, each: int = 40000, degree: int = 16) -> Program:
    """Attention over the edges of a graph, normalized at each receiver, in float32."""
    nodes, edges = each * devices, each * devices * degree

    def loss(weights: Weights, features: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        x = features @ weights["in"]
        for one in weights["rounds"]:
            y = (x @ one["value"]).reshape(nodes, heads, -1)
            left, right = (jnp.einsum("nhd,hd->nh", y, one[name]) for name in ("send", "receive"))
            scores = jax.nn.leaky_relu(left[senders] + right[receivers], 0.2)
            most = lax.stop_gradient(jax.ops.segment_max(scores, receivers, nodes))
            chances = jnp.exp(scores - jnp.where(jnp.isfinite(most), most, 0)[receivers])
            total = jax.ops.segment_sum(chances, receivers, nodes)[receivers] + 1e-9
            heard = jax.ops.segment_sum(y[senders] * (chances / total)[..., None], receivers, nodes)
            x = jax.nn.elu(heard.reshape(nodes, -1) + x @ one["own"])
        return _cross_entropy(x @ weights["head"], labels % 40)

    block = {"value": (width, width), "own": (width, width), "send": (heads, width // heads), "receive": (heads, width // heads)}
    weights = _arrays({"in": (128, width), "rounds": [block] * rounds, "head": (width, 40)})
    assert edges >= nodes
    return *_adam(loss, weights, _floats(nodes, 128), _ints(edges), _ints(edges), _ints(nodes)), nodes


def rays(devices: int, depth: int = 8, width: int = 256, samples: int = 64, each: int = 4096) -> Program:
    """Colours along rays by a perceptron of waves of places, added up by what is seen through (NeRF), in float32."""
    batch = each * devices

    def loss(weights: Weights, starts: Any, ways: Any, colours: Any) -> Any:
        far = jnp.linspace(2.0, 6.0, samples)
        places = starts[:, None] + ways[:, None] * far[:, None]
        turns = places[..., None] * 2.0 ** jnp.arange(10)
        known = jnp.concatenate([jnp.sin(turns), jnp.cos(turns)], -1).reshape(batch, samples, 60)
        x = jax.nn.relu(known @ weights["first"])
        for number, one in enumerate(weights["layers"]):
            x = jax.nn.relu((jnp.concatenate([x, known], -1) if number == depth // 2 else x) @ one["kernel"] + one["bias"])
        thick = 1 - jnp.exp(-jax.nn.relu(x @ weights["thick"])[..., 0] * (4.0 / samples))
        seen = thick * jnp.cumprod(1 - thick + 1e-10, 1)
        found = jnp.einsum("bs,bsc->bc", seen, jax.nn.sigmoid(x @ weights["colour"]))
        return jnp.mean((found - colours) ** 2)

    layers = [{"kernel": (width + (60 if number == depth // 2 else 0), width), "bias": (width,)} for number in range(depth)]
    weights = _arrays({"first": (60, width), "layers": layers, "thick": (width, 1), "colour": (width, 3)})
    return *_adam(loss, weights, _floats(batch, 3), _floats(batch, 3), _floats(batch, 3)), 2


def towers(devices: int, layers: int = 4, width: int = 512, each: int = 512) -> Program:
    """An encoder of pictures and one of words, whose products in pairs tell which belong together (CLIP)."""
    batch = each * devices

    def run(layers: Any, x: Any) -> Any:
        for one in map(_low, layers):
            y = _layer_norm(x, one["s1"], one["c1"])
            x = x + _mixed(one, y, y, width // 64)
            y = _layer_norm(x, one["s2"], one["c2"]) @ one["up"]
            x = x + (y * jax.nn.sigmoid(1.702 * y)) @ one["down"]
        return x

    def unit(x: Any, kernel: Any) -> Any:
        x = x.astype(jnp.float32) @ kernel
        return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    def loss(weights: Weights, pictures: Any, words: Any) -> Any:
        patches = pictures.reshape(batch, 7, 16, 7, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 49, 768).astype(LOW)
        seen = run(weights["seen"], patches @ weights["patch"].astype(LOW) + weights["place"].astype(LOW))
        read = run(weights["read"], weights["table"].astype(LOW)[words])
        logits = 14.3 * unit(jnp.mean(seen, 1), weights["eye"]) @ unit(read[:, -1], weights["ear"]).T
        own = jnp.arange(batch)
        return _cross_entropy(logits, own) + _cross_entropy(logits.T, own)

    block = {**dict.fromkeys("qkvo", (width, width)), "up": (width, 4 * width), "down": (4 * width, width)}
    block |= dict.fromkeys(["s1", "c1", "s2", "c2"], (width,))
    shapes: dict[str, Any] = {"patch": (768, width), "place": (49, width), "table": (49408, width)}
    shapes |= {"eye": (width, 512), "ear": (width, 512), "seen": [block] * layers, "read": [block] * layers}
    return *_adam(loss, _arrays(shapes), _floats(batch, 112, 112, 3), _ints(batch, 76)), 49408


def segments(devices: int, widths: tuple[int, ...] = (64, 128, 256, 512), side: int = 192, each: int = 16) -> Program:
    """A U-Net of two convolutions a level, shrunk by the largest and grown by transposed convolutions, which labels pixels."""
    batch = each * devices

    def twice(weights: Weights, x: Any) -> Any:
        for name in ("one", "two"):
            x = jax.nn.relu(_batch_norm(_conv(x, weights[name]), weights[f"n_{name}"]))
        return x

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        x, skips = pictures.astype(LOW), []
        for one in weights["down"]:
            x = twice(one, x)
            skips.append(x)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = twice(weights["middle"], x)
        for one, skip in zip(weights["up"], reversed(skips), strict=True):
            x = lax.conv_transpose(x, one["grow"].astype(LOW), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = twice(one, jnp.concatenate([x, skip], -1))
        return _cross_entropy(_conv(x, weights["head"]), labels % 21)

    def pair(taken: int, made: int) -> dict[str, tuple[int, ...]]:
        return {"one": (3, 3, taken, made), "two": (3, 3, made, made), "n_one": (2, made), "n_two": (2, made)}

    down = [pair(one, two) for one, two in pairwise((3, *widths))]
    up = [{**pair(2 * one, one), "grow": (2, 2, 2 * one, one)} for one in reversed(widths)]
    weights = _arrays({"down": down, "middle": pair(widths[-1], 2 * widths[-1]), "up": up, "head": (1, 1, widths[0], 21)})
    return *_adam(loss, weights, _floats(batch, side, side, 3), _ints(batch, side, side)), 21


def latents(devices: int, layers: int = 6, width: int = 768, count: int = 256, length: int = 6272, each: int = 8) -> Program:
    """Few latents that read a long input once, then each other (Perceiver)."""
    batch = each * devices

    def loss(weights: Weights, given: Any, labels: Any) -> Any:
        known = given.astype(LOW) @ weights["in"].astype(LOW) + weights["place"].astype(LOW)
        x = jnp.broadcast_to(weights["latents"].astype(LOW), (batch, count, width))
        reads = _low(weights["reads"])
        x = x + _mixed(reads, _norm(x, reads["n1"]), _norm(known, reads["n2"]), 8)
        for one in map(_low, weights["layers"]):
            y = _norm(x, one["n1"])
            x = x + _mixed(one, y, y, 12)
            x = x + jax.nn.gelu(_norm(x, one["n2"]) @ one["up"]) @ one["down"]
        return _cross_entropy(jnp.mean(x, 1).astype(jnp.float32) @ weights["head"], labels)

    square = dict.fromkeys("qkvo", (width, width)) | dict.fromkeys(["n1", "n2"], (width,))
    block = {**square, "up": (width, 4 * width), "down": (4 * width, width)}
    shapes: dict[str, Any] = {"in": (48, width), "place": (length, width), "latents": (count, width), "reads": square}
    weights = _arrays({**shapes, "layers": [block] * layers, "head": (width, 1000)})
    return *_adam(loss, weights, _floats(batch, length, 48), _ints(batch)), 1000


def speech(devices: int, layers: int = 4, width: int = 640, heads: int = 10, each: int = 24) -> Program:
    """Two convolutions along frames, an encoder of 750 places, and a decoder that reads it (Whisper)."""
    batch, written = each * devices, 192

    def along(x: Any, kernel: Any, stride: int) -> Any:
        return jax.nn.gelu(lax.conv_general_dilated(x, kernel.astype(LOW), (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))

    def run(own: Weights, x: Any, known: Any, bias: Any) -> Any:
        y = _layer_norm(x, own["s1"], own["c1"])
        x = x + _mixed(own, y, y, heads, bias)
        if known is not None:
            x = x + _mixed(own, _layer_norm(x, own["s3"], own["c3"]), known, heads, prefix="cross_")
        return x + jax.nn.gelu(_layer_norm(x, own["s2"], own["c2"]) @ own["up"]) @ own["down"]

    def loss(weights: Weights, frames: Any, words: Any) -> Any:
        x = along(along(frames.astype(LOW), weights["c1"], 1), weights["c2"], 2) + weights["place"].astype(LOW)
        for one in map(_low, weights["encoder"]):
            x = run(one, x, None, None)
        bias = jnp.where(jnp.tril(jnp.ones((written, written), bool)), 0.0, -1e9)
        y = weights["table"].astype(LOW)[words]
        for one in map(_low, weights["decoder"]):
            y = run(one, y, x, bias)
        return _cross_entropy((y @ weights["table"].T.astype(LOW))[:, :-1], words[:, 1:])

    block: dict[str, Any] = {**dict.fromkeys("qkvo", (width, width)), "up": (width, 4 * width), "down": (4 * width, width)}
    block |= dict.fromkeys(["s1", "c1", "s2", "c2"], (width,))
    crossed = {**block, **{f"cross_{name}": (width, width) for name in "qkvo"}, "s3": (width,), "c3": (width,)}
    shapes: dict[str, Any] = {"c1": (3, 80, width), "c2": (3, width, width), "place": (750, width), "table": (51865, width)}
    weights = _arrays({**shapes, "encoder": [block] * layers, "decoder": [crossed] * layers})
    return *_adam(loss, weights, _floats(batch, 1500, 80), _ints(batch, written)), 51865


def switched(devices: int, layers: int = 3, width: int = 1024, experts: int = 8, length: int = 1024, each: int = 8) -> Program:
    """A decoder whose tokens go to one expert each by rank within its room, moved by gathers (Switch)."""
    batch = each * devices
    tokens, room = batch * length, batch * length * 5 // (4 * experts)

    def sent(own: Weights, x: Any) -> Any:
        flat = x.reshape(tokens, width)
        chances = jax.nn.softmax((flat @ own["router"]).astype(jnp.float32))
        chosen = jnp.argmax(chances, -1)
        rank = jnp.cumsum(jax.nn.one_hot(chosen, experts, dtype=jnp.int32), 0)[jnp.arange(tokens), chosen] - 1
        place = jnp.where(rank < room, chosen * room + rank, experts * room)
        given = jnp.zeros((experts * room, width), LOW).at[place].set(flat, mode="drop").reshape(experts, room, width)
        made = jnp.einsum("eth,ehw->etw", jax.nn.gelu(jnp.einsum("etw,ewh->eth", given, own["up"])), own["down"])
        found = made.reshape(-1, width).at[place].get(mode="fill", fill_value=0)
        return (found * jnp.max(chances, -1)[:, None].astype(LOW)).reshape(x.shape)

    def loss(weights: Weights, words: Any) -> Any:
        x = weights["table"].astype(LOW)[words]
        bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)
        for one in map(_low, weights["layers"]):
            y = _norm(x, one["n1"])
            x = x + _mixed(one, y, y, 16, bias)
            x = x + sent(one, _norm(x, one["n2"]))
        return _cross_entropy(x[:, :-1] @ weights["head"].astype(LOW), words[:, 1:])

    block = {**dict.fromkeys("qkvo", (width, width)), "router": (width, experts), "n1": (width,), "n2": (width,)}
    block |= {"up": (experts, width, 4 * width), "down": (experts, 4 * width, width)}
    weights = _arrays({"table": (32000, width), "head": (width, 32000), "layers": [block] * layers})
    return *_adam(loss, weights, _ints(batch, length)), 32000


PROGRAMS: dict[str, Callable[..., Program]] = {
    "bert": bert,
    "grouped": grouped,
    "windows": windows,
    "gated-units": gated_units,
    "retention": retention,
    "slim-convolutions": slim_convolutions,
    "waves": waves,
    "clicks": clicks,
    "attending-graph": attending_graph,
    "rays": rays,
    "towers": towers,
    "segments": segments,
    "latents": latents,
    "speech": speech,
    "switched": switched,
    "switched-wide": partial(switched, layers=2, width=1536, experts=4, each=4),
}
"""Name to the function of the number of devices."""

SHALLOW: dict[str, dict[str, Any]] = {
    "bert": {"layers": 2, "each": 16},
    "grouped": {"layers": 2, "each": 2},
    "windows": {"layers": 2, "each": 16},
    "gated-units": {"layers": 2, "each": 16},
    "retention": {"layers": 2, "each": 4},
    "slim-convolutions": {"depth": 1, "each": 64},
    "waves": {"layers": 6, "each": 4},
    "clicks": {"tables": 8, "each": 8192},
    "attending-graph": {"rounds": 2, "each": 20000},
    "rays": {"depth": 6, "each": 1024},
    "towers": {"layers": 2, "each": 128},
    "segments": {"widths": (64, 128, 256), "each": 4},
    "latents": {"layers": 2, "each": 4},
    "speech": {"layers": 2, "each": 8},
    "switched": {"layers": 1, "each": 4},
    "switched-wide": {"layers": 1, "each": 2},
}
"""Sizes with few layers, which compile fast."""

"""Training steps on plain pytrees that no price was tuned on: convolutions, attention of odd lengths, graphs, recurrence.

Each program is a function of the number of devices, over which its batch grows, and returns a step, its abstract arguments, and the
least number that is no index. Adam updates float32 weights; products are in bfloat16 unless a program says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import plan_programs
from benchmarks.plan_programs import _adam, _arrays, _block_shapes, _cross_entropy, _gated, _norm

Program = tuple[Callable[..., Any], tuple[Any, ...], int]
Weights = dict[str, Any]
LOW = jnp.bfloat16


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "int32")


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def _conv(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=dims, feature_group_count=groups)


def _batch_norm(x: Any, weights: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean, square = jnp.mean(wide, (0, 1, 2)), jnp.mean(wide * wide, (0, 1, 2))
    return ((wide - mean) * lax.rsqrt(square - mean * mean + 1e-5) * weights[0] + weights[1]).astype(x.dtype)


def resnet(devices: int, depths: tuple[int, ...] = (2, 2, 3, 2), each: int = 256) -> Program:
    """Bottlenecks on pictures of 224, with statistics of the batch (ResNet)."""
    batch = each * devices

    def block(weights: Weights, x: Any, stride: int) -> Any:
        y = jax.nn.relu(_batch_norm(_conv(x, weights["in"]), weights["n1"]))
        y = jax.nn.relu(_batch_norm(_conv(y, weights["mid"], stride), weights["n2"]))
        y = _batch_norm(_conv(y, weights["out"]), weights["n3"])
        return jax.nn.relu(y + (_batch_norm(_conv(x, weights["skip"], stride), weights["n4"]) if "skip" in weights else x))

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        x = jax.nn.relu(_batch_norm(_conv(pictures.astype(LOW), weights["stem"], 2), weights["n0"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for level, stage in enumerate(weights["stages"]):
            for place, one in enumerate(stage):
                x = block(one, x, 2 if level and not place else 1)
        return _cross_entropy(jnp.mean(x, (1, 2)).astype(jnp.float32) @ weights["head"], labels)

    def shapes(taken: int, inner: int) -> dict[str, tuple[int, ...]]:
        found = {"in": (1, 1, taken, inner), "mid": (3, 3, inner, inner), "out": (1, 1, inner, 4 * inner)}
        found |= {"n1": (2, inner), "n2": (2, inner), "n3": (2, 4 * inner)}
        return found | ({"skip": (1, 1, taken, 4 * inner), "n4": (2, 4 * inner)} if taken != 4 * inner else {})

    stages, taken = [], 64
    for level, depth in enumerate(depths):
        inner = 64 * 2**level
        stages.append([shapes(taken if not place else 4 * inner, inner) for place in range(depth)])
        taken = 4 * inner
    weights = _arrays({"stem": (7, 7, 3, 64), "n0": (2, 64), "stages": stages, "head": (taken, 1000)})
    return *_adam(loss, weights, _floats(batch, 224, 224, 3), _ints(batch)), 1000


def convnext(devices: int, depths: tuple[int, ...] = (2, 2, 4, 2), each: int = 192) -> Program:
    """Depthwise convolutions of 7 x 7 and wide pointwise products, with layer normalisation (ConvNeXt)."""
    batch = each * devices

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        x = _conv(pictures.astype(LOW), weights["stem"], 4)
        for stage in weights["stages"]:
            if "down" in stage:
                x = _conv(_norm(x, stage["n"].astype(LOW)), stage["down"], 2)
            for one in stage["blocks"]:
                y = _norm(_conv(x, one["deep"], groups=x.shape[-1]), one["n"].astype(LOW))
                x = x + one["scale"].astype(LOW) * (jax.nn.gelu(y @ one["up"].astype(LOW)) @ one["down"].astype(LOW))
        return _cross_entropy(jnp.mean(x, (1, 2)).astype(jnp.float32) @ weights["head"], labels)

    stages: list[Any] = []
    for level, depth in enumerate(depths):
        width = 96 * 2**level
        block = {"deep": (7, 7, 1, width), "n": (width,), "up": (width, 4 * width), "down": (4 * width, width), "scale": (width,)}
        joint = {"n": (width // 2,), "down": (2, 2, width // 2, width)} if level else {}
        stages.append({"blocks": [block] * depth, **joint})
    weights = _arrays({"stem": (4, 4, 3, 96), "stages": stages, "head": (96 * 2 ** (len(depths) - 1), 1000)})
    return *_adam(loss, weights, _floats(batch, 224, 224, 3), _ints(batch)), 1000


def _mixed(weights: Weights, x: Any, other: Any, heads: int, bias: Any = None, prefix: str = "") -> Any:
    """Attention of `x` [batch, queries, width] to `other` [batch, keys, width], with an additive bias [heads, queries, keys]."""
    query = (x @ weights[prefix + "q"].astype(x.dtype)).reshape(*x.shape[:2], heads, -1)
    key, value = ((other @ weights[prefix + name].astype(x.dtype)).reshape(*other.shape[:2], heads, -1) for name in "kv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    chances = jax.nn.softmax(scores if bias is None else scores + bias).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", chances, value).reshape(*x.shape[:2], -1) @ weights[prefix + "o"].astype(x.dtype)


def vit197(devices: int, layers: int = 8, width: int = 768, heads: int = 12, each: int = 96) -> Program:
    """A vision transformer whose class token makes the length odd: 197."""
    batch = each * devices

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        patches = pictures.reshape(batch, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 196, 768).astype(LOW)
        first = jnp.broadcast_to(weights["class"].astype(LOW), (batch, 1, width))
        x = jnp.concatenate([first, patches @ weights["patch"].astype(LOW)], 1) + weights["place"].astype(LOW)
        for one in weights["layers"]:
            y = _norm(x, one["n1"].astype(LOW))
            x = x + _mixed(one, y, y, heads)
            y = jax.nn.gelu(_norm(x, one["n2"].astype(LOW)) @ one["up"].astype(LOW) + one["bias"].astype(LOW))
            x = x + y @ one["down"].astype(LOW)
        return _cross_entropy(x[:, 0].astype(jnp.float32) @ weights["head"], labels)

    block = {**_block_shapes(width, 4 * width), "bias": (4 * width,)}
    del block["gate"]
    shapes = {"class": (width,), "patch": (768, width), "place": (197, width), "head": (width, 1000), "layers": [block] * layers}
    return *_adam(loss, _arrays(shapes), _floats(batch, 224, 224, 3), _ints(batch)), 1000


def _group_norm(x: Any, weights: Any, groups: int = 32) -> Any:
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    mean, square = jnp.mean(wide, (1, 2, 4), keepdims=True), jnp.mean(wide * wide, (1, 2, 4), keepdims=True)
    return (((wide - mean) * lax.rsqrt(square - mean * mean + 1e-5)).reshape(x.shape) * weights[0] + weights[1]).astype(x.dtype)


def diffusion(devices: int, widths: tuple[int, ...] = (192, 384, 384), image: int = 64, each: int = 64) -> Program:
    """A U-Net with attention at its lowest level, as diffusion models of pictures have."""
    batch = each * devices

    def block(weights: Weights, x: Any, time: Any) -> Any:
        y = _conv(jax.nn.silu(_group_norm(x, weights["n1"])), weights["c1"]) + (time @ weights["time"].astype(LOW))[:, None, None]
        y = _conv(jax.nn.silu(_group_norm(y, weights["n2"])), weights["c2"])
        return y + (_conv(x, weights["skip"]) if "skip" in weights else x)

    def attend(weights: Weights, x: Any) -> Any:
        y = _group_norm(x, weights["n"]).reshape(batch, -1, x.shape[-1])
        return x + _mixed(weights, y, y, x.shape[-1] // 64).reshape(x.shape)

    def loss(weights: Weights, pictures: Any, times: Any, noise: Any) -> Any:
        waves = times[:, None] * jnp.exp(-jnp.arange(96) / 12.0)
        time = jax.nn.silu(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1) @ weights["time"]).astype(LOW)
        x, skips = _conv((pictures + times[:, None, None, None] * noise).astype(LOW), weights["first"]), []
        for one in weights["levels"][:-1]:
            x = block(one["down"], x, time)
            skips.append(x)
            x = _conv(x, one["shrink"], 2)
        x = block(weights["levels"][-1]["down"], attend(weights["attention"], block(weights["levels"][-1]["middle"], x, time)), time)
        for one in reversed(weights["levels"][:-1]):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(one["up"], jnp.concatenate([_conv(x, one["grow"]), skips.pop()], -1), time)
        return jnp.mean((_conv(jax.nn.silu(x), weights["last"]).astype(jnp.float32) - noise) ** 2)

    def shapes(taken: int, made: int) -> dict[str, tuple[int, ...]]:
        found = {"n1": (2, taken), "c1": (3, 3, taken, made), "n2": (2, made), "c2": (3, 3, made, made), "time": (768, made)}
        return found | ({"skip": (1, 1, taken, made)} if taken != made else {})

    levels: list[Any] = [
        {"down": shapes(one, one), "shrink": (3, 3, one, two), "grow": (3, 3, two, one), "up": shapes(2 * one, one)}
        for one, two in pairwise(widths)
    ]
    last = widths[-1]
    levels.append({"down": shapes(last, last), "middle": shapes(last, last)})
    attention = {**dict.fromkeys("qkvo", (last, last)), "n": (2, last)}
    edges = {"time": (192, 768), "first": (3, 3, 3, widths[0]), "last": (3, 3, widths[0], 3)}
    weights = _arrays({**edges, "levels": levels, "attention": attention})
    pictures = _floats(batch, image, image, 3)
    return *_adam(loss, weights, pictures, _floats(batch), pictures), 1000


def graph(devices: int, rounds: int = 3, width: int = 128, each: int = 120000, degree: int = 12) -> Program:
    """Messages along the edges of a graph, summed at their receivers with segment_sum, in float32."""
    nodes, edges = each * devices, each * devices * degree

    def loss(weights: Weights, features: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        x = features @ weights["in"]
        for one in weights["rounds"]:
            messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ one["send"] + one["bias"]) @ one["out"]
            heard = jax.ops.segment_sum(messages, receivers, num_segments=nodes)
            x = _norm(x + jax.nn.relu(jnp.concatenate([x, heard], -1) @ one["up"]) @ one["down"], one["n"])
        return _cross_entropy(x @ weights["head"], labels % 47)

    block = {"send": (2 * width, width), "bias": (width,), "out": (width, width), "up": (2 * width, width), "down": (width, width)}
    shapes = {"in": (100, width), "rounds": [{**block, "n": (width,)}] * rounds, "head": (width, 47)}
    return *_adam(loss, _arrays(shapes), _floats(nodes, 100), _ints(edges), _ints(edges), _ints(nodes)), nodes


def lstm(devices: int, layers: int = 2, width: int = 1024, length: int = 128, each: int = 256) -> Program:
    """Recurrent layers over words, one scan each."""
    batch = each * devices

    def layer(weights: Weights, x: Any) -> Any:
        inputs = x @ weights["in"].astype(LOW) + weights["bias"].astype(LOW)
        own = weights["own"].astype(LOW)

        def cell(carry: Any, given: Any) -> Any:
            hidden, memory = carry
            enter, forget, new, leave = jnp.split(given + hidden @ own, 4, -1)
            memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
            return (hidden, memory), hidden

        start = jnp.zeros((batch, width), LOW)
        return lax.scan(cell, (start, start), inputs)[1]

    def loss(weights: Weights, words: Any) -> Any:
        words = words.T
        x = weights["table"].astype(LOW)[words[:-1]]
        for one in weights["layers"]:
            x = layer(one, x)
        return _cross_entropy(x @ weights["head"].astype(LOW), words[1:])

    block = {"in": (width, 4 * width), "own": (width, 4 * width), "bias": (4 * width,)}
    weights = _arrays({"table": (10000, width), "layers": [block] * layers, "head": (width, 10000)})
    return *_adam(loss, weights, _ints(batch, length + 1)), 10000


def translator(devices: int, layers: int = 3, width: int = 768, heads: int = 12, length: int = 512, each: int = 24) -> Program:
    """An encoder and a decoder with one bias by distance each, as T5 has."""
    batch = each * devices

    def bias_of(table: Any, *, causal: bool) -> Any:
        apart = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        bias = table[jnp.clip(apart // 16, -15, 16) + 15].transpose(2, 0, 1)
        return jnp.where(apart < 0, -1e9, bias) if causal else bias

    def run(weights: Weights, x: Any, bias: Any, known: Any = None) -> Any:
        y = _norm(x, weights["n1"].astype(LOW))
        x = x + _mixed(weights, y, y, heads, bias)
        if known is not None:
            x = x + _mixed(weights, _norm(x, weights["n3"].astype(LOW)), known, heads, prefix="cross_")
        return x + _gated(weights, _norm(x, weights["n2"].astype(LOW)))

    def loss(weights: Weights, words: Any, target: Any) -> Any:
        table = weights["table"].astype(LOW)
        x = table[words]
        for one in weights["encoder"]:
            x = run(one, x, bias_of(weights["near"], causal=False))
        y = table[target]
        for one in weights["decoder"]:
            y = run(one, y, bias_of(weights["past"], causal=True), x)
        return _cross_entropy(y[:, :-1] @ weights["head"].astype(LOW), target[:, 1:])

    block = _block_shapes(width, 2048)
    crossed = {**block, **{f"cross_{name}": (width, width) for name in "qkvo"}, "n3": (width,)}
    shapes: dict[str, Any] = {"table": (32128, width), "head": (width, 32128), "near": (32, heads), "past": (32, heads)}
    shapes |= {"encoder": [block] * layers, "decoder": [crossed] * layers}
    return *_adam(loss, _arrays(shapes), _ints(batch, length), _ints(batch, length)), 32128


def dit(devices: int, layers: int = 6, each: int = 24) -> Program:
    """A diffusion transformer in float32."""
    return *plan_programs.dit(each * devices, layers=layers), 1000


def evoformer(devices: int, blocks: int = 2, each: int = 2) -> Program:
    """Pairs and alignments in float32, each block computed again."""
    return *plan_programs.evoformer(each * devices, blocks=blocks), 23


def mixer(devices: int, layers: int = 6, width: int = 768, each: int = 96) -> Program:
    """Products along the patches and along the features in turn, with layers' biases (MLP-Mixer)."""
    batch = each * devices

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        patches = pictures.reshape(batch, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 196, 768).astype(LOW)
        x = patches @ weights["patch"].astype(LOW)
        for one in weights["layers"]:
            low = jax.tree.map(lambda leaf: leaf.astype(LOW), one)
            y = _norm(x, low["n1"]).swapaxes(1, 2)
            x = x + (jax.nn.gelu(y @ low["along"] + low["b1"]) @ low["back"]).swapaxes(1, 2)
            x = x + jax.nn.gelu(_norm(x, low["n2"]) @ low["up"] + low["b2"]) @ low["down"]
        return _cross_entropy(jnp.mean(x.astype(jnp.float32), 1) @ weights["head"], labels)

    block = {"along": (196, 384), "back": (384, 196), "b1": (384,), "n1": (width,), "n2": (width,)}
    block |= {"up": (width, 4 * width), "down": (4 * width, width), "b2": (4 * width,)}
    shapes = {"patch": (768, width), "head": (width, 1000), "layers": [block] * layers}
    return *_adam(loss, _arrays(shapes), _floats(batch, 224, 224, 3), _ints(batch)), 1000


def decoder(devices: int, layers: int = 6, each: int = 6) -> Program:
    """A LLaMA-like decoder whose scanned layers are computed again."""
    return *plan_programs.decoder(each * devices, layers, 1024, 2816, 16, scan=True), 32000


def moe(devices: int, layers: int = 2, each: int = 6) -> Program:
    """A decoder with a choice of two experts of sixteen."""
    return *plan_programs.moe(each * devices, layers=layers, features=1024), 32000


def mamba(devices: int, layers: int = 2, each: int = 2) -> Program:
    """Selective state spaces in float32, by associative scans."""
    return *plan_programs.mamba(each * devices, layers=layers), 32000


PROGRAMS: dict[str, Callable[..., Program]] = {
    "resnet": resnet,
    "convnext": convnext,
    "vit197": vit197,
    "dit": dit,
    "diffusion": diffusion,
    "graph": graph,
    "lstm": lstm,
    "translator": translator,
    "evoformer": evoformer,
    "mixer": mixer,
    "decoder": decoder,
    "moe": moe,
    "mamba": mamba,
}
"""Name to the function of the number of devices."""

SHALLOW: dict[str, dict[str, Any]] = {
    "resnet": {"depths": (1, 1, 1, 1), "each": 64},
    "convnext": {"depths": (1, 1, 1, 1), "each": 32},
    "vit197": {"layers": 2, "each": 64},
    "dit": {"layers": 2, "each": 16},
    "diffusion": {"widths": (128, 256), "each": 16},
    "graph": {"rounds": 2, "each": 20000},
    "lstm": {"layers": 1, "each": 128},
    "translator": {"layers": 1, "each": 8},
    "evoformer": {"blocks": 1, "each": 1},
    "mixer": {"layers": 2, "each": 64},
    "decoder": {"layers": 2, "each": 2},
    "moe": {"layers": 1, "each": 2},
    "mamba": {"layers": 1, "each": 1},
}
"""Sizes with few layers, which compile fast."""


def values_of(arguments: Any, limit: int) -> Any:
    """Small normal values and random indices below `limit`, on the device."""
    leaves, tree = jax.tree.flatten(arguments)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def made(key: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            # Second moments are not negative.
            return jnp.abs(0.02 * jax.random.normal(key, leaf.shape, leaf.dtype))
        return jax.random.randint(key, leaf.shape, 0, limit, jnp.int32).astype(leaf.dtype)

    return jax.tree.unflatten(tree, [made(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])

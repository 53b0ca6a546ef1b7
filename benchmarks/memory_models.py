"""Ten small models whose peaks of memory no rule was made on: losses and the shapes of their parameters, in two halves.

What the interval of a plan's peak rests on comes from the first half (`TUNING`); the other (`UNTOUCHED`) says how good it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = dict[str, Any]
Sizes = Mapping[str, int]


class Model(NamedTuple):
    """The shapes of parameters and batches for given sizes, the loss, and two sets of sizes."""

    shapes: Callable[[Sizes], Tree]
    batch: Callable[[Sizes], tuple[tuple[tuple[int, ...], str], ...]]
    loss: Callable[..., jax.Array]
    sizes: tuple[Sizes, Sizes]
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adamw(1e-3)


def program(name: str, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The training step of a model and its abstract arguments: the state, then the batch."""
    model = MODELS[name]
    sizes, optimizer = model.sizes[size], model.optimizer()

    def step(state: Any, *batch: Any) -> Any:
        params, memory = state
        loss, gradients = jax.value_and_grad(model.loss)(params, *batch)
        updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in model.shapes(sizes).items()}
    batch = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in model.batch(sizes))
    return step, ((params, jax.eval_shape(optimizer.init, params)), *batch)


def _bf16(params: Tree) -> Tree:
    return {name: leaf.astype(jnp.bfloat16) for name, leaf in params.items()}


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _crossed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def _split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _joined(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def _causal(length: int) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def _rnn(params: Tree, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens].swapaxes(0, 1)
    for layer in range(2):

        def cell(hidden: jax.Array, own: jax.Array, layer: int = layer) -> tuple[jax.Array, jax.Array]:
            hidden = jnp.tanh(own @ params[f"cell{layer}_in"] + hidden @ params[f"cell{layer}_again"] + params[f"cell{layer}_bias"])
            return hidden, hidden

        x = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]
    return _crossed((x @ params["head_in"])[:-1], tokens.T[1:])


def _rnn_shapes(s: Sizes) -> Tree:
    cells = {f"cell{layer}_{part}": (s["w"], s["w"]) for layer in range(2) for part in ("in", "again")}
    biases = {f"cell{layer}_bias": (s["w"],) for layer in range(2)}
    return {"embed": (s["v"], s["w"]), **cells, **biases, "head_in": (s["w"], s["v"])}


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _resnet(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    own = _bf16(params)
    x = _conv(images.astype(jnp.bfloat16), own["stem"])
    for block in range(3):
        inner = jax.nn.relu(_norm(_conv(x, own[f"block{block}_in"], 1 + (block > 0)), own[f"block{block}_scale"]))
        inner = _conv(inner, own[f"block{block}_out"])
        x = jax.nn.relu(inner + (x if block == 0 else _conv(x, own[f"block{block}_skip"], 2)))
    return _crossed(jnp.mean(x, (1, 2)) @ own["head_in"], labels)


def _resnet_shapes(s: Sizes) -> Tree:
    found: Tree = {"stem": (3, 3, 3, s["c"]), "head_in": (4 * s["c"], 1024)}
    for block in range(3):
        before, now = s["c"] * 2 ** max(0, block - 1), s["c"] * 2**block
        found |= {f"block{block}_in": (3, 3, before, now), f"block{block}_out": (3, 3, now, now), f"block{block}_scale": (now,)}
        found |= {f"block{block}_skip": (1, 1, before, now)} if block else {}
    return found


def _gqa(params: Tree, tokens: jax.Array) -> jax.Array:
    heads, groups = 16, 4
    own = _bf16(params)
    mask = _causal(tokens.shape[1])

    @jax.checkpoint
    def layer(x: jax.Array, at: Tree) -> tuple[jax.Array, None]:
        y = _norm(x, at["scale"])
        q, k, v = (_split(y @ at[name], count) for name, count in (("q_in", heads), ("k_in", groups), ("v_in", groups)))
        k, v = (jnp.repeat(each, heads // groups, axis=-2) for each in (k, v))
        x = x + _joined(_attend(q, k, v, mask)) @ at["o_out"]
        y = _norm(x, at["scale"])
        return x + (jax.nn.silu(y @ at["gate_in"]) * (y @ at["up_in"])) @ at["down_out"], None

    stacked = {name.removeprefix("layers_"): leaf for name, leaf in own.items() if name.startswith("layers_")}
    x = jax.lax.scan(layer, own["embed"][tokens], stacked)[0]
    return _crossed((x @ own["head_in"])[:, :-1], tokens[:, 1:])


def _gqa_shapes(s: Sizes) -> Tree:
    w, n = s["w"], s["n"]
    layers = {"q_in": (n, w, w), "k_in": (n, w, w // 4), "v_in": (n, w, w // 4), "o_out": (n, w, w), "scale": (n, w)}
    layers |= {"gate_in": (n, w, 3 * w), "up_in": (n, w, 3 * w), "down_out": (n, 3 * w, w)}
    return {"embed": (s["v"], w), "head_in": (w, s["v"]), **{f"layers_{name}": shape for name, shape in layers.items()}}


def _dlrm(params: Tree, dense: jax.Array, sparse: jax.Array, clicks: jax.Array) -> jax.Array:
    x = jax.nn.relu(dense @ params["bottom0_in"])
    x = jax.nn.relu(x @ params["bottom1_out"])
    rows = [params[f"table{place}"][sparse[:, place]] for place in range(6)]
    vectors = jnp.stack([x, *rows], axis=1)
    pairs = jnp.einsum("bik,bjk->bij", vectors, vectors).reshape(x.shape[0], -1)
    top = jax.nn.relu(jnp.concatenate([x, pairs], -1) @ params["top0_in"])
    top = jax.nn.relu(top @ params["top1_out"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(top @ params["last"], clicks))


def _dlrm_shapes(s: Sizes) -> Tree:
    tables = {f"table{place}": (s["rows"], s["k"]) for place in range(6)}
    top = {"top0_in": (s["k"] + 49, s["h"]), "top1_out": (s["h"], 512), "last": (512,)}
    return {**tables, "bottom0_in": (16, s["h"]), "bottom1_out": (s["h"], s["k"]), **top}


def _gnn(params: Tree, nodes: jax.Array, edges: jax.Array, sources: jax.Array, targets: jax.Array, labels: jax.Array) -> jax.Array:
    x = nodes @ params["start_in"]
    for layer in range(2):
        sent = jax.nn.relu(x[sources] @ params[f"send{layer}_in"] + edges @ params[f"edge{layer}_in"])
        got = jax.ops.segment_sum(sent @ params[f"send{layer}_out"], targets, x.shape[0])
        x = x + jax.nn.gelu(got @ params[f"get{layer}_in"]) @ params[f"get{layer}_out"]
    return _crossed(x @ params["head_in"], labels)


def _gnn_shapes(s: Sizes) -> Tree:
    w = s["w"]
    found: Tree = {"start_in": (64, w), "head_in": (w, 512)}
    for layer in range(2):
        found |= {f"send{layer}_in": (w, 2 * w), f"edge{layer}_in": (32, 2 * w), f"send{layer}_out": (2 * w, w)}
        found |= {f"get{layer}_in": (w, 4 * w), f"get{layer}_out": (4 * w, w)}
    return found


def _t5(params: Tree, source: jax.Array, target: jax.Array) -> jax.Array:
    own = _bf16(params)

    def attention(name: str, x: jax.Array, read: jax.Array, bias: jax.Array | None) -> jax.Array:
        q, k, v = _split(x @ own[f"{name}_q_in"], 8), _split(read @ own[f"{name}_k_in"], 8), _split(read @ own[f"{name}_v_in"], 8)
        return _joined(_attend(q, k, v, bias)) @ own[f"{name}_o_out"]

    def hidden(name: str, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(_norm(x, own["scale"]) @ own[f"{name}_up_in"]) @ own[f"{name}_down_out"]

    x, y = own["embed"][source], own["embed"][target]
    distance = jnp.clip(jnp.arange(source.shape[1])[:, None] - jnp.arange(source.shape[1]) + 32, 0, 63)
    bias = jnp.moveaxis(params["bias"][distance], -1, 0)
    for layer in range(2):
        n = _norm(x, own["scale"])
        x = hidden(f"enc{layer}", x + attention(f"enc{layer}", n, n, bias))
    for layer in range(2):
        n = _norm(y, own["scale"])
        y = y + attention(f"dec{layer}", n, n, _causal(target.shape[1]))
        y = hidden(f"dec{layer}", y + attention(f"cross{layer}", _norm(y, own["scale"]), x, None))
    return _crossed((y @ own["embed"].T)[:, :-1], target[:, 1:])


def _t5_shapes(s: Sizes) -> Tree:
    w = s["w"]
    names = [f"{kind}{layer}" for kind in ("enc", "dec", "cross") for layer in range(2)]
    found: Tree = {f"{name}_{part}": (w, w) for name in names for part in ("q_in", "k_in", "v_in", "o_out")}
    for name in (own for own in names if not own.startswith("cross")):
        found |= {f"{name}_up_in": (w, 4 * w), f"{name}_down_out": (4 * w, w)}
    return {"embed": (s["v"], w), "scale": (w,), "bias": (64, 8), **found}


def _mamba(params: Tree, tokens: jax.Array) -> jax.Array:
    own = _bf16(params)
    x = own["embed"][tokens]
    for layer in range(2):
        at = {name.removeprefix(f"m{layer}_"): leaf for name, leaf in own.items() if name.startswith(f"m{layer}_")}
        x = x + jax.checkpoint(_mixed)(at, _norm(x, at["scale"]))
    return _crossed((x @ own["head_in"])[:, :-1], tokens[:, 1:])


def _mixed(at: Tree, x: jax.Array) -> jax.Array:
    u, gate = x @ at["u_in"], x @ at["gate_in"]
    u = jax.nn.silu(sum(jnp.pad(u, ((0, 0), (tap, 0), (0, 0)))[:, : u.shape[1]] * at["taps"][tap] for tap in range(4)))
    step = jax.nn.softplus((u @ at["step_in"]).astype(jnp.float32))
    reads, writes = u @ at["b"], u @ at["c"]
    decays = jnp.exp(-step)
    chunks = [each.reshape(each.shape[0], -1, 64, each.shape[-1]).swapaxes(0, 1) for each in (decays, step * u, reads, writes)]

    def chunk(carry: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        decay, given, read, write = part
        inner = jnp.einsum("btd,btn->btdn", given, read.astype(jnp.float32))
        spread = jnp.broadcast_to(decay[..., None], inner.shape)
        decay, inner = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (spread, inner), axis=1)
        inner = inner + decay * carry[:, None]
        return inner[:, -1], jnp.einsum("btdn,btn->btd", inner, write.astype(jnp.float32))

    start = jnp.zeros((x.shape[0], u.shape[-1], reads.shape[-1]))
    y = jax.lax.scan(jax.checkpoint(chunk), start, tuple(chunks))[1].swapaxes(0, 1).reshape(u.shape)
    return (y.astype(x.dtype) * jax.nn.silu(gate)) @ at["o_out"]


def _mamba_shapes(s: Sizes) -> Tree:
    w = s["w"]
    layer = {"u_in": (w, 2 * w), "gate_in": (w, 2 * w), "taps": (4, 2 * w), "step_in": (2 * w, 2 * w), "b": (2 * w, 4), "c": (2 * w, 4)}
    layer |= {"o_out": (2 * w, w), "scale": (w,)}
    return {"embed": (s["v"], w), "head_in": (w, s["v"]), **{f"m{n}_{name}": shape for n in range(2) for name, shape in layer.items()}}


def _unet(params: Tree, images: jax.Array, noise: jax.Array) -> jax.Array:
    x, skips = _conv(images, params["stem"]), []
    for level in range(2):
        x = jax.nn.silu(_conv(_norm(x, params[f"down{level}_scale"]), params[f"down{level}_in"]))
        skips.append(x)
        x = _conv(x, params[f"down{level}_out"], 2)
    x = jax.nn.silu(_conv(x, params["middle_in"]))
    for level in (1, 0):
        x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
        x = jax.nn.silu(_conv(jnp.concatenate([x, skips[level]], -1), params[f"up{level}_in"]))
    return jnp.mean((_conv(x, params["last"]) - noise) ** 2)


def _unet_shapes(s: Sizes) -> Tree:
    c = s["c"]
    found: Tree = {"stem": (3, 3, 4, c), "middle_in": (3, 3, 4 * c, 4 * c), "last": (3, 3, c, 4)}
    for level in range(2):
        own = c * 2**level
        found |= {f"down{level}_scale": (own,), f"down{level}_in": (3, 3, own, own), f"down{level}_out": (3, 3, own, 2 * own)}
        found |= {f"up{level}_in": (3, 3, 3 * own, own)}
    return found


def _evoformer(params: Tree, pairs: jax.Array, wanted: jax.Array) -> jax.Array:
    own = _bf16(params)
    x = pairs.astype(jnp.bfloat16) @ own["start_in"]
    for layer in range(2):
        n = _norm(x, own["scale"])
        left, right, gate = (jax.nn.sigmoid(n @ own[f"l{layer}_{name}_in"]) for name in ("left", "right", "gate"))
        x = x + (gate * jnp.einsum("bikc,bjkc->bijc", left, right)) @ own[f"l{layer}_mul_out"]
        n = _norm(x, own["scale"])
        q, k, v = (_split(n @ own[f"l{layer}_{name}_in"], 4) for name in "qkv")
        x = x + _joined(_attend(q, k, v)) @ own[f"l{layer}_o_out"]
        x = x + jax.nn.relu(_norm(x, own["scale"]) @ own[f"l{layer}_up_in"]) @ own[f"l{layer}_down_out"]
    return jnp.mean((x @ own["head_in"] - wanted) ** 2)


def _evoformer_shapes(s: Sizes) -> Tree:
    c = s["c"]
    found: Tree = {"start_in": (32, c), "scale": (c,), "head_in": (c, 64)}
    for layer in range(2):
        found |= {f"l{layer}_{name}": (c, c) for name in ("left_in", "right_in", "gate_in", "mul_out", "q_in", "k_in", "v_in", "o_out")}
        found |= {f"l{layer}_up_in": (c, 4 * c), f"l{layer}_down_out": (4 * c, c)}
    return found


def _dit(params: Tree, patches: jax.Array, times: jax.Array, noise: jax.Array) -> jax.Array:
    own = _bf16(params)
    x = patches.astype(jnp.bfloat16) @ own["start_in"]
    known = jax.nn.silu(jnp.sin(times[:, None] * jnp.arange(1.0, 129.0)).astype(jnp.bfloat16) @ own["time_in"])

    def layer(x: jax.Array, at: Tree) -> tuple[jax.Array, None]:
        shift, scale, gate = jnp.split((known @ at["change_in"])[:, None], 3, axis=-1)
        n = _norm(x, jnp.ones(x.shape[-1])) * (1 + scale) + shift
        q, k, v = (_split(n @ at[f"{name}_in"], 8) for name in "qkv")
        x = x + gate * (_joined(_attend(q, k, v)) @ at["o_out"])
        return x + gate * (jax.nn.gelu((x * (1 + scale) + shift) @ at["up_in"]) @ at["down_out"]), None

    stacked = {name.removeprefix("layers_"): leaf for name, leaf in own.items() if name.startswith("layers_")}
    x = jax.lax.scan(layer, x, stacked)[0]
    return jnp.mean((x @ own["head_in"] - noise) ** 2)


def _dit_shapes(s: Sizes) -> Tree:
    w, n = s["w"], s["n"]
    layers = {"change_in": (n, w, 3 * w), "up_in": (n, w, 4 * w), "down_out": (n, 4 * w, w), "o_out": (n, w, w)}
    layers |= {f"{name}_in": (n, w, w) for name in "qkv"}
    return {"start_in": (64, w), "time_in": (128, w), "head_in": (w, 64), **{f"layers_{name}": shape for name, shape in layers.items()}}


def _tokens(*names: str) -> Callable[[Sizes], tuple[tuple[tuple[int, ...], str], ...]]:
    return lambda s: tuple(((s["b"], s[name]), "int32") for name in names)


TUNING: dict[str, Model] = {
    "rnn": Model(_rnn_shapes, _tokens("t"), _rnn, ({"w": 1024, "v": 8192, "b": 512, "t": 64}, {"w": 1536, "v": 4096, "b": 768, "t": 48})),
    "resnet": Model(
        _resnet_shapes,
        lambda s: (((s["b"], s["i"], s["i"], 3), "float32"), ((s["b"],), "int32")),
        _resnet,
        ({"c": 128, "b": 256, "i": 32}, {"c": 64, "b": 384, "i": 48}),
        lambda: optax.sgd(0.1, momentum=0.9),
    ),
    "gqa": Model(
        _gqa_shapes,
        _tokens("t"),
        _gqa,
        ({"w": 1024, "v": 8192, "n": 4, "b": 32, "t": 512}, {"w": 1280, "v": 16384, "n": 3, "b": 16, "t": 768}),
    ),
    "dlrm": Model(
        _dlrm_shapes,
        lambda s: (((s["b"], 16), "float32"), ((s["b"], 6), "int32"), ((s["b"],), "float32")),
        _dlrm,
        ({"rows": 65536, "k": 64, "h": 1024, "b": 32768}, {"rows": 98304, "k": 32, "h": 2048, "b": 65536}),
    ),
    "gnn": Model(
        _gnn_shapes,
        lambda s: (
            ((s["b"], 64), "float32"),
            ((8 * s["b"], 32), "float32"),
            ((8 * s["b"],), "int32"),
            ((8 * s["b"],), "int32"),
            ((s["b"],), "int32"),
        ),
        _gnn,
        ({"w": 256, "b": 32768}, {"w": 384, "b": 24576}),
    ),
}
"""The half that the interval was chosen on."""

UNTOUCHED: dict[str, Model] = {
    "t5": Model(
        _t5_shapes,
        _tokens("t", "u"),
        _t5,
        ({"w": 1024, "v": 8192, "b": 32, "t": 512, "u": 256}, {"w": 768, "v": 16384, "b": 48, "t": 384, "u": 384}),
    ),
    "mamba": Model(
        _mamba_shapes,
        _tokens("t"),
        _mamba,
        ({"w": 768, "v": 8192, "b": 32, "t": 512}, {"w": 1024, "v": 4096, "b": 48, "t": 256}),
        lambda: optax.adam(1e-3),
    ),
    "unet": Model(
        _unet_shapes,
        lambda s: (((s["b"], s["i"], s["i"], 4), "float32"),) * 2,
        _unet,
        ({"c": 64, "b": 128, "i": 64}, {"c": 96, "b": 192, "i": 32}),
    ),
    "evoformer": Model(
        _evoformer_shapes,
        lambda s: (((s["b"], s["r"], s["r"], 32), "float32"), ((s["b"], s["r"], s["r"], 64), "float32")),
        _evoformer,
        ({"c": 128, "b": 16, "r": 128}, {"c": 256, "b": 24, "r": 96}),
    ),
    "dit": Model(
        _dit_shapes,
        lambda s: (((s["b"], s["t"], 64), "float32"), ((s["b"],), "float32"), ((s["b"], s["t"], 64), "float32")),
        _dit,
        ({"w": 1024, "n": 4, "b": 64, "t": 256}, {"w": 768, "n": 6, "b": 32, "t": 512}),
        lambda: optax.lion(1e-4),
    ),
}
"""The half that says how good it is."""

MODELS = {**TUNING, **UNTOUCHED}

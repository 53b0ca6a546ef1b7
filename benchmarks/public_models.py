"""Training programs in the manner of public projects, with the names that their rule tables give to dimensions, for `public_tables`.

Each is a function without arguments that returns a `Public`: plain JAX over pytrees, real widths, few layers. `use` stands where a
layer takes its weights, `mark` where a project pins a value; both leave values alone unless a table says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, Any]
Shapes = dict[str, Any]


class Marks:
    """Casts the weights that a layer takes, and pins nothing; tables derive from it."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def use(self, weights: Any) -> Any:
        """Weights as a layer uses them."""
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype), weights)

    def __call__(self, x: Any, names: str) -> Any:
        """A value, whose dimensions have these names."""
        return x

    def on_rows(self, fn: Callable[..., Any], weights: Weights, *rows: Any) -> Any:
        """`fn(marks, weights, *rows)`, in which no row of the batch depends on another."""
        return fn(self, weights, *rows)


@dataclass(frozen=True)
class Public:
    """A program.

    Attributes:
        loss: `loss(marks, weights, *batch)`.
        weights: shapes, in float32.
        names: the end of a weight's path to the names of its dimensions, of the last ones if it is stacked.
        batch: abstract arguments, each with the names of its dimensions.
        tensor: names that tensor parallelism splits, of weights and of values.
        dtype: of the computation.
    """

    loss: Callable[..., Any]
    weights: Shapes
    names: Mapping[str, str]
    batch: tuple[tuple[jax.ShapeDtypeStruct, str], ...]
    tensor: tuple[str, ...]
    dtype: str = "bfloat16"


def of(shape: tuple[int, ...], dtype: str, names: str) -> tuple[jax.ShapeDtypeStruct, str]:
    return jax.ShapeDtypeStruct(shape, dtype), names


def norm(x: Any, scale: Any, bias: Any = None) -> Any:
    x32 = x.astype(jnp.float32)
    if bias is not None:
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x = (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale
    return x if bias is None else x + bias


def _attention(mark: Marks, query: Any, key: Any, value: Any, heads: int, *, causal: bool = False) -> Any:
    """Of projections with all heads in the last dimension."""
    batch, length, features = query.shape
    query, key, value = (mark(x.reshape(batch, -1, heads, features // heads), "batch length heads .") for x in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / (features // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)
    return mark(mixed, "batch length heads .").reshape(batch, length, features)


def _self_attention(mark: Marks, weights: Weights, x: Any, heads: int, *, causal: bool = False) -> Any:
    return _attention(mark, *(x @ weights[name] for name in "qkv"), heads, causal=causal) @ weights["o"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


_STREAM = "batch length embed"
_SQUARE = {**dict.fromkeys(("q", "k", "v"), "embed heads"), "o": "heads embed"}
_MLP = {"up": "embed mlp", "gate": "embed mlp", "down": "mlp embed"}
_EDGES = {"table": "vocab embed", "head": "embed vocab"}


def _square(features: int) -> Shapes:
    return {**dict.fromkeys("qkvo", (features, features)), "n1": (features,), "n2": (features,)}


def _next_token(mark: Marks, weights: Weights, tokens: Any, layer: Callable[..., Any]) -> Any:
    """The loss of a language model of these layers, which are scanned if their weights are stacked."""
    edges = mark.use({name: weights[name] for name in ("table", "head")})
    x = mark(edges["table"][tokens[:, :-1]], _STREAM)

    def run(x: Any, one: Weights) -> Any:
        return mark(jax.checkpoint(layer)(x, one), _STREAM)

    if isinstance(weights["layers"], dict):
        x, _ = lax.scan(lambda x, one: (run(x, one), None), x, weights["layers"])
    else:
        for one in weights["layers"]:
            x = run(x, one)
    return cross_entropy(mark(x @ edges["head"], "batch length vocab"), tokens[:, 1:])


def _tokens(batch: int, length: int) -> tuple[tuple[jax.ShapeDtypeStruct, str], ...]:
    return (of((batch, length + 1), "int32", "batch ."),)


def decoder(
    batch: int = 16, length: int = 2048, *, layers: int = 3, features: int = 2048, hidden: int = 5632, heads: int = 16, scan: bool = False
) -> Public:
    """A LLaMA-like decoder, as EasyLM has it; MaxText scans its layers."""

    def loss(mark: Marks, weights: Weights, tokens: Any) -> Any:
        def layer(x: Any, one: Weights) -> Any:
            one = mark.use(one)
            x = mark(x + _self_attention(mark, one, norm(x, one["n1"]), heads, causal=True), _STREAM)
            y = norm(x, one["n2"])
            inner = mark(jax.nn.silu(y @ one["gate"]) * (y @ one["up"]), "batch length mlp")
            return x + inner @ one["down"]

        return _next_token(mark, weights, tokens, layer)

    block = {**_square(features), "up": (features, hidden), "gate": (features, hidden), "down": (hidden, features)}
    stack = {name: (layers, *shape) for name, shape in block.items()} if scan else [block] * layers
    shapes = {"table": (32000, features), "head": (features, 32000), "layers": stack}
    return Public(loss, shapes, {**_SQUARE, **_MLP, **_EDGES}, _tokens(batch, length), ("heads", "mlp", "vocab"))


def _mixture(route: Callable[..., Any], batch: int, length: int, layers: int, features: int, hidden: int) -> Public:
    experts = 8

    def loss(mark: Marks, weights: Weights, tokens: Any) -> Any:
        def layer(x: Any, one: Weights) -> Any:
            one = mark.use(one)
            x = mark(x + _self_attention(mark, one, norm(x, one["n1"]), 16, causal=True), _STREAM)
            return x + route(mark, one, norm(x, one["n2"]))

        return _next_token(mark, weights, tokens, layer)

    block = {**_square(features), "router": (features, experts), "w1": (experts, features, hidden), "w3": (experts, features, hidden)}
    block["w2"] = (experts, hidden, features)
    shapes = {"table": (32000, features), "head": (features, 32000), "layers": [block] * layers}
    names = {"router": "embed .", "w1": "exp embed mlp", "w3": "exp embed mlp", "w2": "exp mlp embed", **_SQUARE, **_EDGES}
    return Public(loss, shapes, names, _tokens(batch, length), ("heads", "mlp", "vocab"))


def moe_dense(batch: int = 16, length: int = 1024, layers: int = 2, features: int = 1024, hidden: int = 3584) -> Public:
    """Mixtral's layers with tokens dropped beyond a capacity, dispatched by one-hot products (GShard, MaxText)."""

    def route(mark: Marks, one: Weights, x: Any) -> Any:
        rows, length, _ = x.shape
        experts = one["router"].shape[1]
        room = 5 * length // (2 * experts)
        gates, chosen = lax.top_k(jax.nn.softmax((x @ one["router"]).astype(jnp.float32)), 2)
        wanted = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
        place = jnp.cumsum(wanted.reshape(rows, -1, experts), 1).reshape(wanted.shape) * wanted - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), room, dtype=x.dtype)
        combine = jnp.einsum("bsk,bske,bskec->bsec", gates.astype(x.dtype), wanted.astype(x.dtype), slots)
        inner = mark(jnp.einsum("bsec,bsd->ebcd", (combine > 0).astype(x.dtype), x), "exp batch_no_exp . embed")
        inner = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inner, one["w1"])) * jnp.einsum("ebcd,edf->ebcf", inner, one["w3"])
        outer = jnp.einsum("ebcf,efd->ebcd", mark(inner, "exp batch_no_exp . mlp"), one["w2"])
        return jnp.einsum("bsec,ebcd->bsd", combine, mark(outer, "exp batch_no_exp . embed"))

    return _mixture(route, batch, length, layers, features, hidden)


def moe_ragged(batch: int = 16, length: int = 1024, layers: int = 2, features: int = 1024, hidden: int = 3584) -> Public:
    """The same without dropping: tokens are sorted by expert and meet its weights in ragged products; tables sort each device's own."""

    def experts(mark: Marks, one: Weights, x: Any, chosen: Any, gates: Any) -> Any:
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=one["w1"].shape[0])
        sent = x.reshape(-1, features)[order // 2]
        inner = jax.nn.silu(lax.ragged_dot(sent, one["w1"], sizes)) * lax.ragged_dot(sent, one["w3"], sizes)
        outer = lax.ragged_dot(mark(inner, ". mlp"), one["w2"], sizes)
        back = outer[jnp.argsort(order)].reshape(*chosen.shape, features)
        return jnp.einsum("bskd,bsk->bsd", back, gates)

    def route(mark: Marks, one: Weights, x: Any) -> Any:
        gates, chosen = lax.top_k(jax.nn.softmax((x @ one["router"]).astype(jnp.float32)), 2)
        own = {name: one[name] for name in ("w1", "w2", "w3")}
        return mark.on_rows(experts, own, x, chosen, gates.astype(x.dtype))

    return _mixture(route, batch, length, layers, features, hidden)


def vit(batch: int = 256, layers: int = 4, features: int = 1024, heads: int = 16) -> Public:
    """A vision transformer as big_vision has it, on 224 x 224 pictures in patches of 14."""

    def loss(mark: Marks, weights: Weights, pictures: Any, labels: Any) -> Any:
        def layer(x: Any, one: Weights) -> Any:
            one = mark.use(one)
            x = mark(x + _self_attention(mark, one, norm(x, one["n1"], one["c1"]), heads), _STREAM)
            inner = mark(jax.nn.gelu(norm(x, one["n2"], one["c2"]) @ one["up"] + one["b1"]), "batch length mlp")
            return x + inner @ one["down"] + one["b2"]

        edges = mark.use({name: weights[name] for name in ("patch", "place", "head", "b3")})
        patches = pictures.astype(mark.dtype).reshape(batch, 16, 14, 16, 14, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 256, 588)
        x = mark(patches @ edges["patch"] + edges["place"], _STREAM)
        for one in weights["layers"]:
            x = mark(layer(x, one), _STREAM)
        return cross_entropy(jnp.mean(x, 1) @ edges["head"] + edges["b3"], labels)

    block = {**_square(features), "up": (features, 4 * features), "down": (4 * features, features), "b1": (4 * features,)}
    block |= {"b2": (features,), "c1": (features,), "c2": (features,)}
    shapes = {"patch": (588, features), "place": (256, features), "head": (features, 1000), "b3": (1000,), "layers": [block] * layers}
    names = {**_SQUARE, **_MLP, "b1": "mlp", "patch": ". embed", "place": "length embed", "head": "embed classes"}
    pictures = of((batch, 224, 224, 3), "float32", "batch . . .")
    return Public(loss, shapes, names, (pictures, of((batch,), "int32", "batch")), ("heads", "mlp"))


def dit(batch: int = 128, layers: int = 4, features: int = 1152, heads: int = 16) -> Public:
    """A diffusion transformer, its blocks scaled and shifted by time and class."""

    def loss(mark: Marks, weights: Weights, latents: Any, times: Any, classes: Any, noise: Any) -> Any:
        def layer(x: Any, about: Any, one: Weights) -> Any:
            one = mark.use(one)
            parts = [part[:, None] for part in jnp.split(about @ one["about"] + one["b0"], 6, -1)]
            y = norm(x, 1.0, 0.0) * (1 + parts[1]) + parts[0]
            x = mark(x + parts[2] * _self_attention(mark, one, y, heads), _STREAM)
            y = norm(x, 1.0, 0.0) * (1 + parts[4]) + parts[3]
            inner = mark(jax.nn.gelu(y @ one["up"] + one["b1"]), "batch length mlp")
            return x + parts[5] * (inner @ one["down"] + one["b2"])

        edges = mark.use({name: leaf for name, leaf in weights.items() if name != "layers"})
        waves = times[:, None] * jnp.exp(-jnp.arange(128) / 16.0)
        waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).astype(mark.dtype)
        about = jax.nn.silu(jax.nn.silu(waves @ edges["t1"]) @ edges["t2"] + edges["classes"][classes])
        mixed = (latents + noise * times[:, None, None]).astype(mark.dtype)
        x = mark(mixed @ edges["patch"] + edges["place"], _STREAM)
        for one in weights["layers"]:
            x = mark(jax.checkpoint(layer)(x, about, one), _STREAM)
        return jnp.mean((x @ edges["out"] - noise) ** 2)

    block = {**dict.fromkeys("qkvo", (features, features)), "about": (features, 6 * features), "b0": (6 * features,)}
    block |= {"up": (features, 4 * features), "b1": (4 * features,), "down": (4 * features, features), "b2": (features,)}
    shapes = {"t1": (256, features), "t2": (features, features), "classes": (1000, features), "patch": (16, features)}
    shapes |= {"place": (256, features), "out": (features, 16), "layers": [block] * layers}
    names = {
        **_SQUARE,
        **_MLP,
        "b1": "mlp",
        "about": "embed mlp",
        "b0": "mlp",
        "classes": "vocab embed",
        "patch": ". embed",
        "out": "embed .",
    }
    latents, rows = of((batch, 256, 16), "float32", "batch . ."), of((batch,), "float32", "batch")
    return Public(loss, shapes, names, (latents, rows, of((batch,), "int32", "batch"), latents), ("heads", "mlp"))


def unet(batch: int = 32, side: int = 64, widths: tuple[int, int, int] = (320, 640, 1280), heads: int = 8) -> Public:
    """The U-Net of latent diffusion, cut to three levels of one residual block each, with attention in the middle."""

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(x: Any, scale: Any) -> Any:
        x32 = x.astype(jnp.float32).reshape(*x.shape[:3], 32, -1)
        x32 = x32 - jnp.mean(x32, (1, 2, 4), keepdims=True)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, (1, 2, 4), keepdims=True) + 1e-5)
        return jax.nn.silu(x32.reshape(x.shape).astype(x.dtype) * scale)

    def loss(mark: Marks, weights: Weights, pictures: Any, times: Any, noise: Any) -> Any:
        def residual(x: Any, about: Any, one: Weights) -> Any:
            one = mark.use(one)
            y = mark(convolve(group_norm(x, one["g1"]), one["first"]), "batch . . out") + (about @ one["about"])[:, None, None]
            y = convolve(group_norm(y, one["g2"]), one["second"])
            return mark(y + (convolve(x, one["skip"]) if "skip" in one else x), "batch . . channels")

        def mix(x: Any, one: Weights) -> Any:
            one = mark.use(one)
            flat = x.reshape(batch, -1, x.shape[-1])
            return x + _self_attention(mark, one, norm(flat, one["n1"]), heads).reshape(x.shape)

        edges = mark.use({name: weights[name] for name in ("enter", "leave", "t1", "down0", "down1")})
        waves = times[:, None] * jnp.exp(-jnp.arange(160) / 16.0)
        about = jax.nn.silu(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).astype(mark.dtype) @ edges["t1"])
        x = mark(convolve((pictures + noise * times[:, None, None, None]).astype(mark.dtype), edges["enter"]), "batch . . channels")
        kept = []
        for level in range(3):
            x = residual(x, about, weights[f"in{level}"])
            kept.append(x)
            x = convolve(x, edges[f"down{level}"], 2) if level < 2 else mix(x, weights["mix"])
        for level in (2, 1, 0):
            x = residual(jnp.concatenate([x, kept[level]], -1), about, weights[f"out{level}"])
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return jnp.mean((convolve(x, edges["leave"]) - noise) ** 2)

    def block(wide: int, out: int) -> Shapes:
        shapes: Shapes = {"first": (3, 3, wide, out), "second": (3, 3, out, out), "about": (1280, out), "g1": (wide,), "g2": (out,)}
        return {**shapes, **({"skip": (1, 1, wide, out)} if wide != out else {})}

    one, two, three = widths
    shapes: Shapes = {"enter": (3, 3, 4, one), "leave": (3, 3, one, 4), "t1": (320, 1280), "mix": {**dict.fromkeys("qkvo", (three, three))}}
    shapes["mix"]["n1"] = (three,)
    shapes |= {"in0": block(one, one), "in1": block(one, two), "in2": block(two, three)}
    shapes |= {"out2": block(2 * three, three), "out1": block(three + two, two), "out0": block(two + one, one)}
    shapes |= {"down0": (3, 3, one, one), "down1": (3, 3, two, two)}
    names = {"first": ". . in out", "second": ". . out in", "skip": ". . in channels", "about": "embed out", "t1": ". embed", **_SQUARE}
    names |= {"enter": ". . . channels", "leave": ". . channels .", "down0": ". . in channels", "down1": ". . in channels", "g2": "out"}
    pictures = of((batch, side, side, 4), "float32", "batch . . .")
    return Public(loss, shapes, names, (pictures, of((batch,), "float32", "batch"), pictures), ("out", "heads"))


def haiku(batch: int = 16, length: int = 1024, layers: int = 3, features: int = 2048, heads: int = 16) -> Public:
    """A transformer of modules' names and their `w` and `b`, attention and MLP side by side, as Mesh Transformer JAX has it."""

    def loss(mark: Marks, weights: Weights, tokens: Any) -> Any:
        def linear(x: Any, one: Weights) -> Any:
            return x @ one["w"] + one["b"] if "b" in one else x @ one["w"]

        def layer(x: Any, one: Weights) -> Any:
            one = mark.use(one)
            y = norm(x, one["norm"]["scale"], one["norm"]["offset"])
            mixed = _attention(mark, *(linear(y, one[name]) for name in ("query", "key", "value")), heads, causal=True)
            inner = mark(jax.nn.gelu(linear(y, one["expand"])), "batch length mlp")
            return x + linear(mixed, one["linear"]) + linear(inner, one["contract"])

        edges = mark.use({name: weights[name] for name in ("embed", "project")})
        x = mark(edges["embed"]["w"][tokens[:, :-1]], _STREAM)
        for number in range(layers):
            own = {name.split("/")[1]: one for name, one in weights.items() if name.startswith(f"layer_{number}/")}
            x = mark(jax.checkpoint(layer)(x, own), _STREAM)
        return cross_entropy(mark(linear(x, edges["project"]), "batch length vocab"), tokens[:, 1:])

    scales = {"scale": (features,), "offset": (features,)}
    own: Shapes = {**{name: {"w": (features, features)} for name in ("query", "key", "value", "linear")}, "norm": scales}
    own |= {"expand": {"w": (features, 4 * features), "b": (4 * features,)}, "contract": {"w": (4 * features, features), "b": (features,)}}
    shapes: Shapes = {f"layer_{number}/{name}": one for number in range(layers) for name, one in own.items()}
    shapes |= {"embed": {"w": (50400, features)}, "project": {"w": (features, 50400), "b": (50400,)}}
    names = {**{f"{name}/w": "embed heads" for name in ("query", "key", "value")}, "linear/w": "heads embed", "expand/w": "embed mlp"}
    names |= {"expand/b": "mlp", "contract/w": "mlp embed", "embed/w": "vocab embed", "project/w": "embed vocab", "project/b": "vocab"}
    return Public(loss, shapes, names, _tokens(batch, length), ("heads", "mlp", "vocab"))

"""Training steps on plain pytrees, whose planning `plan_speed` times: the trace of such a step is as fast as JAX's gets.

Each program is a function of the batch size that returns a step and its abstract arguments. Adam updates the weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Step = tuple[Callable[..., Any], tuple[Any, ...]]
Weights = dict[str, Any]


def _arrays(shapes: Any, dtype: str = "float32") -> Any:
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple))


def _adam(loss: Callable[..., Any], weights: Any, *batch: Any) -> Step:
    """A step of Adam; the batch follows the state."""
    tool = optax.adamw(1e-4)

    def step(state: tuple[Any, Any], *batch: Any) -> tuple[tuple[Any, Any], Any]:
        found, gradients = jax.value_and_grad(loss)(state[0], *batch)
        updates, moments = tool.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), found

    return step, ((weights, jax.eval_shape(tool.init, weights)), *batch)


def _norm(x: Any, scale: Any) -> Any:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def _attention(weights: Weights, x: Any, heads: int, *, causal: bool) -> Any:
    batch, length, features = x.shape
    query, key, value = ((x @ weights[name].astype(x.dtype)).reshape(batch, length, heads, -1) for name in ("q", "k", "v"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), value)
    return mixed.reshape(batch, length, features) @ weights["o"].astype(x.dtype)


def _gated(weights: Weights, x: Any) -> Any:
    up, gate, down = (weights[name].astype(x.dtype) for name in ("up", "gate", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _block_shapes(features: int, hidden: int) -> dict[str, tuple[int, ...]]:
    square = dict.fromkeys("qkvo", (features, features))
    return {
        **square,
        "up": (features, hidden),
        "gate": (features, hidden),
        "down": (hidden, features),
        "n1": (features,),
        "n2": (features,),
    }


def _cross_entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def decoder(batch: int, layers: int, features: int, hidden: int, heads: int, *, length: int = 2048, scan: bool = False) -> Step:
    """A LLaMA-like decoder in bfloat16 over float32 weights."""

    def layer(x: Any, weights: Weights) -> Any:
        x = x + _attention(weights, _norm(x, weights["n1"].astype(x.dtype)), heads, causal=True)
        return x + _gated(weights, _norm(x, weights["n2"].astype(x.dtype)))

    def loss(weights: Weights, tokens: Any) -> Any:
        x = weights["table"].astype(jnp.bfloat16)[tokens[:, :-1]]
        run = jax.checkpoint(layer)
        if scan:
            x, _ = lax.scan(lambda carry, one: (run(carry, one), None), x, weights["layers"])
        else:
            for one in weights["layers"]:
                x = run(x, one)
        return _cross_entropy(x @ weights["head"].astype(x.dtype), tokens[:, 1:])

    block = _block_shapes(features, hidden)
    stack = {name: (layers, *shape) for name, shape in block.items()} if scan else [block] * layers
    shapes = {"table": (32000, features), "head": (features, 32000), "layers": stack}
    return _adam(loss, _arrays(shapes), jax.ShapeDtypeStruct((batch, length + 1), "int32"))


def vit(batch: int, layers: int = 24, features: int = 1024, heads: int = 16) -> Step:
    """A vision transformer on 224 x 224 pictures in patches of 14."""

    def loss(weights: Weights, pictures: Any, labels: Any) -> Any:
        patches = pictures.reshape(batch, 16, 14, 16, 14, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 256, 588)
        x = patches @ weights["patch"] + weights["place"]
        for one in weights["layers"]:
            x = x + _attention(one, _norm(x, one["n1"]), heads, causal=False)
            x = x + jax.nn.gelu(_norm(x, one["n2"]) @ one["up"] + one["bias"]) @ one["down"]
        return _cross_entropy(jnp.mean(x, 1) @ weights["head"], labels)

    block = {**_block_shapes(features, 4 * features), "bias": (4 * features,)}
    del block["gate"]
    shapes = {"patch": (588, features), "place": (256, features), "head": (features, 1000), "layers": [block] * layers}
    pictures = jax.ShapeDtypeStruct((batch, 224, 224, 3), "float32")
    return _adam(loss, _arrays(shapes), pictures, jax.ShapeDtypeStruct((batch,), "int32"))


def dit(batch: int, layers: int = 28, features: int = 1152, heads: int = 16) -> Step:
    """A diffusion transformer: each block is scaled and shifted by the time and the class."""

    def loss(weights: Weights, latents: Any, times: Any, classes: Any, noise: Any) -> Any:
        waves = times[:, None] * jnp.exp(-jnp.arange(128) / 16.0)
        about = jax.nn.silu(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1) @ weights["time"]) + weights["classes"][classes]
        x = (latents + noise * times[:, None, None]) @ weights["patch"]
        for one in weights["layers"]:
            shift, scale, gate, shift2, scale2, gate2 = jnp.split(about @ one["about"], 6, -1)
            y = _norm(x, one["n1"]) * (1 + scale[:, None]) + shift[:, None]
            x = x + gate[:, None] * _attention(one, y, heads, causal=False)
            y = _norm(x, one["n2"]) * (1 + scale2[:, None]) + shift2[:, None]
            x = x + gate2[:, None] * (jax.nn.gelu(y @ one["up"]) @ one["down"])
        return jnp.mean((x @ weights["out"] - noise) ** 2)

    block = {**_block_shapes(features, 4 * features), "about": (features, 6 * features)}
    del block["gate"]
    edges = {"time": (256, features), "classes": (1000, features), "patch": (16, features), "out": (features, 16)}
    latents = jax.ShapeDtypeStruct((batch, 256, 16), "float32")
    times, classes = jax.ShapeDtypeStruct((batch,), "float32"), jax.ShapeDtypeStruct((batch,), "int32")
    return _adam(loss, _arrays({**edges, "layers": [block] * layers}), latents, times, classes, latents)


def moe(batch: int, layers: int = 12, features: int = 2048, experts: int = 16, length: int = 1024) -> Step:
    """A decoder whose every MLP is a choice of two experts, with room for twice the mean (GShard)."""
    room = 4 * length // experts

    def route(weights: Weights, x: Any) -> Any:
        chance = jax.nn.softmax((x @ weights["router"]).astype(jnp.float32))
        gates, chosen = lax.top_k(chance, 2)
        wanted = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
        place = jnp.cumsum(wanted.reshape(batch, -1, experts), 1).reshape(wanted.shape) * wanted - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), room, dtype=jnp.float32)
        combine = jnp.einsum("bsk,bske,bskec->bsec", gates, wanted, slots)
        inner = jnp.einsum("bsec,bsd->ebcd", (combine > 0).astype(x.dtype), x)
        inner = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inner, weights["w1"].astype(x.dtype)))
        return jnp.einsum("bsec,ebcd->bsd", combine.astype(x.dtype), jnp.einsum("ebcf,efd->ebcd", inner, weights["w2"].astype(x.dtype)))

    def loss(weights: Weights, tokens: Any) -> Any:
        x = weights["table"].astype(jnp.bfloat16)[tokens[:, :-1]]
        for one in weights["layers"]:
            x = x + _attention(one, _norm(x, one["n1"].astype(x.dtype)), 16, causal=True)
            x = x + route(one, _norm(x, one["n2"].astype(x.dtype)))
        return _cross_entropy(x @ weights["table"].T.astype(x.dtype), tokens[:, 1:])

    block = {**dict.fromkeys("qkvo", (features, features)), "n1": (features,), "n2": (features,), "router": (features, experts)}
    block |= {"w1": (experts, features, 4 * features), "w2": (experts, 4 * features, features)}
    shapes = {"table": (32000, features), "layers": [block] * layers}
    return _adam(loss, _arrays(shapes), jax.ShapeDtypeStruct((batch, length + 1), "int32"))


def evoformer(batch: int, blocks: int = 6, rows: int = 128, length: int = 256) -> Step:
    """Pairs and alignments that inform each other: row attention with a bias, outer products, triangle products."""
    wide, pair, heads = 256, 128, 8

    def block(weights: Weights, alignment: Any, pairs: Any) -> tuple[Any, Any]:
        x = _norm(alignment, weights["n1"])
        query, key, value = ((x @ weights[name]).reshape(batch, rows, length, heads, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("brihd,brjhd->brhij", query, key) + (pairs @ weights["bias"]).transpose(0, 3, 1, 2)[:, None]
        mixed = jnp.einsum("brhij,brjhd->brihd", jax.nn.softmax(scores), value).reshape(x.shape)
        alignment = alignment + jax.nn.sigmoid(x @ weights["gate"]) * (mixed @ weights["o"])
        alignment = alignment + jax.nn.relu(_norm(alignment, weights["n2"]) @ weights["up"]) @ weights["down"]
        left, right = (_norm(alignment, weights["n2"]) @ weights[name] for name in ("left", "right"))
        outer = jnp.einsum("bric,brjd->bijcd", left, right) / rows
        pairs = pairs + outer.reshape(batch, length, length, -1) @ weights["outer"]
        for one, equation in (("out", "bikc,bjkc->bijc"), ("in", "bkic,bkjc->bijc")):
            y = _norm(pairs, weights["n3"])
            first, second = (y @ weights[f"{one}{side}"] * jax.nn.sigmoid(y @ weights[f"{one}{side}g"]) for side in "ab")
            pairs = pairs + jnp.einsum(equation, first, second) @ weights[f"{one}o"]
        return alignment, pairs + jax.nn.relu(pairs @ weights["pu"]) @ weights["pd"]

    def loss(weights: Weights, alignment: Any, target: Any) -> Any:
        x = alignment @ weights["embed"]
        first = jnp.mean(x, 1) @ weights["pairs"]
        pairs = first[:, :, None] + first[:, None]
        for one in weights["blocks"]:
            x, pairs = jax.checkpoint(block)(one, x, pairs)
        return _cross_entropy(pairs @ weights["head"], target)

    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(("q", "k", "v", "o", "gate"), (wide, wide)), "bias": (pair, heads)}
    shapes |= {"n1": (wide,), "n2": (wide,), "n3": (pair,), "up": (wide, 4 * wide), "down": (4 * wide, wide)}
    shapes |= {"left": (wide, 32), "right": (wide, 32), "outer": (1024, pair), "pu": (pair, 4 * pair), "pd": (4 * pair, pair)}
    shapes |= {f"{one}{side}": (pair, pair) for one in ("out", "in") for side in ("a", "b", "ag", "bg", "o")}
    every = {"embed": (23, wide), "pairs": (wide, pair), "head": (pair, 64), "blocks": [shapes] * blocks}
    alignment, target = jax.ShapeDtypeStruct((batch, rows, length, 23), "float32"), jax.ShapeDtypeStruct((batch, length, length), "int32")
    return _adam(loss, _arrays(every), alignment, target)


def mamba(batch: int, layers: int = 24, features: int = 1024, length: int = 1024) -> Step:
    """Selective state spaces, each run by an associative scan."""
    inner, states = 2 * features, 16

    def mix(weights: Weights, x: Any) -> Any:
        y, gate = jnp.split(x @ weights["in"], 2, -1)
        padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
        y = jax.nn.silu(sum(padded[:, shift : shift + length] * weights["conv"][shift] for shift in range(4)))
        delta = jax.nn.softplus(y @ weights["delta"])
        enter, leave = y @ weights["enter"], y @ weights["leave"]
        decay = jnp.exp(-delta[..., None] * jnp.exp(weights["decay"]))
        entered = (delta * y)[..., None] * enter[:, :, None]
        _, state = lax.associative_scan(lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1]), (decay, entered), axis=1)
        return (jnp.einsum("blds,bls->bld", state, leave) * jax.nn.silu(gate)) @ weights["out"]

    def loss(weights: Weights, tokens: Any) -> Any:
        x = weights["table"][tokens[:, :-1]]
        for one in weights["layers"]:
            x = x + jax.checkpoint(mix)(one, _norm(x, one["n"]))
        return _cross_entropy(x @ weights["table"].T, tokens[:, 1:])

    block = {"in": (features, 2 * inner), "conv": (4, inner), "delta": (inner, inner), "enter": (inner, states)}
    block |= {"leave": (inner, states), "decay": (inner, states), "out": (inner, features), "n": (features,)}
    shapes = {"table": (32000, features), "layers": [block] * layers}
    return _adam(loss, _arrays(shapes), jax.ShapeDtypeStruct((batch, length + 1), "int32"))


def ppo(batch: int, observed: int = 60, acts: int = 8, width: int = 256) -> Step:
    """Proximal policies: a rollout by a scan, advantages by a reversed scan, epochs by a while loop of shuffled scans."""
    tool, steps, parts = optax.adam(3e-4), 32, 4

    def net(weights: list[Weights], x: Any) -> Any:
        for one in weights[:-1]:
            x = jnp.tanh(x @ one["w"] + one["b"])
        return x @ weights[-1]["w"] + weights[-1]["b"]

    def loss(weights: Weights, seen: Any, done: Any, old: Any, gain: Any, value: Any) -> Any:
        ratio = jnp.exp(-0.5 * jnp.sum((done - net(weights["actor"], seen)) ** 2, -1) - old)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.mean(jnp.minimum(ratio * gain, clipped * gain)) + jnp.mean((net(weights["critic"], seen)[..., 0] - value) ** 2)

    def step(state: tuple[Any, Any], world: Any, key: Any) -> tuple[tuple[Any, Any], Any, Any]:
        weights, moments = state

        def act(carry: Any, key: Any) -> Any:
            mean = net(weights["actor"], carry)
            done = mean + jax.random.normal(key, mean.shape)
            after = jnp.tanh(carry @ weights["world"]["w"] + done @ weights["world"]["a"])
            return after, (carry, done, -0.5 * jnp.sum((done - mean) ** 2, -1), jnp.sum(after, -1), net(weights["critic"], carry)[..., 0])

        world, (seen, done, old, reward, value) = lax.scan(act, world, jax.random.split(key, steps))

        def back(carry: Any, row: Any) -> Any:
            reward, value, after = row
            carry = reward + 0.99 * after - value + 0.95 * carry
            return carry, carry

        after = jnp.concatenate([value[1:], value[-1:]])
        _, gain = lax.scan(back, jnp.zeros_like(reward[0]), (reward, value, after), reverse=True)

        def epoch(carry: Any) -> Any:
            count, state, key = carry
            key, shuffle = jax.random.split(key)
            order = jax.random.permutation(shuffle, steps * batch)
            rows = [x.reshape(steps * batch, *x.shape[2:])[order] for x in (seen, done, old, gain, gain + value)]
            rows = [x.reshape(parts, -1, *x.shape[1:]) for x in rows]

            def update(state: Any, rows: Any) -> Any:
                found, gradients = jax.value_and_grad(loss)(state[0], *rows)
                updates, moments = tool.update(gradients, state[1])
                return (optax.apply_updates(state[0], updates), moments), found

            state, _ = lax.scan(update, state, tuple(rows))
            return count + 1, state, key

        _, state, _ = lax.while_loop(lambda carry: carry[0] < 4, epoch, (0, (weights, moments), key))
        return state, world, jnp.mean(reward)

    def layers(last: int) -> list[dict[str, tuple[int, ...]]]:
        sizes = [observed, width, width, width, last]
        return [{"w": (one, two), "b": (two,)} for one, two in pairwise(sizes)]

    weights = _arrays({"actor": layers(acts), "critic": layers(1), "world": {"w": (observed, observed), "a": (acts, observed)}})
    key = jax.eval_shape(lambda: jax.random.key(0))
    return step, ((weights, jax.eval_shape(tool.init, weights)), jax.ShapeDtypeStruct((batch, observed), "float32"), key)


PROGRAMS: dict[str, Callable[[int], Step]] = {
    "decoder-7b": lambda batch: decoder(batch, 32, 4096, 11008, 32),
    "decoder-13b": lambda batch: decoder(batch, 40, 5120, 13824, 40),
    "decoder-70b": lambda batch: decoder(batch, 80, 8192, 28672, 64),
    "decoder-7b-scan": lambda batch: decoder(batch, 32, 4096, 11008, 32, scan=True),
    "vit": vit,
    "dit": dit,
    "moe": moe,
    "evoformer": evoformer,
    "mamba": mamba,
    "ppo": ppo,
}
"""Name to the function of the batch size. The 70B's keys and values have as many heads as its queries."""

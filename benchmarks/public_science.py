"""More programs for `public_tables`: the evoformer's block and a graph network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.public_models import Marks, Public, Shapes, Weights, cross_entropy, norm, of


def _bias_attention(mark: Marks, one: Weights, x: Any, bias: Any, names: str, heads: int = 8) -> Any:
    """Gated attention within each row of `x` (batch, rows, columns, features), with a bias for each head."""
    split = (*x.shape[:3], heads, -1)
    query, key, value = (mark((x @ one[name]).reshape(split), names.replace("embed", "heads .")) for name in "qkv")
    scores = jnp.einsum("brihd,brjhd->brhij", query, key) / query.shape[-1] ** 0.5 + bias
    mixed = jnp.einsum("brhij,brjhd->brihd", jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), value)
    return (jax.nn.sigmoid(x @ one["gate"]) * mixed.reshape(*x.shape[:3], -1)) @ one["o"]


def _triangle(mark: Marks, one: Weights, pairs: Any, equation: str) -> Any:
    y = norm(pairs, one["scale"])
    left, right = (
        mark((y @ one[side]) * jax.nn.sigmoid(y @ one[f"{side}_gate"]), "batch left right embed") for side in ("first", "second")
    )
    return jax.nn.sigmoid(y @ one["gate"]) * (norm(jnp.einsum(equation, left, right), one["scale2"]) @ one["o"])


def _transition(mark: Marks, one: Weights, x: Any, names: str) -> Any:
    return mark(jax.nn.relu(norm(x, one["scale"]) @ one["up"]), names.replace("embed", "mlp")) @ one["down"]


def evoformer(batch: int = 8, blocks: int = 2, rows: int = 128, length: int = 256) -> Public:
    """Alignments and pairs that inform each other, in AlphaFold's widths: 256 and 128 channels."""
    wide, pair, alignment_names, pair_names = 256, 128, "batch rows columns embed", "batch left right embed"

    def block(mark: Marks, weights: Weights, alignment: Any, pairs: Any) -> tuple[Any, Any]:
        one = mark.use(weights)
        bias = (norm(pairs, one["bias"]["scale"]) @ one["bias"]["w"]).transpose(0, 3, 1, 2)[:, None]
        own = one["row"]
        alignment = mark(alignment + _bias_attention(mark, own, norm(alignment, own["scale"]), bias, alignment_names), alignment_names)
        turned, own = alignment.swapaxes(1, 2), one["column"]
        mixed = _bias_attention(mark, own, norm(turned, own["scale"]), 0.0, "batch columns attending embed")
        alignment = mark(alignment + mixed.swapaxes(1, 2), alignment_names)
        alignment = mark(alignment + _transition(mark, one["alignment"], alignment, alignment_names), alignment_names)
        own = one["outer"]
        left, right = (norm(alignment, own["scale"]) @ own[side] for side in ("one", "two"))
        outer = jnp.einsum("bric,brjd->bijcd", left, right) / rows
        pairs = mark(pairs + outer.reshape(batch, length, length, -1) @ own["o"], pair_names)
        pairs = mark(pairs + _triangle(mark, one["outgoing"], pairs, "bikc,bjkc->bijc"), pair_names)
        pairs = mark(pairs + _triangle(mark, one["incoming"], pairs, "bkic,bkjc->bijc"), pair_names)
        own = one["starting"]
        y = norm(pairs, own["scale"])
        pairs = mark(pairs + _bias_attention(mark, own, y, (y @ own["w"]).transpose(0, 3, 1, 2)[:, None], pair_names, 4), pair_names)
        return alignment, mark(pairs + _transition(mark, one["pairs"], pairs, pair_names), pair_names)

    def loss(mark: Marks, weights: Weights, alignment: Any, target: Any) -> Any:
        edges = mark.use({name: weights[name] for name in ("embed", "left", "right", "head")})
        x = mark(alignment.astype(mark.dtype) @ edges["embed"], alignment_names)
        first = jnp.mean(x, 1)
        pairs = mark((first @ edges["left"])[:, :, None] + (first @ edges["right"])[:, None], pair_names)
        for one in weights["blocks"]:
            x, pairs = jax.checkpoint(lambda one, x, pairs: block(mark, one, x, pairs))(one, x, pairs)
        return cross_entropy(pairs @ edges["head"], target)

    def attention(width: int) -> Shapes:
        return {**dict.fromkeys(("q", "k", "v", "o", "gate"), (width, width)), "scale": (width,)}

    def transition(width: int) -> Shapes:
        return {"scale": (width,), "up": (width, 4 * width), "down": (4 * width, width)}

    triangle = dict.fromkeys(("first", "second", "first_gate", "second_gate", "gate", "o"), (pair, pair)) | {
        "scale": (pair,),
        "scale2": (pair,),
    }
    shapes: Shapes = {"row": attention(wide), "column": attention(wide), "starting": {**attention(pair), "w": (pair, 4)}}
    shapes |= {"bias": {"scale": (pair,), "w": (pair, 8)}, "alignment": transition(wide), "pairs": transition(pair)}
    shapes |= {"outer": {"scale": (wide,), "one": (wide, 32), "two": (wide, 32), "o": (1024, pair)}}
    shapes |= {"outgoing": triangle, "incoming": triangle}
    every = {"embed": (49, wide), "left": (wide, pair), "right": (wide, pair), "head": (pair, 64), "blocks": [shapes] * blocks}
    names = {f"{place}/{name}": "embed heads" for place in ("row", "column", "starting") for name in ("q", "k", "v", "gate")}
    names |= {f"{place}/o": "heads embed" for place in ("row", "column", "starting")}
    names |= {f"{place}/{name}": how for place in ("alignment", "pairs") for name, how in (("up", "embed mlp"), ("down", "mlp embed"))}
    inputs = of((batch, rows, length, 49), "float32", "batch rows columns ."), of((batch, length, length), "int32", "batch left right")
    return Public(loss, every, names, inputs, ("heads", "mlp"))


def gnn(nodes: int = 32768, edges: int = 131072, rounds: int = 3, features: int = 256, hidden: int = 1024) -> Public:
    """A graph network on one large graph, as Jraph has it: messages along edges, summed by `segment_sum` where they arrive."""

    def loss(mark: Marks, weights: Weights, seen: Any, along: Any, sender: Any, receiver: Any, target: Any) -> Any:
        def mlp(one: Weights, x: Any, names: str) -> Any:
            inner = mark(jax.nn.relu(x @ one["up"] + one["b1"]), names.replace("embed", "mlp"))
            return norm(inner @ one["down"] + one["b2"], one["scale"])

        def exchange(one: Weights, x: Any, edge: Any) -> tuple[Any, Any]:
            one = mark.use(one)
            message = mark(mlp(one["edge"], jnp.concatenate([edge, x[sender], x[receiver]], -1), "edges embed"), "edges embed")
            summed = mark(jax.ops.segment_sum(message, receiver, nodes), "nodes embed")
            return mark(x + mlp(one["node"], jnp.concatenate([x, summed], -1), "nodes embed"), "nodes embed"), edge + message

        ends = mark.use({name: weights[name] for name in ("nodes", "edges", "head")})
        x, edge = mark(seen @ ends["nodes"], "nodes embed"), mark(along @ ends["edges"], "edges embed")
        for one in weights["rounds"]:
            x, edge = jax.checkpoint(exchange)(one, x, edge)
        return jnp.mean((x @ ends["head"] - target) ** 2)

    def mlp(wide: int) -> Shapes:
        return {"up": (wide, hidden), "b1": (hidden,), "down": (hidden, features), "b2": (features,), "scale": (features,)}

    one = {"edge": mlp(3 * features), "node": mlp(2 * features)}
    shapes: Shapes = {"nodes": (16, features), "edges": (8, features), "head": (features, 16), "rounds": [one] * rounds}
    names = {"up": "embed mlp", "b1": "mlp", "down": "mlp embed"}
    ends = tuple(of((edges,), "int32", "edges") for _ in range(2))
    target = of((nodes, 16), "float32", "nodes .")
    return Public(loss, shapes, names, (target, of((edges, 8), "float32", "edges ."), *ends, target), ("mlp",), "float32")

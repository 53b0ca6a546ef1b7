"""A sparse transformer: attention and mixtures of experts in turn, routed to the top two experts with a capacity and a balance loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.case import BATCH, Numbers, Shapes, Split, Step, cross_entropy, layer_norm, pure_program
from tests.zoo.moe import collect, dispatch, experts
from tests.zoo.transformer import ATTENTION, self_attention

TOP_K = 2
BALANCE = 1e-2


@dataclass(frozen=True)
class Sizes:
    """`capacity` is how many tokens of one sequence an expert takes."""

    batch: int = BATCH
    seq: int = 24
    layers: int = 2
    width: int = 24
    heads: int = 6
    hidden: int = 48
    experts: int = 24
    capacity: int = 4
    vocab: int = 96


SMALL = Sizes()
LARGE = Sizes(batch=64, seq=1024, layers=2, width=1024, heads=16, hidden=4096, experts=64, capacity=40, vocab=32000)


def route(x: Any, router: Any, capacity: int) -> tuple[Any, Any]:
    """Combine weights [batch, seq, experts, capacity], and how unevenly the experts are chosen (1 where they are alike).

    Second choices find the places that first choices leave.
    """
    count = router.shape[-1]
    gates = jax.nn.softmax(x @ router)
    weights, chosen = jax.lax.top_k(gates, TOP_K)
    weights = weights / weights.sum(-1, keepdims=True)
    picks = jax.nn.one_hot(chosen, count, dtype=x.dtype)
    combine, used = jnp.zeros((*gates.shape, capacity), x.dtype), jnp.zeros_like(gates[:, :1])
    for rank in range(TOP_K):
        pick = picks[:, :, rank]
        places = used + jnp.cumsum(pick, axis=1) - pick
        slots = jax.nn.one_hot(places.astype(jnp.int32), capacity, dtype=x.dtype)
        combine = combine + (weights[:, :, rank, None] * pick)[..., None] * slots
        used = used + pick.sum(1, keepdims=True)
    return combine, count * (picks[:, :, 0].mean((0, 1)) * gates.mean((0, 1))).sum()


def layer(split: Split, x: Any, weights: Any, capacity: int) -> tuple[Any, Any]:
    """Attention and experts on x [batch, seq, width], and the balance of the experts."""
    attend = split(self_attention, ATTENTION, "d--", pin="* -m- * * *")
    x = x + attend(layer_norm(x, weights["norms"][0]), *weights["attention"])
    normed = layer_norm(x, weights["norms"][1])
    combine, balance = route(normed, weights["router"], capacity)
    sent = split(dispatch, "d-m- d--", "md--")(combine, normed)
    done = split(experts, "md-- m-- m--", "md--", pin="* m-- *")(sent, weights["up"], weights["down"])
    return x + split(collect, "d-m- md--", "d--")(combine, done), balance


def _weights(numbers: Numbers, sizes: Sizes) -> dict[str, Any]:
    head_dim = sizes.width // sizes.heads
    inward = [numbers.weight(sizes.width, sizes.heads, head_dim, fan_in=sizes.width) for _ in range(3)]
    return {
        "norms": numbers.ones(2, sizes.width),
        "attention": (*inward, numbers.weight(sizes.heads, head_dim, sizes.width)),
        "router": numbers.weight(sizes.width, sizes.experts),
        "up": numbers.weight(sizes.experts, sizes.width, sizes.hidden, fan_in=sizes.width),
        "down": numbers.weight(sizes.experts, sizes.hidden, sizes.width, fan_in=sizes.hidden),
    }


def _pytree(split: Split, numbers: Numbers, sizes: Sizes) -> tuple[Step, tuple[Any, ...]]:
    params = {
        "embed": numbers.weight(sizes.vocab, sizes.width, fan_in=1),
        "layers": [_weights(numbers, sizes) for _ in range(sizes.layers)],
        "head": numbers.weight(sizes.width, sizes.vocab),
    }

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x, balance = params["embed"][tokens], 0.0
        for weights in params["layers"]:
            x, own = layer(split, x, weights, sizes.capacity)
            balance = balance + own
        return cross_entropy(x @ params["head"], labels) + BALANCE * balance

    batch = numbers.integers(sizes.vocab, sizes.batch, sizes.seq), numbers.integers(sizes.vocab, sizes.batch, sizes.seq)
    return pure_program(loss, params, batch)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _pytree(split, Numbers(dtype), SMALL)


def make_large(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _pytree(split, Shapes(dtype), LARGE)

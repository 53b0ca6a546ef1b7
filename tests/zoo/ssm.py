"""A selective state-space model: gated blocks whose linear recurrence runs as one associative scan over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.case import BATCH, Numbers, Shapes, Split, Step, cross_entropy, layer_norm, pure_program


@dataclass(frozen=True)
class Sizes:
    """`inner` is the width inside a block, `state` the states per channel, `rank` that of the step sizes."""

    batch: int = BATCH
    seq: int = 24
    layers: int = 2
    width: int = 24
    inner: int = 48
    state: int = 4
    rank: int = 6
    vocab: int = 96
    taps: int = 4


SMALL = Sizes()
LARGE = Sizes(batch=64, seq=1024, layers=4, width=1024, inner=2048, state=16, rank=64, vocab=50304)
"""Four layers of Mamba-370M."""


def _recur(left: Any, right: Any) -> Any:
    """Two steps of h -> a h + b as one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def scan_states(x: Any, steps: Any, decay: Any, inward: Any, outward: Any) -> Any:
    """y [batch, seq, inner] of x and steps [batch, seq, inner], decay [inner, state], inward and outward [batch, seq, state]."""
    kept = jnp.exp(steps[..., None] * decay)
    added = jnp.einsum("bti,bti,btn->btin", steps, x, inward)
    _, states = jax.lax.associative_scan(_recur, (kept, added), axis=1)
    return jnp.einsum("btin,btn->bti", states, outward)


def convolve(x: Any, taps: Any) -> Any:
    """A causal convolution over time, [taps, inner], of every channel with itself."""
    return jax.lax.conv_general_dilated(
        x,
        taps[:, None, :],
        window_strides=(1,),
        padding=[(taps.shape[0] - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )


def _project(x: Any, weight: Any) -> Any:
    return x @ weight


def block(split: Split, x: Any, weights: Any) -> Any:
    """One layer on x [batch, seq, width]."""
    state = weights["decay"].shape[-1]
    inward = split(_project, "d-- -m", "d-m", pin="* -m")
    gate, x = inward(x, weights["gate"]), inward(x, weights["in"])
    x = jax.nn.silu(convolve(x, weights["taps"]))
    chosen = x @ weights["choose"]
    steps = jax.nn.softplus(chosen[..., 2 * state :] @ weights["steps"])
    y = scan_states(x, steps, -jnp.exp(weights["decay"]), chosen[..., :state], chosen[..., state : 2 * state])
    y = (y + x * weights["skip"]) * jax.nn.silu(gate)
    return split(_project, "d-m m-", "d--")(y, weights["out"])


def _weights(numbers: Numbers, sizes: Sizes) -> dict[str, Any]:
    return {
        "norm": numbers.ones(sizes.width),
        "gate": numbers.weight(sizes.width, sizes.inner),
        "in": numbers.weight(sizes.width, sizes.inner),
        "taps": numbers.weight(sizes.taps, sizes.inner),
        "choose": numbers.weight(sizes.inner, 2 * sizes.state + sizes.rank),
        "steps": numbers.weight(sizes.rank, sizes.inner),
        "decay": numbers.weight(sizes.inner, sizes.state, fan_in=1),
        "skip": numbers.ones(sizes.inner),
        "out": numbers.weight(sizes.inner, sizes.width),
    }


def _pytree(split: Split, numbers: Numbers, sizes: Sizes) -> tuple[Step, tuple[Any, ...]]:
    params = {
        "embed": numbers.weight(sizes.vocab, sizes.width, fan_in=1),
        "layers": [_weights(numbers, sizes) for _ in range(sizes.layers)],
        "head": numbers.weight(sizes.width, sizes.vocab),
    }

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["embed"][tokens]
        for weights in params["layers"]:
            x = x + block(split, layer_norm(x, weights["norm"]), weights)
        return cross_entropy(split(_project, "d-- -m", "d-m", pin="* -m")(x, params["head"]), labels)

    batch = numbers.integers(sizes.vocab, sizes.batch, sizes.seq), numbers.integers(sizes.vocab, sizes.batch, sizes.seq)
    return pure_program(loss, params, batch)


def make_pytree(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _pytree(split, Numbers(dtype), SMALL)


def make_large(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _pytree(split, Shapes(dtype), LARGE)

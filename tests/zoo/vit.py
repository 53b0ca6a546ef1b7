"""A vision transformer: patches by a strided convolution, a class token before them, learned positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.case import BATCH, COLUMN, ROW, Numbers, Shapes, Split, Step, cross_entropy, linen_model_program, nnx_program


@dataclass(frozen=True)
class Sizes:
    """`image` is the side of the images, `patch` that of the patches."""

    batch: int = BATCH
    image: int = 16
    patch: int = 4
    layers: int = 2
    width: int = 48
    heads: int = 6
    hidden: int = 96
    classes: int = 24


SMALL = Sizes()
LARGE = Sizes(batch=256, image=224, patch=16, layers=12, width=768, heads=12, hidden=3072, classes=1000)
"""ViT-B/16."""

ATTENTION = {"query/kernel": "-m-", "key/kernel": "-m-", "value/kernel": "-m-", "out/kernel": "m--"}


def _batch(numbers: Numbers, sizes: Sizes) -> tuple[Any, ...]:
    return numbers.normal(sizes.batch, sizes.image, sizes.image, 3), numbers.integers(sizes.classes, sizes.batch)


class LinenViT(nn.Module):
    split: Split
    dtype: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, images: Any) -> Any:
        sizes, kwargs = self.sizes, {"dtype": self.dtype, "param_dtype": self.dtype}
        patch = (sizes.patch, sizes.patch)
        x = nn.Conv(sizes.width, patch, strides=patch, padding="VALID", name="patches", **kwargs)(images)
        x = x.reshape(x.shape[0], -1, sizes.width)
        token = self.param("token", nn.initializers.normal(0.02), (1, 1, sizes.width), self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, sizes.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]), self.dtype)
        for layer in range(sizes.layers):
            attend = nn.MultiHeadDotProductAttention(sizes.heads, use_bias=False, name=f"attention{layer}", **kwargs)
            x = x + self.split.module(attend, "d--", ATTENTION, "d--", pin=True)(nn.LayerNorm(**kwargs)(x))
            up = self.split.module(nn.Dense(sizes.hidden, name=f"up{layer}", **kwargs), "d--", COLUMN, "d-m", pin=True)
            down = self.split.module(nn.Dense(sizes.width, name=f"down{layer}", **kwargs), "d-m", ROW, "d--")
            x = x + down(nn.gelu(up(nn.LayerNorm(**kwargs)(x))))
        return nn.Dense(sizes.classes, name="head", **kwargs)(nn.LayerNorm(**kwargs)(x)[:, 0])


def _linen(split: Split, numbers: Numbers, sizes: Sizes) -> tuple[Step, tuple[Any, ...]]:
    def loss(params: Any, state: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, images), labels), {}

    return linen_model_program(loss, LinenViT(split, numbers.dtype, sizes), numbers, _batch(numbers, sizes))


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Numbers(dtype), SMALL)


def make_large(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Shapes(dtype), LARGE)


def _attend(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    """Attention in the dtype of its operands, [batch, seq, heads, head_dim]; JAX's own computes its softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


class NnxViT(nnx.Module):
    def __init__(self, split: Split, dtype: Any, sizes: Sizes) -> None:
        kwargs = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        patch, count = (sizes.patch, sizes.patch), (sizes.image // sizes.patch) ** 2
        init = nnx.initializers.normal(0.02)
        self.patches = nnx.Conv(3, sizes.width, patch, strides=patch, padding="VALID", **kwargs)
        self.token = nnx.Param(init(jax.random.key(1), (1, 1, sizes.width), dtype))
        self.positions = nnx.Param(init(jax.random.key(2), (1, count + 1, sizes.width), dtype))
        blocks = [self._block(split, sizes, kwargs) for _ in range(sizes.layers)]
        self.attends, self.mlps = nnx.List([attend for attend, _ in blocks]), nnx.List([mlp for _, mlp in blocks])
        self.norms = nnx.List([nnx.LayerNorm(sizes.width, **kwargs) for _ in range(2 * sizes.layers + 1)])
        self.head = nnx.Linear(sizes.width, sizes.classes, **kwargs)

    def _block(self, split: Split, sizes: Sizes, kwargs: Any) -> tuple[Any, Any]:
        attend = nnx.MultiHeadAttention(sizes.heads, sizes.width, use_bias=False, decode=False, attention_fn=_attend, **kwargs)
        up = split.module(nnx.Linear(sizes.width, sizes.hidden, **kwargs), "d--", COLUMN, "d-m", pin=True)
        down = split.module(nnx.Linear(sizes.hidden, sizes.width, **kwargs), "d-m", ROW, "d--")
        return split.module(attend, "d--", ATTENTION, "d--", pin=True), nnx.Sequential(up, nnx.gelu, down)

    def __call__(self, images: Any) -> Any:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1])), x], axis=1) + self.positions[...]
        for layer, (attend, mlp) in enumerate(zip(self.attends, self.mlps, strict=True)):
            x = x + attend(self.norms[2 * layer](x))
            x = x + mlp(self.norms[2 * layer + 1](x))
        return self.head(self.norms[-1](x)[:, 0])


def make_nnx(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    def loss(model: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(model(images), labels)

    return nnx_program(loss, NnxViT(split, dtype, SMALL), _batch(Numbers(dtype), SMALL))

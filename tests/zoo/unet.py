"""A U-Net that denoises images: down by strided convolutions, up by transposed ones and by resizing, with skip connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo.case import BATCH, Numbers, Shapes, Split, Step, linen_model_program

KERNEL = (3, 3)
COLUMN = {"kernel": "---m"}
ROW = {"kernel": "--m-"}
TIME_WIDTH = 24


@dataclass(frozen=True)
class Sizes:
    """`image` is the side of the images, `widths` the channels of each level, `groups` those of the normalisation."""

    batch: int = BATCH
    image: int = 8
    widths: tuple[int, ...] = (6, 12, 24)
    groups: int = 6


SMALL = Sizes()
LARGE = Sizes(batch=64, image=256, widths=(128, 256, 512, 1024), groups=32)


class Block(nn.Module):
    """Two normalised convolutions around a shortcut; the time enters between them."""

    split: Split
    dtype: Any
    width: int
    groups: int

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        first = self.split.module(nn.Conv(self.width, KERNEL, name="first", use_bias=False, **kwargs), "d---", COLUMN, "d--m", pin=True)
        second = self.split.module(nn.Conv(self.width, KERNEL, name="second", use_bias=False, **kwargs), "d--m", ROW, "d---")
        y = first(nn.silu(nn.GroupNorm(self.groups, name="norm1", **kwargs)(x)))
        y = y + nn.Dense(self.width, name="time", **kwargs)(time)[:, None, None, :]
        y = second(nn.silu(nn.GroupNorm(self.groups, name="norm2", **kwargs)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.width, (1, 1), name="shortcut", **kwargs)(x))


class UNet(nn.Module):
    split: Split
    dtype: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, images: Any, times: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        widths, groups = self.sizes.widths, self.sizes.groups
        time = nn.silu(nn.Dense(4 * TIME_WIDTH, name="time", **kwargs)(_embedded(times, self.dtype)))
        x = self.split.module(nn.Conv(widths[0], KERNEL, name="inward", use_bias=False, **kwargs), "d---", COLUMN, "d--m", pin=True)(images)
        skips = []
        for level, width in enumerate(widths[:-1]):
            x = Block(self.split, self.dtype, width, groups, name=f"down{level}")(x, time)
            skips.append(x)
            shrink = nn.Conv(widths[level + 1], KERNEL, (2, 2), use_bias=False, name=f"shrink{level}", **kwargs)
            x = self.split.module(shrink, "d---", COLUMN, "d--m", pin=True)(x)
        x = Block(self.split, self.dtype, widths[-1], groups, name="middle")(x, time)
        for level in reversed(range(len(skips))):
            x = self._enlarged(x, level)
            x = jnp.concatenate([x, skips[level]], axis=-1)
            x = Block(self.split, self.dtype, widths[level], groups, name=f"up{level}")(x, time)
        return nn.Conv(images.shape[-1], KERNEL, name="outward", **kwargs)(nn.silu(nn.GroupNorm(groups, name="norm", **kwargs)(x)))

    def _enlarged(self, x: Any, level: int) -> Any:
        """Twice the size: by a transposed convolution at the top level, by the nearest element and a convolution below."""
        kwargs = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.dtype, "name": f"enlarge{level}"}
        if not level:
            conv = nn.ConvTranspose(self.sizes.widths[level], (2, 2), (2, 2), **kwargs)
        else:
            batch, height, width, channels = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
            conv = nn.Conv(self.sizes.widths[level], KERNEL, **kwargs)
        return self.split.module(conv, "d---", COLUMN, "d--m", pin=True)(x)


def _embedded(times: Any, dtype: Any) -> Any:
    """Sines and cosines of the times [batch], over TIME_WIDTH features."""
    angles = times[:, None] * jnp.exp(-jnp.arange(TIME_WIDTH // 2, dtype=dtype))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _linen(split: Split, numbers: Numbers, sizes: Sizes) -> tuple[Step, tuple[Any, ...]]:
    shape = (sizes.batch, sizes.image, sizes.image, 3)

    def loss(params: Any, state: Any, images: Any, times: Any, noise: Any) -> Any:
        mixed = images + times[:, None, None, None] * noise
        return ((state.apply_fn({"params": params}, mixed, times) - noise) ** 2).mean(), {}

    batch = numbers.normal(*shape), numbers.normal(sizes.batch), numbers.normal(*shape)
    return linen_model_program(loss, UNet(split, numbers.dtype, sizes), numbers, batch, num_inputs=2)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Numbers(dtype), SMALL)


def make_large(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Shapes(dtype), LARGE)

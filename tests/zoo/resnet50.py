"""ResNet-50: bottleneck blocks in stages of 3, 4, 6 and 3, with batch normalisation after every convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn

from tests.zoo.case import BATCH, Numbers, Shapes, Split, Step, cross_entropy, linen_model_program

STAGES = (3, 4, 6, 3)
COLUMN = {"kernel": "---m"}
ROW = {"kernel": "--m-"}


@dataclass(frozen=True)
class Sizes:
    """`image` is the side of the images, `width` the channels of the stem."""

    batch: int = BATCH
    image: int = 16
    width: int = 6
    classes: int = 24


SMALL = Sizes()
LARGE = Sizes(batch=256, image=224, width=64, classes=1000)


class Bottleneck(nn.Module):
    """1x1 to `width`, 3x3 with `stride`, 1x1 to four times `width`, around a shortcut."""

    split: Split
    dtype: Any
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        conv = partial(nn.Conv, use_bias=False, **kwargs)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, **kwargs)
        y = nn.relu(norm(name="norm1")(self._outward(conv(self.width, (1, 1), name="reduce"))(x)))
        middle = self.split.module(conv(self.width, (3, 3), (self.stride, self.stride), name="spread"), "d--m", ROW, "d---")
        y = nn.relu(norm(name="norm2")(middle(y)))
        y = norm(name="norm3")(self._outward(conv(4 * self.width, (1, 1), name="expand"))(y))
        if x.shape != y.shape:
            shortcut = conv(4 * self.width, (1, 1), (self.stride, self.stride), name="shortcut")
            x = norm(name="shortcut_norm")(self._outward(shortcut)(x))
        return nn.relu(x + y)

    def _outward(self, conv: nn.Module) -> Any:
        return self.split.module(conv, "d---", COLUMN, "d--m", pin=True)


class ResNet50(nn.Module):
    split: Split
    dtype: Any
    sizes: Sizes

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kwargs = {"dtype": self.dtype, "param_dtype": self.dtype}
        stem = nn.Conv(self.sizes.width, (7, 7), (2, 2), use_bias=False, name="stem", **kwargs)
        x = self.split.module(stem, "d---", COLUMN, "d--m", pin=True)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="stem_norm", **kwargs)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, count in enumerate(STAGES):
            for block in range(count):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.split, self.dtype, self.sizes.width * 2**stage, stride, name=f"stage{stage}_block{block}")(x)
        return nn.Dense(self.sizes.classes, name="head", **kwargs)(x.mean((1, 2)))


def _linen(split: Split, numbers: Numbers, sizes: Sizes) -> tuple[Step, tuple[Any, ...]]:
    batch = numbers.normal(sizes.batch, sizes.image, sizes.image, 3), numbers.integers(sizes.classes, sizes.batch)

    def loss(params: Any, state: Any, images: Any, labels: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), changed

    return linen_model_program(loss, ResNet50(split, numbers.dtype, sizes), numbers, batch)


def make_linen(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Numbers(dtype), SMALL)


def make_large(split: Split, dtype: Any) -> tuple[Step, tuple[Any, ...]]:
    return _linen(split, Shapes(dtype), LARGE)

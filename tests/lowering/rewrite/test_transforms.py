"""Fourier transforms on CPU: XLA gives their arrays the layout of the columns gathered behind them, and ends the process."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmdctx

X = jax.random.normal(jax.random.key(0), (16, 14))


def columns(value):
    """A value whose columns are split, and the same value whole."""
    return spmdctx.shard(lambda value: value * 1, ((1, 8),), ((1, 1),))(value)


def squared(x):
    return jnp.fft.irfft2(columns(jnp.fft.rfft2(x)) ** 2)


def in_loop(x):
    return lax.scan(lambda h, _: (jnp.fft.ifft2(columns(jnp.fft.fft2(h)) ** 2), None), x[:, :8] + 0j, None, length=2)[0]


def derived(x):
    return jax.grad(lambda x: jnp.sum(squared(x) ** 3))(x)


@pytest.mark.parametrize("function", [squared, in_loop, derived])
def test_transforms_before_gathered_columns_are_row_major(function):
    step = spmdctx.parallel(function, parallel_mode="semi_auto_parallel", device_num=8)
    layouts = re.findall(r"\]\{([\d,]*)\} fft\(", step.lower(X).compile().as_text())
    assert layouts
    assert set(layouts) == {"1,0"}
    assert step.verify(X).ok

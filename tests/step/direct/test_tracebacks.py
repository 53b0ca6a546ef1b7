"""Tracebacks of errors that pass a step: the user's own lines, and none of spmdctx or JAX between them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import StrategyError

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies what does not fit."""
    return x @ w[:3]


def indexed(w: jax.Array, x: jax.Array) -> jax.Array:
    """Fails inside of a gradient."""
    return jax.grad(lambda w: (x @ w)["loss"].sum())(w)


def split_wrongly(w: jax.Array, x: jax.Array) -> jax.Array:
    """Asks for a split that does not divide."""
    return spmdctx.shard(lambda x: x * 2, ((5, 1),))(x) @ w


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _frames(call: Callable[[], Any], kind: type[Exception]) -> list[str]:
    with pytest.raises(kind) as caught:
        call()
    return _files(caught.value)


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "in_shardings", "audit", "verify"])
@pytest.mark.parametrize(("step", "kind"), [(product, TypeError), (indexed, TypeError)])
def test_the_last_frame_is_the_users(method, step, kind):
    split = spmdctx.parallel(step, parallel_mode="auto_parallel")
    files = _frames(lambda: getattr(split, method)(W, X), kind)
    package = str(Path(spmdctx.__file__).parent)
    assert files[-1] == __file__
    assert sum(file.startswith(package) for file in files) <= 3
    assert not any("/jax/_src/" in file for file in files)


def test_an_error_about_the_strategies_shows_the_users_call_alone():
    step = spmdctx.parallel(split_wrongly, parallel_mode="semi_auto_parallel")
    files = _frames(lambda: step(W, X), StrategyError)
    assert set(files) == {__file__}


def test_the_filter_of_jax_can_be_turned_off():
    step = spmdctx.parallel(product, parallel_mode="auto_parallel")
    jax.config.update("jax_traceback_filtering", "off")
    try:
        files = _frames(lambda: step(W, X), TypeError)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert any("trace/capture" in file for file in files)


def test_a_fault_of_the_package_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("spmdctx.step.entry.planned_with_files", None)
    step = spmdctx.parallel(lambda w, x: x @ w, parallel_mode="auto_parallel")
    files = _frames(lambda: step.plan(W, X), TypeError)
    assert any("step/entry.py" in file for file in files)

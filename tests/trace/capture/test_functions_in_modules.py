"""Modules that hold functions as leaves, as those of Equinox do, and Equinox's `filter_jit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx import parallel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """A product and an activation; both are leaves."""

    weight: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(x @ self.weight)


def _layers(activation: Callable[[jax.Array], jax.Array] = jax.nn.relu) -> list[Layer]:
    keys = jax.random.split(jax.random.key(0), 2)
    return [Layer(jax.random.normal(key, (16, 16)) / 4, function) for key, function in zip(keys, (activation, jnp.tanh), strict=True)]


def _loss(weights: list[Any], layers: list[Layer], x: jax.Array) -> jax.Array:
    for weight, layer in zip(weights, layers, strict=True):
        x = Layer(weight, layer.activation)(x)
    return (x**2).mean()


def step(layers: list[Layer], x: jax.Array) -> tuple[list[Layer], jax.Array]:
    """Trains the weights, and gives the activations back as they came."""
    loss, gradients = jax.value_and_grad(_loss)([layer.weight for layer in layers], layers, x)
    return [Layer(layer.weight - 0.1 * gradient, layer.activation) for layer, gradient in zip(layers, gradients, strict=True)], loss


def _wanted(layers: list[Layer], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, gradients = jax.value_and_grad(_loss)([layer.weight for layer in layers], layers, x)
    return [layer.weight - 0.1 * gradient for layer, gradient in zip(layers, gradients, strict=True)], loss


X = jax.random.normal(jax.random.key(1), (32, 16))


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"])
def test_functions_pass_through_a_step(mode):
    split = parallel(step, parallel_mode=mode)
    layers, loss = split(_layers(), X)
    weights, wanted = _wanted(_layers(), X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for layer, weight, before in zip(layers, weights, _layers(), strict=True):
        np.testing.assert_allclose(layer.weight, weight, rtol=1e-4, atol=1e-6)
        assert layer.activation is before.activation
    again, _ = split(layers, X)
    assert [leaf.role.value for leaf in split.plan(again, X).inputs] == ["parameter", "parameter", "batch"]
    assert split.audit(layers, X).ok


def test_another_function_is_another_step():
    split = parallel(step, parallel_mode="auto_parallel")
    losses = [float(split(_layers(activation), X)[1]) for activation in (jax.nn.relu, jnp.sin)]
    wanted = [float(_wanted(_layers(activation), X)[1]) for activation in (jax.nn.relu, jnp.sin)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert losses[0] != losses[1]


def test_a_function_that_is_an_argument_is_still_refused():
    with pytest.raises(TypeError, match="static_argnames"):
        parallel(lambda layer, x: layer(x), parallel_mode="auto_parallel")(jnp.tanh, X)


class _FilterJit:
    """A stand-in with the attributes of Equinox's wrapper."""

    def __init__(self, fn: Callable[..., Any], donate: bool = False) -> None:
        self.__wrapped__, self.donate_first, self.donate_rest = fn, donate, False

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("the step runs what it wraps")


_FilterJit.__module__ = "equinox._jit"


@pytest.mark.parametrize("donate", [False, True])
def test_the_step_in_filter_jit_is_planned_with_what_it_donates(donate):
    layers = _layers()
    _, loss = parallel(_FilterJit(step, donate), parallel_mode="data_parallel")(layers, X)
    np.testing.assert_allclose(loss, _wanted(_layers(), X)[1], rtol=1e-5)
    assert parallel(_FilterJit(step, donate), parallel_mode="data_parallel").plan(_layers(), X).inputs[0].shape == (16, 16)
    captured = parallel(_FilterJit(step, donate), parallel_mode="data_parallel").lower(_layers(), X)
    aliased = captured.compile().memory_analysis().alias_size_in_bytes
    assert (aliased > 0) is donate

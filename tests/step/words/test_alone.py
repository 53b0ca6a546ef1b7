"""The warning of a step that one device would run faster."""

from types import SimpleNamespace

import jax.numpy as jnp
import optax
import pytest

import spmdctx
from spmdctx.step.words.alone import faster_alone
from tests.server import cases

GPUS = (SimpleNamespace(platform="gpu"),)


def train(w, x):
    return w - 0.1 * x.T @ jnp.tanh(x @ w), jnp.mean(x @ w)


def warned(width, rows, devices=GPUS, **options):
    step = spmdctx.parallel(train, parallel_mode="semi_auto_parallel", topology="h100", device_num=8, **options)
    step.plan(jnp.ones((width, width)), jnp.ones((rows, width)))
    entry = step._last.entry
    return faster_alone(entry.planned, entry.captured, entry.environment.settings, devices)


def test_a_small_step_is_faster_alone():
    (sentence,) = warned(32, 16)
    assert sentence.startswith("By the plan the step takes ")
    assert "on 8 devices" in sentence


@pytest.mark.parametrize(
    ("width", "rows", "devices", "options"),
    [
        (2048, 65536, GPUS, {}),
        (32, 16, (SimpleNamespace(platform="cpu"),), {}),
        (32, 16, (), {}),
    ],
    ids=["large", "virtual devices", "none"],
)
def test_other_steps_are_not_warned_of(width, rows, devices, options):
    assert warned(width, rows, devices, **options) == ()


def test_steps_on_servers_are_not_warned_of():
    tx = optax.sgd(0.1)
    step = cases.served(cases.step_of(tx), 2, 4, topology="h100")
    step.plan(cases.state_of(tx), cases.batch())
    entry = step._last.entry
    assert faster_alone(entry.planned, entry.captured, entry.environment.settings, GPUS) == ()

"""A step that is cut for servers is the step of one device: any optimizer, any number of servers and parts, any flavour."""

import jax
import jax.numpy as jnp
import optax
import pytest

from spmdctx.errors import UnsupportedError
from tests.server import cases
from tests.step.pipelined import models

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.cosine_decay_schedule(1e-2, 50)),
    "adagrad": optax.adagrad(0.1),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "norm of updates": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-0.1)),
    "lamb": optax.lamb(1e-2),
    "skips what is not finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "accumulates": optax.MultiSteps(optax.adam(1e-2), 2),
    "by label": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.set_to_zero()}, {**dict.fromkeys(cases.SIZES, "a"), "w2": "b"}),
}


@pytest.fixture
def in_64_bits():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("in_64_bits")
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_chain_of_optax_is_that_of_one_device(tx):
    step, state = cases.served(cases.step_of(tx), 3, 3), cases.state_of(tx)
    report = step.verify(state, cases.batch())
    assert len(report.rows) == len(jax.tree.leaves(state)) + 2
    assert max(row.difference for row in report.rows) <= 1e-12


@pytest.mark.parametrize(("kind", "flavour"), [("tied", "pytree"), ("remat", "linen"), ("scanned", "nnx"), ("aux", "pytree")])
def test_any_flavour_is_that_of_one_device(kind, flavour):
    case = models.case(flavour, kind, 2)
    report = cases.served(case.step, 2, 4).verify(case.state, case.batch)
    assert report.ok, report


@pytest.mark.parametrize("kind", ["dropout", "batch_norm"])
def test_what_differs_by_parts_is_noted_and_not_compared(kind):
    case = models.case("pytree", kind, 2)
    step = cases.served(case.step, 2, 4)
    assert any(note.startswith("In 4 parts, each part of the batch ") for note in step.plan(case.state, case.batch).notes)
    with pytest.raises(UnsupportedError, match="verify cannot compare this step with one device: each part of the batch"):
        step.verify(case.state, case.batch)
    assert cases.served(case.step, 2, 1).verify(case.state, case.batch).ok


def test_values_before_the_loss_and_arguments_reach_the_servers():
    tx = optax.inject_hyperparams(optax.sgd)(0.1)

    def step(state, given, rate, key):
        params, own, drawn = state
        x, y = given
        drawn, sub = jax.random.split(drawn)
        x = x + 0.01 * jax.random.normal(sub, x.shape) + jax.random.normal(key, (8,))
        value, grads = cases.spmdctx.value_and_grad(cases.loss)(jax.tree.map(lambda w: w * 1.5, params), x, y)
        own.hyperparams["learning_rate"] = rate.sum()
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own, drawn), value, rate, y.mean()

    params = cases.parameters(jnp.float32)
    state = (params, tx.init(params), jax.random.key(3))
    given = jax.tree.map(lambda own: own.astype(jnp.float32), cases.batch())
    report = cases.served(step, 3, 2, batch_argnames="given").verify(state, given, jnp.asarray([0.1, 0.2]), jax.random.key(4))
    assert report.ok, report
    assert len(report.rows) == len(jax.tree.leaves(state)) + 3

"""What a user may not expect of a call that runs is said once, by a warning, a note of the plan and the step's notes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextWarning

RNG = np.random.default_rng(0)
X, Y, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((16, 4), (16, 4), (4, 4)))
ODD = X[:13]


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def plain_step(w, x):
    return w - jax.grad(loss)(w, x)


def local_step(w, x):
    value, gradient = spmdctx.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


def nnx_step(model, optimizer, x):
    value, gradients = spmdctx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def said(step, *args):
    """The sentences that warnings say at a first and a second call, which must be the step's notes and among the plan's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
        step(*args)
    sentences = [str(one.message) for one in caught if one.category is ContextWarning]
    assert all(one.filename == __file__ for one in caught)
    assert all(any(sentence.startswith(note) for note in step.plan(*args).notes) for sentence in sentences)
    assert set(sentences) <= set(step.notes)
    return sentences


def test_a_step_without_a_mode_says_that_devices_are_idle():
    (sentence,) = said(spmdctx.parallel(plain_step), W, X)
    assert sentence.startswith("7 of 8 devices are idle")
    assert "parallel_mode='auto_parallel'" in sentence


def test_a_method_without_a_mode_says_it_too():
    class Trainer:
        @spmdctx.parallel
        def step(self, w, x):
            return plain_step(w, x)

    with pytest.warns(ContextWarning, match="devices are idle"):
        Trainer().step(W, X)


def test_one_device_says_that_nothing_is_split(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    (sentence,) = said(spmdctx.parallel(plain_step, parallel_mode="semi_auto_parallel"), W, X)
    assert sentence == "There is one device: parallel_mode 'semi_auto_parallel' splits nothing."


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_mode": "stand_alone"},
        {"parallel_mode": "auto_parallel", "device_num": 1},
        {"parallel_mode": "auto_parallel", "mesh": {"data": 1}},
        {"parallel_mode": "auto_parallel"},
        {"parallel_mode": "data_parallel"},
    ],
)
def test_nothing_is_said_of_what_was_asked_for(options):
    assert said(spmdctx.parallel(plain_step, **options), W, X) == []


def test_nothing_is_said_of_a_context_that_asks_for_one_device():
    with spmdctx.auto_parallel_context(parallel_mode="stand_alone"):
        assert said(spmdctx.parallel(plain_step), W, X) == []


ASKED = [{}, {"dataset_strategy": "data_parallel"}]


@pytest.mark.parametrize("mode", ["auto_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("asked", ASKED, ids=["not asked", "asked"])
def test_a_batch_that_does_not_divide_is_named(mode, asked):
    (sentence,) = said(spmdctx.parallel(plain_step, parallel_mode=mode, **asked), W, ODD)
    assert sentence.startswith("Batch leaf 'x' of shape (13, 4) does not divide over data")
    assert sentence.endswith("every device holds it whole. A multiple of 8 rows would.")


@pytest.mark.parametrize(
    ("batch", "options", "count"),
    [
        (ODD, {"parallel_mode": "auto_parallel", "dataset_strategy": "data_parallel"}, 1),
        (ODD, {"parallel_mode": "semi_auto_parallel"}, 1),
        (X, {"parallel_mode": "semi_auto_parallel"}, 0),
        (ODD, {"parallel_mode": "auto_parallel", "dataset_strategy": "full_batch"}, 0),
    ],
    ids=["auto", "semi", "divides", "asked for"],
)
def test_a_loaded_plan_says_what_the_searched_one_said(batch, options, count, tmp_path):
    file = str(tmp_path / "plan.json")
    searched = said(spmdctx.parallel(plain_step, batch_argnums=1, strategy_ckpt_save_file=file, **options), W, batch)
    loaded = said(spmdctx.parallel(plain_step, batch_argnums=1, strategy_ckpt_load_file=file, **options), W, batch)
    assert (loaded, len(loaded)) == (searched, count)


def test_a_loaded_plan_says_which_buckets_have_no_effect(tmp_path):
    file = str(tmp_path / "plan.json")
    options = {"parallel_mode": "semi_auto_parallel", "batch_argnums": 1, "all_reduce_fusion_config": [0]}
    for way in ("strategy_ckpt_save_file", "strategy_ckpt_load_file"):
        with pytest.warns(ContextWarning, match="Buckets of gradients have no effect"):
            spmdctx.parallel(plain_step, **options, **{way: file}).plan(W, X)


def test_one_warning_names_each_leaf_of_a_batch_that_does_not_divide():
    def step(w, batch):
        return w - jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)

    (sentence,) = said(spmdctx.parallel(step, parallel_mode="semi_auto_parallel"), W, {"x": ODD, "y": Y[:13]})
    assert sentence.count("'batch/x'") == sentence.count("'batch/y'") == 1


@pytest.mark.parametrize("options", [{"full_batch": True}, {"dataset_strategy": "full_batch"}, {"dataset_strategy": ((1, 1),)}])
def test_a_batch_that_is_to_be_whole_is_not_named(options):
    assert said(spmdctx.parallel(plain_step, parallel_mode="semi_auto_parallel", **options), W, ODD) == []


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
def test_summed_gradients_are_said_and_verified_against_one_device(mode):
    step = spmdctx.parallel(local_step, parallel_mode=mode)
    (sentence,) = said(step, W, X)
    assert "gradients are summed over the 8 devices" in sentence
    assert "gradients_mean=True" in sentence
    report = step.verify(W, X)
    assert [row.ok for row in report.rows] == [False, True]
    assert "NOT the same on 8 devices as on one" in str(report)
    assert "why: gradients_mean=False: gradients are summed over the 8 devices" in str(report)


def test_gradients_alone_of_micro_batches_are_said_to_be_summed():
    step = spmdctx.parallel(lambda w, x: w - spmdctx.grad(loss)(w, x), parallel_mode="data_parallel", grad_accumulation_step=2)
    (sentence,) = said(step, W, X)
    assert "summed" in sentence
    assert not step.verify(W, X).ok


@pytest.mark.parametrize("options", [{"gradients_mean": True}, {"gradients_mean": False}])
def test_gradients_that_are_reduced_as_asked_are_not_said(options):
    step = spmdctx.parallel(local_step, parallel_mode="data_parallel", **options)
    assert said(step, W, X) == []
    assert step.verify(W, X).ok is options["gradients_mean"]


def test_an_nnx_step_is_verified_against_one_device():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = spmdctx.parallel(nnx_step, parallel_mode="data_parallel", gradients_mean=True)
    report = step.verify(model, optimizer, X)
    assert report.ok, report
    assert report.reference == "on one"
    summed = step.with_options(gradients_mean=False).verify(model, optimizer, X)
    assert not summed.ok


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_a_table_that_the_user_names_as_batch_is_found_by_verify(mode):
    def step(w, table, x):
        value, gradient = spmdctx.value_and_grad(lambda w: jnp.mean(jax.nn.logsumexp(x @ w @ table.T, -1)))(w)
        return w - gradient, value

    options = {"gradients_mean": True} if mode == "data_parallel" else {"grad_accumulation_step": 2}
    table = RNG.normal(size=(16, 4)).astype(np.float32)
    assert spmdctx.parallel(step, parallel_mode=mode, **options).verify(W, table, X).ok
    assert not spmdctx.parallel(step, parallel_mode=mode, batch_argnums=(1, 2), **options).verify(W, table, X).ok


def test_random_numbers_of_each_device_are_compared_with_whole_arguments():
    def step(w, x, key):
        def noisy(w):
            return jnp.mean(((x + jax.random.normal(key, x.shape)) @ w) ** 2)

        value, gradient = spmdctx.value_and_grad(noisy)(w)
        return w - gradient, value

    report = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=True).verify(W, X, jax.random.key(0))
    assert report.ok
    assert report.reference == "with whole arguments"
    assert "draws random numbers of its own" in str(report)


def test_statistics_of_each_device_are_explained_by_verify():
    def step(w, x):
        value, gradient = spmdctx.value_and_grad(lambda w: jnp.mean(jnp.abs(x @ w - jnp.mean(x @ w, 0))))(w)
        return w - gradient, value

    report = spmdctx.parallel(step, parallel_mode="data_parallel", gradients_mean=True).verify(W, X)
    assert not report.ok
    assert "why: The loss is no plain sum over the rows of 'x'" in str(report)


def adam_step(w, state, x):
    updates, state = ADAM.update(jax.grad(loss)(w, x), state, w)
    return optax.apply_updates(w, updates), state


ADAM = optax.adam(1e-3)
WIDE = RNG.normal(size=(1001, 160)).astype(np.float32)
"""Weights whose first dimension no two devices can share."""


@pytest.mark.parametrize(("threshold", "count"), [(64, 1), (1000, 0)])
def test_state_that_the_parallel_optimizer_leaves_whole_is_said(threshold, count):
    config = {"parallel_optimizer_config": {"parallel_optimizer_threshold": threshold}}
    step = spmdctx.parallel(adam_step, parallel_mode="data_parallel", enable_parallel_optimizer=True, **config)
    sentences = said(step, WIDE, ADAM.init(WIDE), np.ones((16, 1001), np.float32))
    assert len(sentences) == count
    assert all("of state whole on every device" in one and "'state/0/mu' [1001, 160]" in one for one in sentences)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"parallel_mode": "semi_auto_parallel"}, "a batch whose rows divide over the devices, or parallel_mode='auto_parallel'"),
        ({"parallel_mode": "auto_parallel"}, "dataset_strategy='data_parallel' has the batch split in any case"),
        ({"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}, "search_mode='dynamic_programming'"),
    ],
    ids=["strategies", "search", "propagation"],
)
def test_work_that_devices_repeat_is_noted_with_a_remedy(options, remedy):
    (note,) = [note for note in spmdctx.plan(plain_step, W, ODD, **options).notes if "repeat each other's work" in note]
    assert remedy in note

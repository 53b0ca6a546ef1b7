"""What a script may do with the handles that a step returns: read, replace, swap and keep them, and what servers make of it."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.server.engine.client import JOB, NUM_WORKERS, WORKER
from spmdctx.server.engine.fleet import Job
from spmdctx.server.engine.job import told
from spmdctx.server.remote import RemoteArray
from spmdctx.step.served import entry
from tests.server import cases, tables
from tests.server.local import LocalClient


@pytest.fixture(autouse=True)
def without_an_engine(monkeypatch):
    monkeypatch.setenv(WORKER, "0")
    monkeypatch.setenv(NUM_WORKERS, "2")
    monkeypatch.setattr(entry, "Client", LocalClient)


def lagging(rate=0.1):
    """A step with two parameters of one shape, which also gives back the state that it got."""

    def loss(params, x):
        return jnp.mean((x @ params["online"]) ** 2 + (x @ params["target"]))

    def step(params, count, x):
        value, grads = spmdctx.value_and_grad(loss)(params, x)
        online = params["online"] - rate * grads["online"]
        return {"online": online, "target": params["target"]}, count + 1, {"loss": value, "count": count, "old": params["online"]}

    return step


FIRST = {"online": jnp.arange(4.0), "target": jnp.ones(4)}
X = jnp.arange(32.0).reshape(8, 4) / 32


def both(script, fn=None, state=None):
    """Runs a script on servers and on one device."""
    cases_fn, state = fn or lagging(), state or (FIRST, jnp.int32(0))
    found = script(cases.served(cases_fn, 2, 2), *state)
    spmdctx.reset_ps_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WORKER)
        wanted = script(spmdctx.parallel(cases_fn, parallel_mode="stand_alone", grad_accumulation_step=2), *state)
    return found, wanted


def test_results_that_are_state_have_the_value_that_the_step_read():
    def script(step, params, count):
        kept = []
        for _ in range(3):
            params, count, given = step(params, count, X)
            kept.append(given)
        return [(int(one["count"]), np.asarray(one["old"])) for one in kept]

    found, wanted = both(script)
    for (count, old), (wanted_count, wanted_old) in zip(found, wanted, strict=True):
        assert count == wanted_count
        np.testing.assert_allclose(old, wanted_old, rtol=1e-6)


def test_a_handle_in_the_place_of_another_is_taken_over():
    def script(step, params, count):
        for number in range(4):
            params, count, given = step(params, count, X)
            if number == 1:
                params = {**params, "target": params["online"]}
        return np.asarray(params["online"]), np.asarray(params["target"]), float(given["loss"])

    for own, other in zip(*both(script), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_a_handle_of_an_earlier_call_is_refused_by_name():
    step = cases.served(lagging(), 2, 2)
    kept, count, _ = step(FIRST, jnp.int32(0), X)
    params, count, _ = step(kept, count, X)
    with pytest.raises(UnsupportedError, match="got a handle that an earlier call has returned") as caught:
        step({**params, "online": kept["online"]}, count, X)
    assert "after 1 steps, and 2 are done" in str(caught.value)


def test_rows_of_a_table_and_of_its_state_can_be_replaced():
    optimizer = optax.adam(1e-2)

    def script(step, *state):
        for number in range(4):
            state, loss = step(state, tables.batch(number))
            if number == 1:
                state = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else 0.5 * np.asarray(leaf), state)
        return [loss, *map(np.asarray, jax.tree.leaves(state))]

    with jax.enable_x64(True):
        params = tables.parameters()
        params = {name: np.asarray(leaf) for name, leaf in params.items()}
        found, wanted = both(script, tables.step_of(optimizer), (params, optimizer.init(params)))
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)


def test_a_step_without_a_loss_reads_handles_call_after_call():
    train, evaluate = cases.served(lagging(), 2, 2), cases.served(lambda params, x: x @ params["online"], 2, 2)
    params, count = FIRST, jnp.int32(0)
    for _ in range(3):
        params, count, _ = train(params, count, X)
        np.testing.assert_allclose(evaluate(params, X), X @ np.asarray(params["online"]), rtol=1e-6)
        assert isinstance(params["online"], RemoteArray)
    assert evaluate.verify(params, X).ok


def test_handles_are_compared_and_iterated_by_value():
    step = cases.served(lagging(), 2, 2)
    params, count, _ = step(FIRST, jnp.int32(0), X)
    assert count == 1
    assert (count != 1) == False  # noqa: E712  by value
    assert count
    assert len(params["online"]) == len(list(params["online"])) == 4


def test_a_batch_may_be_deleted_while_its_step_may_be_done_again():
    step = cases.served(lagging(), 2, 2)
    x = X + 0
    params, count, _ = step(FIRST, jnp.int32(0), x)
    x.delete()
    run = step._last.entry.served
    run._client.rewind(0)
    params, count, given = step(params, count, X)
    assert int(count) == 2
    assert np.isfinite(float(given["loss"]))


def test_handles_are_operands():
    step = cases.served(lagging(), 2, 2)
    params, count, _ = step(FIRST, jnp.int32(0), X)
    whole = np.asarray(params["online"])
    assert (count % 2 == 1, count > 0, 3 - count) == (True, True, 2)
    np.testing.assert_array_equal(jnp.ones(4) + params["online"] * 2 - params["online"], 1 + whole * 2 - whole)


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto_parallel"])
def test_state_and_batches_are_made_for_a_step_on_servers_as_for_others(mode):
    spmdctx.set_ps_context(enable_ps=True, num_servers=2)
    step = spmdctx.parallel(lagging(), parallel_mode=mode, grad_accumulation_step=2)
    params, count = step.init(lambda: (FIRST, jnp.int32(0)), batch=X)
    x = step.shard_batch(X)
    assert jax.tree.structure(step.in_shardings(params, count, x)) == jax.tree.structure((params, count, x))
    params, count, given = step(params, count, x)
    assert step.out_shardings(params, count, x)[2].keys() == given.keys()
    wanted = cases.served(lagging(), 1, 2)(FIRST, jnp.int32(0), X)
    np.testing.assert_allclose(np.asarray(params["online"]), np.asarray(wanted[0]["online"]), rtol=1e-6)


def test_a_launched_script_plans_for_its_job_and_hears_of_idle_options(monkeypatch):
    monkeypatch.setenv(JOB, told(Job(3, "async", 5, 20, "/run")))
    spmdctx.set_ps_context(num_servers=2, save_every=20, folder="other")
    step = spmdctx.parallel(lagging(), parallel_mode="stand_alone")
    assert len(step.plan(FIRST, jnp.int32(0), X).servers) == 3
    (folder, servers) = [text for text in step.notes if "has no effect in this script" in text]
    assert "other' has no effect" in folder
    assert servers == "num_servers=2 has no effect in this script: spmdctx launch has started the job with 3."


def test_files_of_strategies_are_said_to_have_no_effect(tmp_path):
    spmdctx.set_ps_context(enable_ps=True)
    file = str(tmp_path / "plan")
    step = spmdctx.parallel(lagging(), parallel_mode="semi_auto_parallel", device_num=2, strategy_ckpt_save_file=file)
    step.plan(FIRST, jnp.int32(0), X)
    assert "strategy_ckpt_save_file has no effect on a step on servers." in step.notes


@pytest.mark.parametrize(("trains", "said"), [(True, 1), (False, 0)])
def test_a_step_that_trains_without_servers_says_so(trains, said):
    def plain(params, x):
        value, grads = jax.value_and_grad(lambda params: jnp.mean((x @ params) ** 2))(params)
        return (params - grads, value) if trains else value

    spmdctx.set_ps_context(enable_ps=True)
    step = spmdctx.parallel(plain, parallel_mode="stand_alone")
    step.plan(jnp.ones(4), X)
    text = "plain has no loss of spmdctx.value_and_grad: each worker renews params by itself."
    assert [note for note in step.notes if "no loss" in note] == [text] * said


def test_a_step_on_servers_is_not_called_inside_of_jit():
    step = cases.served(lagging(), 2, 2)
    with pytest.raises(UnsupportedError, match="step is called inside of jit, grad or vmap"):
        jax.jit(step)(FIRST, jnp.int32(0), X)


def test_the_first_state_does_not_stay_with_a_worker():
    first = {"online": jnp.arange(4.0), "target": jnp.ones(4)}
    seen = [weakref.ref(leaf) for leaf in jax.tree.leaves(first)]
    step = cases.served(lagging(), 2, 2)
    state, count, _ = step(first, jnp.int32(0), X)
    state, count, _ = step(state, count, X)
    del first
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_a_deep_copy_of_state_keeps_its_values():
    step = cases.served(lagging(), 2, 2)
    params, count, _ = step(FIRST, jnp.int32(0), X)
    kept, wanted = copy.deepcopy(params), np.asarray(params["online"])
    params, count, _ = step(params, count, X)
    np.testing.assert_array_equal(kept["online"], wanted)
    assert not np.array_equal(params["online"], wanted)
    rolled_back, _, _ = step(kept, count, X)
    np.testing.assert_allclose(rolled_back["online"], params["online"], rtol=1e-6)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_worker_that_comes_late_compiles_before_it_is_given_parts(monkeypatch, caplog, is_late):
    class Late(LocalClient):
        def hello(self, fingerprint, num_parts):
            super().hello(fingerprint, num_parts)
            return is_late

        def ask(self, step):
            counts.append(sum("Compiling jit(step)" in text for text in caplog.messages))
            return super().ask(step)

    counts = []
    monkeypatch.setattr(entry, "Client", Late)
    with jax.log_compiles():
        cases.served(lagging(), 2, 2)(FIRST, jnp.int32(0), X)
    assert counts[0] == is_late
    assert sum("Compiling jit(step)" in text for text in caplog.messages) == 1

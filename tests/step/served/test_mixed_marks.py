"""Parameters without a mark stay with workers: training is that of one process, whatever is lost, read or replaced."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.server.engine.client import NUM_WORKERS, WORKER
from spmdctx.server.initial import server_init
from spmdctx.step.served import entry
from tests.server import cases, tables
from tests.server.local import LocalClient

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(optax.cosine_decay_schedule(1e-2, 50)),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
}


@pytest.fixture(autouse=True)
def without_an_engine(monkeypatch):
    monkeypatch.setenv(WORKER, "0")
    monkeypatch.setenv(NUM_WORKERS, "3")
    monkeypatch.setattr(entry, "Client", LocalClient)
    with jax.enable_x64(True):
        yield


def norms_of(tx):
    """A step that also gives norms of what servers and workers hold."""

    def step(state, given):
        params, own = state
        value, grads = spmdctx.value_and_grad(cases.loss)(params, *given)
        updates, own = tx.update(grads, own, params)
        params = optax.apply_updates(params, updates)
        return (params, own), {"loss": value, "norm": optax.tree.norm(params), "w2": optax.tree.norm(updates["w2"])}

    return step


def served(fn, marks, **options):
    step = cases.served(fn, 2, 3, **options)
    spmdctx.set_ps_context(save_every=3)
    spmdctx.set_param_ps(marks)
    return step


def on_one_device(fn, train):
    spmdctx.reset_ps_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WORKER)
        return train(spmdctx.parallel(fn, parallel_mode="stand_alone", grad_accumulation_step=3))


def train_of(tx, steps=8):
    def train(step):
        state, found = cases.state_of(tx), []
        for number in range(steps):
            state, result = step(state, cases.batch(number))
            found.append(jax.tree.map(np.asarray, result))
        return jax.tree.map(np.asarray, state), found

    return train


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_that_of_one_process(tx):
    train = train_of(tx)
    found = train(served(norms_of(tx), ["*/w1", "*/bias"]))
    assert cases.largest_difference(found, on_one_device(norms_of(tx), train)) <= 1e-12


@pytest.mark.parametrize(("name", "marked"), [("clip + adamw", ("deep", "wide", "user")), ("adam", ("deep",))], ids=["all", "one"])
def test_rows_of_marked_tables_cross_and_the_tower_stays(name, marked):
    tx = OPTIMIZERS[name]

    def train(step):
        params = tables.parameters()
        params |= {name: jax.random.normal(jax.random.key(7), shape) for name, shape in tables.ROWS.items() if name not in marked}
        state, losses = (params, server_init(tx.init, params)), []
        for number in range(4):
            state, loss = step(state, tables.batch(number))
            losses.append(float(loss))
        return jax.tree.map(np.asarray, state), losses

    found = train(served(tables.step_of(tx), [f"*/{name}" for name in marked]))
    assert cases.largest_difference(found, on_one_device(tables.step_of(tx), train)) <= 1e-12


def test_a_table_without_a_mark_is_not_made_by_servers():
    tx = optax.sgd(0.1)
    step = served(tables.step_of(tx), "*/deep")
    params = tables.parameters()
    with pytest.raises(UnsupportedError, match=r"(?s)Servers cannot hold an array of server_table by rows.*no mark of set_param_ps"):
        step((params, server_init(tx.init, params)), tables.batch(0))


class Second(LocalClient):
    """A second worker of a job."""

    worker = 1

    def __init__(self, first):
        self.__dict__ = first.__dict__


def clients(monkeypatch):
    """Has all clients belong to one job; returns them."""
    found = []

    def client_of(job):
        found.append(Second(found[0]) if found else LocalClient(job))
        return found[-1]

    monkeypatch.setattr(entry, "Client", client_of)
    return found


def test_workers_that_come_late_or_fall_behind_have_the_same_state(monkeypatch):
    clients(monkeypatch)
    tx = OPTIMIZERS["clip + adamw"]
    first, second = (served(norms_of(tx), ["*/w1", "*/scale"]) for _ in range(2))
    one = another = cases.state_of(tx)
    results = []
    for number in range(4):
        one, result = first(one, cases.batch(number))
        results.append(jax.tree.map(np.asarray, result))
    for number in range(7):
        if number == 2:
            assert cases.largest_difference(another, jax.tree.map(np.asarray, one)) < 0.05, "the newest state that is saved"
        another, result = second(another, cases.batch(number))
        results.append(jax.tree.map(np.asarray, result))
    for number in range(4, 8):
        one, result = first(one, cases.batch(number))
        results.append(jax.tree.map(np.asarray, result))
    another, _ = second(another, cases.batch(7))
    wanted = on_one_device(norms_of(tx), train_of(tx))
    assert cases.largest_difference((one, another), (wanted[0], wanted[0])) <= 1e-12
    assert cases.largest_difference(results, [*wanted[1][:4], *wanted[1][:7], *wanted[1][4:]]) <= 1e-12


def test_any_order_of_losses_leaves_no_trace(monkeypatch):
    found, chance, tx = clients(monkeypatch), random.Random(0), OPTIMIZERS["adam"]
    step = served(norms_of(tx), ["*/w2"])
    runs = [(step, cases.state_of(tx), 0)]
    for _ in range(40):
        index = chance.randrange(len(runs))
        step, state, number = runs[index]
        match chance.random():
            case fate if fate < 0.1 and number:
                found[0].rewind(found[0].kept_from)
            case fate if fate < 0.2 and len(runs) < 3:
                runs.append((served(norms_of(tx), ["*/w2"]), cases.state_of(tx), 0))
            case _ if number < 8:
                state, _ = step(state, cases.batch(number))
                runs[index] = step, state, number + 1
    for step, state, number in runs:
        for later in range(number, 8):
            state, _ = step(state, cases.batch(later))
    wanted, _ = on_one_device(norms_of(tx), train_of(tx))
    assert len(runs) == 3
    assert cases.largest_difference(state, wanted) <= 1e-12


def test_servers_that_are_lost_take_workers_back(monkeypatch):
    found = clients(monkeypatch)
    tx = OPTIMIZERS["adam"]

    def train(step):
        state, results = cases.state_of(tx), []
        for number in range(8):
            state, result = step(state, cases.batch(number))
            results.append(jax.tree.map(np.asarray, result))
            if found and number in (1, 5):
                jax.jit(jnp.negative, donate_argnums=0)(jnp.asarray(state[0]["w2"]))
                found[0].rewind(found[0].kept_from)
        return jax.tree.map(np.asarray, state), results

    lost = train(served(norms_of(tx), ["*/w1", "*/bias"]))
    found.clear()
    assert cases.largest_difference(lost, on_one_device(norms_of(tx), train)) <= 1e-12


def test_arrays_in_place_of_handles_stay_with_workers_too():
    tx = OPTIMIZERS["adam"]

    def train(step):
        state = cases.state_of(tx)
        for number in range(7):
            state, _ = step(state, cases.batch(number))
            if number in (2, 4):
                params = {**state[0], "w2": jnp.asarray(state[0]["w2"]) * 0.5, "w1": jnp.asarray(state[0]["w1"]) + 1}
                state = params, state[1]
        return jax.tree.map(np.asarray, state)

    found = train(served(norms_of(tx), "*/w1"))
    assert cases.largest_difference(found, on_one_device(norms_of(tx), train)) <= 1e-12

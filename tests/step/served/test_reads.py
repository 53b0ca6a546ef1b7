"""Reading state from servers: all of one version, unchanged state stays there, and what was exchanged is counted."""

import random
from types import SimpleNamespace

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.server.engine import client
from spmdctx.server.engine.client import NUM_WORKERS, WORKER, Client, Lost
from spmdctx.server.engine.server import Pulled
from spmdctx.server.remote import RemoteArray
from spmdctx.step.served import entry
from tests.server import cases, tables
from tests.server.local import LocalClient
from tests.step.served.test_handles import FIRST, X, lagging


@pytest.fixture(autouse=True)
def without_an_engine(monkeypatch):
    monkeypatch.setenv(WORKER, "0")
    monkeypatch.setenv(NUM_WORKERS, "2")
    monkeypatch.setattr(entry, "Client", LocalClient)


class Advancing:
    """A server whose version grows by itself, at most one step ahead of the others; it keeps the version before if it was read."""

    def __init__(self, others, chance):
        self.version, self.others, self.chance, self.keeps = 3, others, chance, False
        self.pull = SimpleNamespace(remote=self.pulled)

    def advance(self):
        if self.chance.random() < 0.5 and all(self.version <= other.version for other in self.others):
            self.version += 1

    def pulled(self, generation, version, slots, *, is_exact):
        for other in self.others:
            other.advance()
        while self.version < version:
            for other in self.others:
                other.advance()
        kept, self.keeps = self.keeps, self.keeps or is_exact
        if is_exact and version != self.version and not (kept and version == self.version - 1):
            return None
        at = version if is_exact else self.version
        return Pulled(at, [f"{slot} of version {at}" for slot in slots])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_servers_hold_is_read_in_one_version(monkeypatch, mode):
    monkeypatch.setattr(client, "answer", lambda calls, who: calls)
    mixed = lost = 0
    for seed in range(100):
        own = object.__new__(Client)
        own.job, own.traffic, own._num_bytes = SimpleNamespace(mode=mode), {"pulled": 0}, 0
        own._ray, own.generation, own.refresh = None, 1, lambda: None
        chance = random.Random(seed)
        own._servers = []
        own._servers += [Advancing(own._servers, chance) for _ in range(3)]
        for _ in range(4):
            try:
                _, found = own.latest(2, lambda count: [[f"in/{number}"] for number in range(count - 1)] + [[]])
            except Lost:
                lost += 1
                continue
            assert [len(values) for values in found] == [1, 1, 0]
            mixed += len({value.partition(" of ")[2] for values in found for value in values}) > 1
    assert (mixed > 0) == (mode == "async")
    assert lost < 100


def test_an_evaluation_reads_each_server_once(monkeypatch):
    train, evaluate = cases.served(lagging(), 2, 2), cases.served(lambda params, x: (x @ params["online"]).sum() + params["target"], 2, 2)
    params, _, _ = train(FIRST, jnp.int32(0), X)
    asked = []
    found = LocalClient.latest
    monkeypatch.setattr(LocalClient, "latest", lambda self, least, slots: asked.append(slots(2)) or found(self, least, slots))
    evaluate(params, X)
    assert len(asked) == 1
    assert sorted(slot for own in asked[0] for slot in own) == ["in/0", "in/1"]


def test_state_that_a_step_without_a_loss_gives_back_stays_on_servers():
    train, evaluate = cases.served(lagging(), 2, 2), cases.served(lambda params, x: (params, x @ params["online"]), 2, 2)
    params, count, _ = train(FIRST, jnp.int32(0), X)
    given, found = evaluate(params, X)
    assert isinstance(given["online"], RemoteArray)
    assert isinstance(given["target"], RemoteArray)
    params, count, _ = train(given, count, X)  # as if it had been passed on at once
    assert np.isfinite(np.asarray(found)).all()


def test_a_step_that_copies_state_gives_arrays_of_this_process():
    train, copied = cases.served(lagging(), 2, 2), cases.served(lambda params: {"saved": jax.tree.map(jnp.copy, params)}, 2, 2)
    params, _, _ = train(FIRST, jnp.int32(0), X)
    found = copied(params)["saved"]
    assert not any(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(found))
    np.testing.assert_array_equal(found["online"], np.asarray(params["online"]))


def test_a_module_keeps_its_handles_through_an_evaluation():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def train(model, x):
        value, grads = spmdctx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        nnx.update(model, jax.tree.map(lambda own, grad: own - 0.1 * grad, nnx.state(model), nnx.state(grads)))
        return value

    cases.served(train, 2, 2)(model, X)
    assert isinstance(model.kernel.get_value(), RemoteArray)
    found = cases.served(lambda model, x: model(x), 2, 2)(model, X)
    assert isinstance(model.kernel.get_value(), RemoteArray)
    assert found.shape == (8, 2)


def test_a_step_tells_what_it_has_exchanged_with_servers():
    plain = spmdctx.parallel(lambda x: x.sum(), parallel_mode="stand_alone")
    step = cases.served(lagging(), 2, 2)
    assert step.traffic == {}
    step(FIRST, jnp.int32(0), X)
    step._last.entry.served._client.traffic = {"pushed": 5, "pulled": 7}
    assert step.traffic == {"pushed": 5, "pulled": 7}
    spmdctx.reset_ps_context()
    plain(X)
    assert plain.traffic == {}


@pytest.mark.parametrize("name", ["deep", "w1"])
def test_servers_hold_state_in_the_type_that_jax_gives_it(name):
    shapes = {**tables.ROWS, "w1": (15, 8), "w2": (8,)}
    params = {key: np.ones(shape, "float64" if key == name else "float32") for key, shape in shapes.items()}
    optimizer = tables.OPTIMIZERS["momentum"]()
    step = cases.served(tables.step_of(optimizer), 2, 2)
    state = params, optimizer.init(jax.tree.map(jnp.asarray, params))
    (text,) = [note for note in step.plan(state, tables.batch(0)).notes if "jax_enable_x64" in note]
    assert f"/{name} is float64, and servers hold it as float32" in text
    state, _ = step(state, tables.batch(0))
    shards = step._last.entry.served._client._shards
    assert {str(leaf.dtype) for shard in shards for leaf in shard.saved().values()} == {"float32"}

"""Tables cross by rows: what is a table and what is none, and that training on servers is that of one device."""

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.server.alone import Alone
from spmdctx.server.initial import ServerTable, server_init, server_table
from tests.server import cases, tables

ROWS = 2000


@pytest.fixture(autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


def entry_of(step, *args):
    step.plan(*args)
    return step._last.entry


@pytest.mark.parametrize("name", tables.OPTIMIZERS)
def test_a_recommender_is_that_of_one_device(name):
    optimizer = tables.OPTIMIZERS[name]()
    params = tables.parameters()
    state = params, optimizer.init(params)
    fn = tables.step_of(optimizer)
    entry = entry_of(cases.served(fn, 2, 2), state, tables.batch(0))
    found = entry.step.tables
    assert ([table.is_still for table in found.tables], found.notes) == ([name == "clip and adagrad"] * 3, ())
    assert all(len(table.held) == 1 + sum(np.shape(leaf) == (ROWS, 4) for leaf in jax.tree.leaves(state[1])) for table in found.tables)
    leaves = jax.tree.leaves((state, tables.batch(0)))
    alone, call, plain = Alone(entry.step, entry.cut, leaves), jax.jit(jexc.jaxpr_as_fun(entry.part.jaxpr)), jax.jit(fn)
    for number in range(6):
        leaves = jax.tree.leaves((state, tables.batch(number)))
        alone.advance(entry.part, call, leaves)
        state, value = plain(state, tables.batch(number))
    assert cases.largest_difference(alone.results(leaves), [*jax.tree.leaves(state), value]) <= 1e-12


def found_in(loss, params, optimizer=None, step=None, batch=None):
    """The tables of a step by path, and what is said of others."""
    optimizer = optimizer or optax.sgd(0.1)
    state = params, optimizer.init(params)
    batch = (jnp.arange(12).reshape(6, 2),) if batch is None else batch
    found = entry_of(cases.served(step or tables.step_of(optimizer, loss), 2, 2), state, batch).step
    named = [] if found.tables is None else [found.captured.inputs[table.number].path for table in found.tables.tables]
    return named, "" if found.tables is None else " ".join(found.tables.notes)


def rows(*shape):
    return jnp.ones((ROWS, *shape))


INSIDE, OUTSIDE = [[3, 1], [-1, 3], [7, 7], [0, 1]], [[3, 1], [-1, 3], [ROWS + 5, 0], [3, 3]]
READS = {
    "an index": (lambda table, ids: table[ids], INSIDE),
    "take that clips": (lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"), OUTSIDE),
    "take that fills": (lambda table, ids: jnp.take(table, ids, axis=0, mode="fill", fill_value=0), OUTSIDE),
    "a cast": (lambda table, ids: table.astype(jnp.bfloat16)[ids].astype(float), INSIDE),
    "twice": (lambda table, ids: table[ids] * table[ids + 1], INSIDE),
    "scaled": (lambda table, ids: (2 * table)[ids], INSIDE),
    "hashed ids": (lambda table, ids: table[(ids * 31 + 7) % ROWS], OUTSIDE),
}


@pytest.mark.parametrize(("read", "ids"), READS.values(), ids=READS)
def test_a_parameter_that_is_read_by_ids_is_a_table(read, ids):
    def loss(table, ids):
        return jnp.mean(read(table, ids) ** 2)

    table, batch = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 2))), (jnp.asarray(ids),)
    state = table, optax.sgd(0.1).init(table)
    step = cases.served(tables.step_of(optax.sgd(0.1), loss), 2, 2)
    assert len(entry_of(step, state, batch).step.tables.tables) == 1
    assert step.verify(state, batch).ok


def test_embeddings_of_linen_and_nnx_are_tables():
    embed = linen.Embed(ROWS, 4, dtype=jnp.bfloat16)
    ids = jnp.arange(12).reshape(6, 2)
    assert found_in(lambda params, ids: jnp.mean(embed.apply(params, ids) ** 2), embed.init(jax.random.key(0), ids)) == (
        ["state/0/params/embedding"],
        "",
    )

    model = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model, optimizer, batch):
        value, gradients = spmdctx.value_and_grad(lambda model: jnp.mean(model(batch[0]) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    found = entry_of(cases.served(step, 2, 2), model, optimizer, (ids,)).step
    assert [len(table.held) for table in found.tables.tables] == [3]


FAULTS = {
    "a product": (lambda p, ids: jnp.mean((p["t"][ids] @ p["t"].T) ** 2), "the loss reads more of it than rows"),
    "a norm": (lambda p, ids: jnp.mean(p["t"][ids]) + jnp.sum(p["t"] ** 2), "the loss reads more of it than rows"),
    "learned ids": (lambda p, ids: jnp.mean(p["t"][ids + p["w"].astype(int)]), "its ids depend on parameters"),
    "columns": (lambda p, ids: jnp.mean(p["t"][:, ids]), "the loss reads more of it than rows"),
    "a remat": (lambda p, ids: jnp.mean(jax.checkpoint(lambda t: jnp.sin(t[ids]))(p["t"]) ** 2), "the loss reads more of it than rows"),
}


@pytest.mark.parametrize(("loss", "said"), FAULTS.values(), ids=FAULTS)
def test_what_is_read_in_other_ways_crosses_whole(loss, said):
    found, notes = found_in(loss, {"t": rows(20), "w": jnp.ones(())})
    assert found == []
    assert said in notes


def test_what_is_renewed_in_other_ways_crosses_whole():
    def loss(params, ids):
        return jnp.mean(params["t"][ids] ** 2)

    params = {"t": rows(2)}
    assert "sums more of it than its gradient" in found_in(loss, params, optax.lamb(0.1))[1]
    assert "a step reads up to 12 rows" not in found_in(loss, params)[1]
    assert "it has 500 rows" in found_in(loss, {"t": jnp.ones((500, 2))})[1]
    many = (jnp.zeros((1000, 2), int),)
    assert "a step reads up to 2000 rows of its 2000" in found_in(loss, params, batch=many)[1]

    def gives_back(state, batch):
        _, gradients = spmdctx.value_and_grad(loss)(state[0], *batch)
        return (jax.tree.map(lambda w, g: w - g, state[0], gradients), state[1]), gradients

    assert "the step gives its rows back" in found_in(loss, params, step=gives_back)[1]


def test_server_tables_are_arrays_without_servers_and_handles_with_them():
    plain = tables.parameters()
    assert isinstance(plain["deep"], jax.Array)
    spmdctx.set_ps_context(enable_ps=True)
    params = tables.parameters()
    own = server_init(optax.adamw(0.1).init, params)
    assert isinstance(own[0].mu["wide"], ServerTable)
    assert isinstance(own[0].nu["w1"], jax.Array)
    assert (
        cases.largest_difference(*(jax.tree.map(np.asarray, tree) for tree in ((params, own), (plain, optax.adamw(0.1).init(plain))))) == 0
    )
    with pytest.raises(UnsupportedError, match="A result depends on rows of a table that servers make"):
        server_init(lambda params: jax.tree.map(lambda own: own + 1, params), params)
    uniform = server_table((40_000, 2), init=jax.random.uniform, key=jax.random.PRNGKey(1)).fetch()
    assert np.unique(uniform).size > 70_000

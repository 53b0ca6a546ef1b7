"""Layers of attention are planned with little work: counted in priced pairs of states, not in seconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.meshes import MAX_AXES

MOST_PAIRS = 100_000
"""Pairs of states of all full tables of three axes, of which a layer has 20 million."""


def _split(values, weights):
    return jnp.einsum("bsd,dhk->bshk", values, weights)


def _grouped(p, x):
    """Heads in groups that share keys and values."""
    q, k, v = (_split(x, p[name]) for name in "qkv")
    k, v = k[:, :, :2], v[:, :, :2]
    q = q.reshape(*q.shape[:2], 2, 4, q.shape[3])
    weights = jax.nn.softmax(jnp.einsum("bsgrk,btgk->bgrst", q, k))
    found = jnp.einsum("bgrst,btgk->bsgrk", weights, v).reshape(*x.shape[:2], 8, 16)
    return x + jnp.einsum("bshk,hkd->bsd", found, p["o"])


def _latent(p, x):
    """Few learned queries."""
    q = _split(jnp.broadcast_to(p["l"], (8, 16, 64)), p["q"])
    weights = jax.nn.softmax(jnp.einsum("blhk,bthk->bhlt", q, _split(x, p["k"])))
    return jnp.einsum("bhlt,bthk,hkd->bld", weights, _split(x, p["v"]), p["o"])


def _step(attend):
    def step(p, x):
        value, grads = jax.value_and_grad(lambda p: jnp.mean(attend(p, x) ** 2))(p)
        return jax.tree.map(lambda one, grad: one - grad, p, grads), value

    return step


@pytest.mark.parametrize(("attend", "num_axes"), [(_grouped, MAX_AXES), (_latent, 2)])
def test_a_mesh_of_equal_axes_is_searched_without_its_full_tables(attend, num_axes, monkeypatch):
    pairs: dict[int, int] = {}
    problem = Tables.problem

    def counted(tables):
        found = problem(tables)
        axes = len(tables.space.mesh.axes)
        pairs[axes] = pairs.get(axes, 0) + sum(edge.table.size for edge in found.edges)
        return found

    monkeypatch.setattr(Tables, "problem", counted)
    weights = {**{name: jnp.ones((64, 8, 16)) for name in "qkv"}, "o": jnp.ones((8, 16, 64)), "l": jnp.ones((16, 64))}
    plan = spmdctx.plan(_step(attend), weights, jnp.ones((8, 32, 64)), parallel_mode="auto_parallel", topology="cpu", device_num=8)
    assert plan.gap == 0.0
    assert len(plan.mesh) == num_axes
    assert set(pairs) == {1, 2, num_axes}
    assert pairs.get(MAX_AXES, 0) < MOST_PAIRS


def test_ops_with_equal_states_share_their_tables(monkeypatch):
    shares = []
    problem = Tables.problem

    def counted(tables):
        found = problem(tables)
        shares.append(len({id(edge.table) for edge in found.edges}) / len(found.edges))
        return found

    monkeypatch.setattr(Tables, "problem", counted)
    p, x = {"w": jnp.ones((64, 64))}, jnp.ones((32, 64))
    step = _chain
    spmdctx.plan(step, p, x, parallel_mode="auto_parallel", topology="cpu", device_num=8)
    assert max(shares) < 0.7


def _chain(p, x):
    def loss(p):
        y = x @ p["w"]
        return jnp.mean(jnp.tanh(jnp.exp(jnp.sin(y) + y) * jnp.cos(y)) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda one, grad: one - grad, p, grads), value

"""Chunks of a loss: together they compute it, little crosses between them, and each holds its own parameters."""

from functools import partial
from itertools import pairwise

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.machine.presets import topology
from spmdctx.pipeline.cut.choose import choose_cuts
from spmdctx.pipeline.cut.chunks import chunks_of
from spmdctx.pipeline.cut.costs import line_seconds
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import joined_scans, line_of
from spmdctx.pipeline.cut.tangents import beside_loss, without_tangents
from tests.pipeline import losses


def cut(fn, params, batch, num_chunks):
    """The chunks of a loss of parameters and a batch, and its flat arguments."""
    return cut_line(fn, params, batch, num_chunks)[:2]


def cut_line(fn, params, batch, num_chunks):
    """The chunks of a loss, its flat arguments, and the values of its line that have no cotangents."""
    leaves = jax.tree.leaves((params, batch))
    closed = inlined(jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(jax.tree.structure((params, batch)), flat)))(*leaves))
    count = len(jax.tree.leaves(params))
    line = line_of(closed, [index < count for index in range(len(leaves))])
    seconds = line_seconds(line, topology("tpu-v5p"))
    found = choose_cuts([sum(one) for one in seconds], line.crossing, num_chunks)
    assert found is not None
    line, places = joined_scans(line, found.places)
    return chunks_of(line, places), leaves, without_tangents(line, range(count)) | beside_loss(line, 0)


def run(chunks, leaves):
    """The results of all chunks, one after the other."""
    results, crossing = {}, []
    for chunk in chunks:
        made = jexc.jaxpr_as_fun(chunk.program)(*(leaves[index] for index in chunk.leaves), *crossing)
        crossing = made[: len(chunk.leaving)]
        results.update(zip(chunk.results, made[len(chunk.leaving) :], strict=True))
    return [results[index] for index in sorted(results)]


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_compute_the_loss_and_its_gradient(num_chunks, remat, tied):
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), max(2, num_chunks), tied=tied), losses.batch(jax.random.key(1), 4)
        check(partial(losses.loss, remat=remat), params, batch, num_chunks)


def check(fn, params, batch, num_chunks):
    """Compares chunks of a loss with the loss, and returns them."""
    chunks, leaves = cut(fn, params, batch, num_chunks)
    count = len(jax.tree.leaves(params))
    value, gradient = jax.value_and_grad(lambda own: run(chunks, [*own, *leaves[count:]])[0])(leaves[:count])
    want, wanted = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert value == pytest.approx(float(want), abs=1e-12)
    for one, other in zip(gradient, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    return chunks


def equations(chunk, name):
    return [eqn for eqn in chunk.program.jaxpr.eqns if eqn.primitive.name == name]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("num_chunks", [2, 3, 7])
def test_a_scan_over_layers_is_cut_by_its_length(num_chunks, remat):
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), 7, tied=False, stacked=True), losses.batch(jax.random.key(1), 4)
        chunks = check(jax.jit(partial(losses.loss, remat=remat)), params, batch, num_chunks)
    lengths = [[eqn.params["length"] for eqn in equations(chunk, "scan")] for chunk in chunks]
    assert all(len(own) == 1 for own in lengths)
    assert sum(own[0] for own in lengths) == 7
    assert all(len(chunk.leaving) == 1 for chunk in chunks[:-1])


def test_a_backward_scan_with_rows_keys_and_a_checkpoint_around_it_is_cut():
    def fn(params, batch):
        x, key = batch

        def body(x, inputs):
            own, key = inputs
            x = jnp.tanh(x @ own) * jax.random.bernoulli(key, 0.9, x.shape)
            return x, (x.mean(), jnp.sum(own))

        keys = jax.random.split(key, 6)
        x, (means, _) = jax.checkpoint(lambda own: jax.lax.scan(body, x, (own * 2.0, keys), reverse=True))(params)
        return jnp.mean(x**2) + jnp.sum(means * jnp.arange(6.0))

    with jax.enable_x64(True):
        params = jax.random.normal(jax.random.key(0), (6, 8, 8))
        chunks = check(fn, params, (jnp.ones((4, 8)), jax.random.key(2)), 3)
    inside = [eqn for chunk in chunks for own in equations(chunk, "remat2") for eqn in own.params["jaxpr"].eqns]
    assert sorted(eqn.params["length"] for eqn in inside if eqn.primitive.name == "scan") == [2, 2, 2]
    assert not [eqn for chunk in chunks for eqn in equations(chunk, "scan")]


def test_a_scan_over_time_is_not_cut():
    def fn(params, x):
        state, _ = jax.lax.scan(lambda state, row: (jnp.tanh(state @ params["own"] + row), None), x[0], x)
        return jnp.mean((state @ params["head"]) ** 2)

    params, x = {"own": jnp.eye(8), "head": jnp.ones((8, 8))}, jnp.ones((5, 4, 8))
    chunks, _ = cut(fn, params, x, 2)
    assert [eqn.params["length"] for chunk in chunks for eqn in equations(chunk, "scan")] == [5]


def test_a_cut_inside_of_a_checkpointed_region_recomputes_both_parts():
    def block(own, x):
        tables = jnp.cos(jnp.arange(8.0))
        for weight in own:
            x = jnp.sin(x @ weight) * tables
        return x, x.mean()

    def fn(params, x):
        for own in params:
            x, mean = jax.checkpoint(block)(own, x)
        return jnp.mean(x**2) + mean

    with jax.enable_x64(True):
        params = [[jax.random.normal(jax.random.key(3 * one + other), (8, 8)) for other in range(3)] for one in range(3)]
        chunks = check(fn, params, jnp.ones((4, 8)), 2)
    assert [len(equations(chunk, "remat2")) for chunk in chunks] == [2, 2]
    assert not [eqn for chunk in chunks for eqn in equations(chunk, "sin")]


def test_regions_that_no_cut_divides_stay_as_they_were():
    params, batch = losses.decoder(jax.random.key(0), 8, tied=False), losses.batch(jax.random.key(1), 4)
    chunks, _ = cut(partial(losses.loss, remat=True), params, batch, 1)
    whole = jax.make_jaxpr(partial(losses.loss, remat=True))(params, batch)
    want = [str(eqn.params["jaxpr"]) for eqn in whole.eqns if eqn.primitive.name == "remat2"]
    assert [str(eqn.params["jaxpr"]) for eqn in equations(chunks[0], "remat2")] == want


@pytest.mark.parametrize("remat", [False, True])
def test_thousands_of_equations_are_cut_into_even_chunks(remat):
    params = jax.eval_shape(lambda key: losses.decoder(key, 90, tied=False, times=64), jax.random.key(0))
    words = jax.eval_shape(lambda key: losses.batch(key, 4, 64), jax.random.key(1))
    leaves, tree = jax.tree.flatten((params, words))
    closed = jax.make_jaxpr(lambda *flat: losses.loss(*jax.tree.unflatten(tree, flat), remat=remat))(*leaves)
    line = line_of(inlined(closed), [index < len(leaves) - 2 for index in range(len(leaves))])
    seconds = [sum(one) for one in line_seconds(line, topology("tpu-v5p"))]
    found = choose_cuts(seconds, line.crossing, 8)
    chunks = chunks_of(*joined_scans(line, found.places))
    assert len(line.eqns) > 4000
    assert found.largest * 8 / sum(seconds) <= 1.04
    assert [len(chunk.leaving) for chunk in chunks] == [1] * 7 + [0]


def test_one_array_crosses_each_cut_and_no_mask_does():
    params = jax.eval_shape(lambda key: losses.decoder(key, 8, tied=False, times=64), jax.random.key(0))
    chunks, _ = cut(losses.loss, params, losses.batch(jax.random.key(1), 4, 64), 4)
    for chunk, after in pairwise(chunks):
        assert [var.aval.shape for var in chunk.leaving] == [(4, 64, 64 * losses.WIDTH)]
        assert chunk.leaving == after.entering
    assert [len(chunk.leaves) for chunk in chunks] == [len(set(chunk.leaves)) for chunk in chunks]
    owners = [sum(index in chunk.leaves for chunk in chunks) for index in range(len(jax.tree.leaves(params)))]
    assert owners == [1] * len(owners)


def test_a_tied_weight_is_read_by_the_first_and_the_last_chunk():
    params, batch = losses.decoder(jax.random.key(0), 4), losses.batch(jax.random.key(1), 4)
    chunks, leaves = cut(losses.loss, params, batch, 4)
    embed = next(index for index, leaf in enumerate(leaves) if leaf.shape == (losses.WORDS, losses.WIDTH))
    assert [embed in chunk.leaves for chunk in chunks] == [True, False, False, True]


def test_results_belong_to_the_chunk_that_makes_them():
    def fn(params, x):
        means = []
        for own in params:
            x = jnp.tanh(x @ own)
            means.append(x.mean())
        return (x**2).mean(), means, x.shape[0], params[0]

    params, x = [jnp.eye(8) * 0.9**index for index in range(4)], jnp.ones((4, 8))
    chunks, leaves = cut(lambda p, x: fn(p, x)[:2] + fn(p, x)[3:], params, x, 2)
    assert sorted(index for chunk in chunks for index in chunk.results) == list(range(6))
    assert 1 in chunks[0].results
    assert 5 in chunks[0].results
    for one, other in zip(run(chunks, leaves), jax.tree.leaves((*fn(params, x)[:2], params[0])), strict=True):
        np.testing.assert_allclose(one, other)


def test_a_dear_product_of_weights_is_computed_once_where_it_is_read_first():
    def fn(params, x):
        merged = params["a"] @ params["b"]
        scaled = merged * 2.0
        for own in params["layers"]:
            x = jnp.tanh(x @ own)
        return jnp.mean((x @ scaled) ** 2) + jnp.mean(scaled)

    params = {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 8)), "layers": [jnp.eye(8)] * 6}
    x = jnp.ones((4, 8))
    chunks, leaves = cut(fn, params, x, 3)
    assert [{0, 1} <= set(chunk.leaves) for chunk in chunks] == [False, False, True]
    np.testing.assert_allclose(run(chunks, leaves)[0], fn(params, x), rtol=1e-6)

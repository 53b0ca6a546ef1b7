"""Sums that a loop only adds up are reduced once where the compiler does so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from spmdctx.search.accumulation import later_reductions, loop_sums
from tests.audit.compile_only import need_gpu, need_tpu
from tests.road import trace

W, X = jnp.ones((16, 8)), jnp.ones((4, 32, 16))


def looped(body):
    return trace(lambda w, x: lax.scan(lambda total, part: (body(total, w, part), None), jnp.zeros_like(w), x)[0], W, X)


def gradient(w, part):
    return jax.grad(lambda w: (part @ w).sum())(w)


def waiting(program):
    """Whether the results of matrix products wait for the end of their loop."""
    sums = loop_sums(program.graph)
    terms = {term for one in sums for term in one.terms}
    assert {one.repeats for one in sums} <= {1}
    return [op.results[0] in terms for op in program.graph.ops if op.primitive == "dot_general"]


def test_what_a_loop_adds_up_is_reduced_after_it():
    program = looped(lambda total, w, part: total + gradient(w, part))
    assert waiting(program)[-1]
    (one,) = loop_sums(program.graph)
    later = later_reductions(program.graph, [one])
    assert {later[term] for term in one.terms} == {(0.25, 1.0)}


@pytest.mark.parametrize(
    "body",
    [
        lambda total, w, part: 2 * (gradient(w, part).T.T) / 4 + total,
        lambda total, w, part: total + (gradient(w, part) + gradient(jnp.sin(w), 2 * part)),
        lambda total, w, part: gradient(w, part) + (total + w),
    ],
    ids=["scaled by numbers", "of two terms", "with a whole term"],
)
def test_sums_of_terms_wait_whatever_linear_op_they_pass(body):
    assert waiting(looped(body))[-1]


@pytest.mark.parametrize(
    "body",
    [
        lambda total, w, part: 0.9 * total + gradient(w, part),
        lambda total, w, part: total + gradient(w, part) ** 2,
        lambda total, w, part: gradient(w + total, part),
        lambda total, w, part: total + total + gradient(w, part),
        lambda total, w, part: total + (gradient(w, part) * w),
    ],
    ids=["decaying", "squared", "read by the next turn", "doubling", "scaled by an array"],
)
def test_what_each_turn_reads_is_reduced_in_each(body):
    assert not any(waiting(looped(body)))


def test_layers_of_a_loop_inside_wait_for_the_loop_outside():
    def layers(weights, part):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), part, weights)[0])

    def summed(weights, x):
        zeros = jnp.zeros_like(weights)
        return lax.scan(lambda total, part: (total + jax.grad(layers)(weights, part), None), zeros, x)[0]

    graph = trace(summed, jnp.ones((3, 16, 16)), X).graph
    (one,) = loop_sums(graph)
    assert {later_reductions(graph, [one])[term] for term in one.terms} == {(1 / 12, 3.0)}


def loss(params, x):
    for index in range(2):
        x = jnp.tanh(x @ params[f"w{index}"] + params[f"b{index}"])
    return jnp.mean(x**2)


def step(params, x):
    value, gradients = spmdctx.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


@pytest.mark.parametrize("backend", ["tpu", "gpu", "cpu"])
def test_gradients_of_micro_batches_are_reduced_once_in_every_compiled_program(backend):
    devices = {"tpu": need_tpu, "gpu": need_gpu, "cpu": jax.devices}[backend]()
    params = {f"w{index}": np.ones((128, 128), np.float32) for index in range(2)} | {
        f"b{index}": np.ones(128, np.float32) for index in range(2)
    }
    run = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", grad_accumulation_step=4, devices=devices)
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    rows = [row for row in run.plan(params, x).collectives if row.payload_bytes > 4]
    assert {row.repeats for row in rows} == {1}
    assert sum(row.payload_bytes for row in rows) == 4 * sum(leaf.size for leaf in params.values())
    report = run.audit(params, x)
    assert report.ok
    assert report.found_share == 1

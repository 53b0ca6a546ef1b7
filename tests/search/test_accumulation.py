"""Sums that a loop only adds up are reduced once where the compiler does so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from spmdctx.search.accumulation import accumulated_sums
from tests.audit.compile_only import need_gpu, need_tpu
from tests.road import trace

W, X = jnp.ones((16, 8)), jnp.ones((4, 32, 16))


def looped(body):
    return trace(lambda w, x: lax.scan(lambda total, part: (body(total, w, part), None), jnp.zeros_like(w), x)[0], W, X)


def gradient(w, part):
    return jax.grad(lambda w: (part @ w).sum())(w)


def reduced(program):
    """How often the results of matrix products are reduced."""
    found = accumulated_sums(program.graph)
    return [found.get(op.results[0]) for op in program.graph.ops if op.primitive == "dot_general"]


def test_what_a_loop_adds_up_is_reduced_after_it():
    assert reduced(looped(lambda total, w, part: total + gradient(w, part)))[-1] == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda total, w, part: 0.9 * total + gradient(w, part),
        lambda total, w, part: total + gradient(w, part) ** 2,
        lambda total, w, part: gradient(w + total, part),
    ],
    ids=["decaying", "squared", "read by the next turn"],
)
def test_what_each_turn_reads_is_reduced_in_each(body):
    assert set(reduced(looped(body))) == {None}


def loss(params, x):
    for index in range(2):
        x = jnp.tanh(x @ params[f"w{index}"] + params[f"b{index}"])
    return jnp.mean(x**2)


def step(params, x):
    value, gradients = spmdctx.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


@pytest.mark.parametrize("backend", ["tpu", "gpu", "cpu"])
def test_gradients_of_micro_batches_are_reduced_as_the_compiler_does(backend):
    devices = {"tpu": need_tpu, "gpu": need_gpu, "cpu": jax.devices}[backend]()
    params = {f"w{index}": np.ones((128, 128), np.float32) for index in range(2)} | {
        f"b{index}": np.ones(128, np.float32) for index in range(2)
    }
    run = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", grad_accumulation_step=4, devices=devices)
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    rows = [row for row in run.plan(params, x).collectives if row.payload_bytes > 4]
    assert {row.repeats for row in rows} == {4 if backend == "cpu" else 1}
    report = run.audit(params, x)
    assert report.ok
    assert "once after its loop" not in str(report)

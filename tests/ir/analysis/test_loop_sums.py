"""Sums that a loop only adds up are reduced once where the compiler does so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from spmdctx.ir.analysis.loop_sums import Later, later_reductions, loop_sums
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
    assert {later[term] for term in one.terms} == {Later(0.25, 1.0)}


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
    assert {later_reductions(graph, [one])[term] for term in one.terms} == {Later(1 / 12, 3.0)}


def loss(params, x):
    for index in range(2):
        x = jnp.tanh(x @ params[f"w{index}"] + params[f"b{index}"])
    return jnp.mean(x**2)


def step(params, x):
    value, gradients = spmdctx.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


REDUCTIONS = ("all_reduce", "reduce_scatter")
MODES = {
    "data_parallel": {"gradients_mean": True},
    "semi_auto_parallel": {},
    "auto_parallel": {"search_mode": "dynamic_programming", "dataset_strategy": "data_parallel"},
}
DEVICES = {"tpu": need_tpu, "gpu": need_gpu, "cpu": jax.devices}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", DEVICES)
def test_gradients_of_micro_batches_move_as_many_bytes_as_those_of_one_batch(backend, mode):
    devices = DEVICES[backend]()
    params = {f"w{index}": np.ones((128, 128), np.float32) for index in range(2)} | {
        f"b{index}": np.ones(128, np.float32) for index in range(2)
    }
    x = jax.ShapeDtypeStruct((16384, 128), jnp.float32)
    moved = []
    for count in (1, 4):
        run = spmdctx.parallel(step, parallel_mode=mode, grad_accumulation_step=count, devices=devices, **MODES[mode])
        reductions = [row for row in run.plan(params, x).collectives if row.kind in REDUCTIONS and row.payload_bytes > 4]
        assert {row.repeats for row in reductions} == {1}
        report = run.audit(params, x)
        assert (report.found_share, report.unplanned_share) == (1, 0)
        moved.append(sum(row.payload_bytes for row in reductions))
    assert moved == [4 * sum(leaf.size for leaf in params.values())] * 2


def tied_layers(params, ids):
    """An embedding that is read twice, layers in a scan, recomputed."""
    h = params["table"][ids]
    h, _ = lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w) + h, None)), h, params["layers"])
    return jnp.mean((h @ params["table"].T) ** 2)


def tied_step(params, ids):
    value, gradients = spmdctx.value_and_grad(tied_layers)(params, ids)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("backend", DEVICES)
def test_layers_in_scans_and_shared_tables_are_reduced_once_too(backend, mode):
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(256, 64)).astype(np.float32), "layers": rng.normal(size=(3, 64, 64)).astype(np.float32) / 8}
    ids = rng.integers(0, 256, size=(64, 8)).astype(np.int32)
    run = spmdctx.parallel(tied_step, parallel_mode=mode, grad_accumulation_step=4, devices=DEVICES[backend](), **MODES[mode])
    report = run.audit(params, ids)
    assert report.ok
    assert {row.repeats for row in run.plan(params, ids).collectives if row.kind == "all_reduce"} == {1}
    if backend == "cpu":
        assert run.verify(params, ids).ok


def test_the_gap_of_a_searched_plan_counts_reductions_after_the_loop():
    params = {f"w{index}": jax.ShapeDtypeStruct((128, 128), jnp.float32) for index in range(2)} | {
        f"b{index}": jax.ShapeDtypeStruct((128,), jnp.float32) for index in range(2)
    }
    x = jax.ShapeDtypeStruct((2048, 128), jnp.float32)
    run = spmdctx.parallel(
        step, parallel_mode="auto_parallel", search_mode="dynamic_programming", grad_accumulation_step=4, topology="tpu-v5p"
    )
    assert run.plan(params, x).gap == pytest.approx(0, abs=1e-6)


def test_steps_of_the_plan_follow_the_sum_over_micro_batches():
    rng = np.random.default_rng(0)
    params = {f"w{index}": rng.normal(size=(16, 16)) / 4 for index in range(2)} | {f"b{index}": np.zeros(16) for index in range(2)}
    x = rng.normal(size=(64, 16))
    with jax.enable_x64(True):
        runs = [spmdctx.parallel(step, parallel_mode="semi_auto_parallel", grad_accumulation_step=count) for count in (1, 4)]
        for _ in range(2):
            whole, parted = (run(params, x)[0] for run in runs)
        for name in params:
            np.testing.assert_allclose(whole[name], parted[name], rtol=1e-12, atol=1e-13)

"""Equal equations of one body are one op, in the graph, in the prices and in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from benchmarks.split_checks import FREE_LINKS
from spmdctx.audit import audit_text
from spmdctx.machine.xla.collectives.ways import WAYS
from tests.audit.compile_only import need_tpu
from tests.road import ops, run, trace

X, W = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16), jnp.linspace(0.0, 1.0, 16 * 16).reshape(16, 16)
D, WHOLE = ("data",), ((), ())


def num_products(function, *args):
    return len(ops(trace(function, *args), "dot_general"))


def test_a_product_that_is_written_twice_is_one_op():
    program = trace(lambda x, w: (x @ w) + jnp.tanh(x @ w), X, W)
    (product,) = ops(program, "dot_general")
    assert list(program.op_of_site).count(product.id) == 2
    assert len({value for op in program.graph.ops for value in op.results}) == len(program.graph.ops)


def test_products_of_equal_chains_are_one_op_and_the_copied_chain_is_dead():
    program = trace(lambda x, w: (jnp.sin(x * 2) @ w) + jnp.cos(jnp.sin(x * 2) @ w), X, W)
    assert [len(ops(program, name)) for name in ("dot_general", "sin", "mul")] == [1, 1, 1]
    assert program.op_of_site.count(-1) == 2


def test_a_result_and_a_carry_that_are_copies_are_the_first_one():
    program = trace(lambda x, w: (x @ w, x @ w), X, W, carried=[(1, 0)])
    assert program.graph.outputs[0] == program.graph.outputs[1]
    assert program.graph.ties == ((program.graph.inputs[0], program.graph.outputs[0]),)


@pytest.mark.parametrize(
    "second",
    [
        lambda x, w: (x * 3) @ w,
        lambda x, w: (x * -2) @ w,
        lambda x, w: (x * 2) @ (w + 1),
        lambda x, w: jax.lax.dot_general(x * 2, w, (((1,), (1,)), ((), ()))),
        lambda x, w: jax.lax.optimization_barrier(x * 2) @ w,
        lambda x, w: jax.checkpoint(lambda x: (x * 2) @ w)(x),
        lambda x, w: jax.lax.scan(lambda carry, _: ((carry * 2) @ w, None), x, None, length=1)[0],
    ],
)
def test_other_numbers_operands_and_parameters_bodies_and_barriers_stay_apart(second):
    assert num_products(lambda x, w: ((x * 2) @ w, second(x, w)), X, W) == 2


def test_the_sign_of_zero_is_a_difference():
    assert num_products(lambda x, w: ((x * 0.0) @ w, (x * -0.0) @ w), X, W) == 2


def test_effects_stay_as_many_as_they_are():
    def step(x):
        for _ in range(2):
            jax.debug.print("{}", x)
        return x + 1

    assert len(ops(trace(step, X), "debug_print")) == 2


def test_what_is_computed_on_the_way_or_of_no_input_stays_apart():
    def step(x):
        tables = [jnp.cumsum(jnp.arange(16.0)) for _ in range(2)]
        return (x * 2).sum() + tables[0], (x * 2).max() + tables[1]

    program = trace(step, X)
    assert [len(ops(program, name)) for name in ("mul", "cumsum")] == [2, 2]


def test_a_body_that_is_called_twice_is_one_within_its_caller():
    product = jax.jit(lambda x, w: x @ w)
    assert num_products(lambda x, w: product(x, w) - product(x, w), X, W) == 1


def test_calls_that_hold_constants_are_bodies():
    table = jnp.arange(16.0)
    held = jax.jit(lambda x, w: (x * table) @ w + x @ w)
    found = run(lambda x, w: held(x, w) + x @ w, X, W, pins={0: (D, ()), 1: WHOLE})
    found.check()


def test_a_program_with_copies_computes_what_one_device_does():
    def step(x, w):
        def loss(w):
            return (jnp.tanh(x @ w) ** 2).sum()

        return loss(w), jax.grad(loss)(w)

    found = run(step, X, W, pins={0: (D, ()), 1: WHOLE})
    found.check()
    assert len(ops(found.program, "dot_general")) == 2


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_on_tpu_what_is_planned_of_a_step_with_copies_is_what_is_compiled(search):
    devices = need_tpu()

    def loss(weights, x):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - x) ** 2)

    def step(weights, x):
        gradient = jax.grad(loss)(weights, x)
        curvature = jax.jvp(lambda weights: jax.grad(loss)(weights, x), (weights,), (gradient,))[1]
        return jax.tree.map(lambda w, g, c: w - 1e-2 * g + 1e-3 * c, weights, gradient, curvature)

    weights = {"up": jax.ShapeDtypeStruct((512, 2048), jnp.float32), "down": jax.ShapeDtypeStruct((2048, 512), jnp.float32)}
    batch = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    options = {"devices": devices, "topology": "tpu-v5e", "parallel_mode": "auto_parallel", "search_mode": search}
    run = spmdctx.parallel(step, donate_argnums=0, **options)
    report = audit_text(run.plan(weights, batch), run.lower(weights, batch).compile().as_text(), WAYS)
    assert not report.missing
    assert not report.unplanned
    assert report.planned_bytes == report.compiled_bytes > 0


@pytest.mark.parametrize(
    "function",
    [
        jax.grad(lambda x: jnp.sum(jnp.square(x.at[np.array([3, 1, 2])].set(0.0)))),
        jax.grad(lambda x: jnp.sum(jnp.square(x.at[jnp.arange(3) * 2].set(0.0)))),
        lambda x: jnp.where(jnp.sort(x) > 0, jnp.zeros_like(x), jnp.zeros_like(x)) + x,
        lambda x: lax.select_n(jnp.argsort(x) // 4, x * 2, x * 2, x * 2),
    ],
    ids=["an update by zeros", "at computed places", "zeros", "three cases"],
)
def test_what_selects_among_equal_values_is_dropped(function):
    primitives = [op.primitive for op in trace(function, jnp.arange(8.0)).graph.ops]
    assert not {"gather", "sort"}.intersection(primitives)


def test_what_selects_among_different_values_is_kept():
    program = trace(lambda x: jnp.where(jnp.sort(x) > 0, jnp.zeros_like(x), jnp.ones_like(x)) + x, jnp.arange(8.0))
    assert ops(program, "sort")
    step = spmdctx.parallel(
        jax.grad(lambda x: jnp.sum(jnp.square(x.at[np.array([3, 1, 2])].set(0.0)))), parallel_mode="auto_parallel", device_num=8
    )
    np.testing.assert_allclose(step(jnp.arange(8.0)), [0, 0, 0, 0, 8, 10, 12, 14])


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sum(jnp.where(x > 0, x, x) ** 2),
        lambda x: lax.select_n(jnp.argsort(x, axis=1) % 2, x * 2, x * 2) @ jnp.ones((4, 3)),
        jax.grad(lambda x: jnp.sum(jnp.where(jnp.sort(x) > 1, x * x, x * x))),
    ],
    ids=["an argument", "a result", "a gradient"],
)
def test_what_no_longer_selects_is_split_in_every_search(function, search):
    x = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": FREE_LINKS, "search_mode": search}
    step = spmdctx.parallel(function, dataset_strategy="data_parallel", batch_argnums=0, **options)
    np.testing.assert_allclose(step(x), function(x), rtol=1e-5)
    assert step.audit(x).ok


@pytest.mark.parametrize(
    "function",
    [
        lambda x, key: (jnp.where(x > 0, jnp.mean(x), jnp.mean(x)), jnp.cumsum(x * 2)),
        lambda x, key: (lax.select_n((x > 0).astype(jnp.int32), *[jnp.broadcast_to(jnp.sum(x), (8,)) for _ in range(3)]), x),
        lambda x, key: (jnp.where(x[None] != 1, *[jax.random.bits(key, (4, 1))] * 2), x),
    ],
    ids=["means", "three cases", "random bits"],
)
def test_what_no_longer_selects_hands_on_no_split(function):
    """The cases are whole, and what selects is split."""
    options = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "device_num": 8}
    step = spmdctx.parallel(function, dataset_strategy="data_parallel", batch_argnums=0, **options)
    arguments = jnp.linspace(-1.0, 1.0, 8), jax.random.key(3)
    report = step.audit(*arguments)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    for got, want in zip(step(*arguments), function(*arguments), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)

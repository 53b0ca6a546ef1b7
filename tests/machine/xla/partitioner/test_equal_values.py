"""Values that the compiler would give to one reader as another asks for them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from benchmarks.split_checks import FREE_LINKS
from spmdctx.audit import audit_text
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.collectives.ways import WAYS
from spmdctx.machine.xla.partitioner.equal_values import equal_values, free_values, moved_values, turned_products
from tests.audit.compile_only import need_tpu
from tests.road import ops, spread, trace

X, W = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 64))
D, M = ("data",), ("model",)


def widened_twice(x):
    # Under two names, as a norm and its gradient do it: the graph keeps both, the compiler makes them one.
    first, second = x.astype(jnp.float32), jax.jit(lambda x: x.astype(jnp.float32))(x)
    return first * 2.0, second * 3.0


def placed(program, shardings):
    """The assignment of propagation, but for the shardings of some values."""
    found = spread(program, {0: (D, ())})
    values = tuple([shardings.get(value, own) for value, own in enumerate(found.values)])
    return Assignment(found.ops, values, found.mode)


def equal(function, stored=None, *, moved=()):
    """How many of the two results of the conversions are named; the second is stored as `stored` says."""
    program = trace(function, X)
    first, second = (op.results[0] for op in ops(program, "convert_element_type"))
    assignment = placed(program, {} if stored is None else {second: stored})
    found = equal_values(program.graph, program.scopes, assignment, {second} if moved else ())
    assert found <= {first, second}
    return len(found)


def test_equal_values_are_named_if_one_is_stored_otherwise():
    assert equal(widened_twice, ((), M)) == 2


def test_equal_values_are_named_if_a_reader_takes_one_otherwise():
    assert equal(widened_twice, moved=True) == 2


def test_equal_values_that_all_take_alike_are_not_named():
    assert equal(widened_twice) == 0


def test_values_of_other_types_are_not_equal():
    assert equal(lambda x: (x.astype(jnp.float32) * 2.0, x.astype(jnp.float16) * 3.0), ((), M)) == 0


@pytest.mark.parametrize(("stored", "named"), [((D, ()), True), (((), M), False)], ids=["stored alike", "stored otherwise"])
def test_what_is_made_of_equal_values_is_equal_where_those_are_stored_alike(stored, named):
    def function(x):
        first, second = x.astype(jnp.float32), jax.jit(lambda x: x.astype(jnp.float32))(x)
        return jnp.exp(first) * 2.0, jnp.exp(second) * 3.0

    program = trace(function, X)
    (_, second), tops = ops(program, "convert_element_type"), [op.results[0] for op in ops(program, "exp")]
    assignment = placed(program, {second.results[0]: stored, tops[1]: ((), M)})
    found = equal_values(program.graph, program.scopes, assignment, ())
    assert found.issuperset(tops) == named


TURNED = {
    "converted": lambda x: (x.astype(jnp.float32) * 2.0, x.T.astype(jnp.float32) * 3.0),
    "converted and scaled": lambda x: (x.astype(jnp.float32) * 2.0 + 1.0, x.T.astype(jnp.float32) * 2.0 - 3.0),
    "turned back": lambda x: (x.astype(jnp.float32) * 2.0, jnp.sin(x.T).T.astype(jnp.float32) * 3.0, jnp.sin(x)),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_value_and_a_turned_one_that_is_equal_are_kept_apart_where_that_is_turned(name):
    program = trace(TURNED[name], X)
    readers = ops(program, "sin") or ops(program, "convert_element_type")
    first, second = (op.results[0] for op in readers)
    found = equal_values(program.graph, program.scopes, spread(program, {0: (D, ())}), {first})
    turned = ops(program, "transpose")[0].results[0]
    assert {first, second, turned} <= found
    assert equal_values(program.graph, program.scopes, spread(program, {0: (D, ())}), ()) == frozenset()


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: (x.T @ x).T, 1),
        (lambda x: (x.T @ x).T.T + jnp.eye(64), 2),
        (lambda x: (x.T @ x).T.astype(jnp.bfloat16).T, 3),
        (lambda x: (x.T @ x).T.astype(jnp.bfloat16), 1),
        (lambda x: (y := (x.T @ x).T, y.T), 1),
    ],
    ids=["turned", "turned back", "cast between", "cast afterwards", "also returned"],
)
def test_a_product_is_constrained_behind_its_last_turn(function, count):
    program = trace(function, jnp.ones((32, 64)))
    assert len(turned_products(program.graph, spread(program, {0: (D, ())}))) == count


def masked(x, w):
    mask = jnp.where(jnp.arange(64)[None, :] > jnp.arange(64)[:, None], 0.0, 1.0)
    return jnp.where(mask > 0, w, 0.0) @ x


def free(function, *arguments):
    program = trace(function, *arguments)
    moved = moved_values(program.graph.ops, spread(program, {}))
    found = free_values(program.graph, program.from_literals, moved)
    return {op.primitive for op in program.graph.ops if found.intersection(op.results)}


def test_masks_are_free():
    assert free(masked, W, W) >= {"iota", "gt"}


def test_what_is_made_of_inputs_is_not_free():
    assert "dot_general" not in free(masked, W, W)


def test_what_is_made_of_a_product_of_nothing_is_not_free():
    def function(w):
        table = jnp.exp(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
        return w + table

    assert "exp" not in free(function, W)


def masked_twice(at, first, second):
    def attend(scores):
        return jax.nn.softmax(jnp.where(jnp.arange(256)[:, None] >= jnp.arange(256), scores, -1e9))

    return attend(at(first, None, "data")), attend(at(second, None, "model"))


def normed(at, x):
    x = at(x, None, None, "model")
    wide, again = x.astype(jnp.float32), jax.jit(lambda x: x.astype(jnp.float32))(x)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return at(at(again, None, None, "data") * jax.lax.rsqrt(mean), None, None, "data"), at(wide * 2.0, None, None, "model")


def adam(at, x, weight):
    # So many rows that the gradient is kept apart from the update.
    first, second = at(weight, None, "model"), at(weight, "model")
    slope = jax.grad(lambda weight: jnp.sum(jnp.tanh(at(x, None, "model") @ weight)))(first)
    first, second = 0.9 * first + 0.1 * jax.lax.integer_pow(slope, 1), 0.9 * second + 0.1 * jax.lax.integer_pow(slope, 2)
    return at(first, None, "model"), at(second, "model")


def tied(at, table, x):
    # A table that is looked up by columns, and multiplied by rows.
    axes = ("model", "data")
    columns, rows = at(at(table, axes).astype(jnp.bfloat16), None, axes), table.T.astype(jnp.bfloat16)
    logits = at(x.astype(jnp.bfloat16) @ rows, None, axes)
    return at(columns[jnp.arange(64) * 3], None, axes), at(jax.lax.dot_general(jnp.tanh(logits), rows, (((1,), (1,)), ((), ()))))


STEPS = {
    masked_twice: [(8, 16, 256, 256), (8, 16, 256, 256)],
    normed: [(32, 256, 2048)],
    adam: [(2**19, 1024), (1024, 1024)],
    tied: [(8192, 1024), (512, 1024)],
}


@pytest.mark.parametrize("step", STEPS)
def test_equal_values_are_split_as_each_reader_asks_and_nothing_else_is_moved(step):
    mesh = Mesh(np.array(need_tpu()).reshape(4, 2), ("data", "model"))

    def at(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    dtype = jnp.float32 if step in (adam, tied) else jnp.bfloat16
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in STEPS[step]]
    run = spmdctx.parallel(
        lambda *x: step(at, *x), mesh=mesh, topology="tpu-v5e", parallel_mode="auto_parallel", search_mode="sharding_propagation"
    )
    report = audit_text(run.plan(*arguments), run.lower(*arguments).compile().as_text(), WAYS)
    assert (report.unplanned_bytes, report.found_bytes) == (0, report.planned_bytes)


TURNS = {"cast, then turned": lambda table, low: table.astype(low).T, "turned, then cast": lambda table, low: table.T.astype(low)}


@pytest.mark.parametrize("name", TURNS)
def test_the_gradient_of_a_tied_table_is_reduced_once_as_planned_and_never_turned(name):
    def loss(table, words):
        x = table.astype(jnp.bfloat16)[words]
        return jnp.mean(jax.nn.logsumexp((jnp.tanh(x) @ TURNS[name](table, jnp.bfloat16)).astype(jnp.float32), -1))

    def step(state, words):
        slope = jax.grad(loss)(state[0], words)
        moment = 0.9 * state[1] + slope
        return state[0] - 0.1 * moment, moment

    state = (jax.ShapeDtypeStruct((1024, 256), jnp.float32),) * 2
    run = spmdctx.parallel(step, devices=need_tpu(), topology="tpu-v5e", parallel_mode="data_parallel", donate_argnums=0)
    arguments = state, jax.ShapeDtypeStruct((8, 64), jnp.int32)
    plan, text = run.plan(*arguments), run.lower(*arguments).compile().as_text()
    report = audit_text(plan, text, WAYS)
    tables = [row.payload_bytes for row in plan.collectives if row.payload_bytes > 4]
    assert tables == [1024 * 256 * 4]
    assert (report.unplanned_bytes, report.found_bytes) == (0, report.planned_bytes)
    assert not re.search(r"f32\[1024,256\]\S* copy\(", text)


def table():
    """A value that depends on no input."""
    return jnp.tanh(jnp.arange(16.0)[:, None] * jnp.arange(1.0, 9.0))


LITERALS = {
    "a region": lambda shard, x: shard(lambda t: t * t, ((2, 4),), ((2, 4),))(table()).T @ x,
    "a sum": lambda shard, x: shard(lambda t: t * t, ((8, 1),), ((8, 1),))(jax.nn.softmax(table(), 1)).sum(0) @ x[:8],
    "a branch": lambda shard, x: (
        jax.lax.cond(x[0, 0] > 0, lambda t: jnp.cumsum(t, 0), lambda t: t, shard(jnp.sin, ((8, 1),))(table())) @ x[:8]
    ),
    "checkpoint": lambda shard, x: jax.checkpoint(lambda t: t.T @ x)(shard(jnp.sin, ((1, 8),), ((1, 8),))(table())),
}


@pytest.mark.parametrize("name", LITERALS)
@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
def test_what_depends_on_no_input_is_made_again_and_not_moved(name, search):
    step = spmdctx.parallel(
        partial(LITERALS[name], spmdctx.shard), parallel_mode="auto_parallel", search_mode=search, device_num=8, topology=FREE_LINKS
    )
    x = jnp.linspace(0.5, 1.0, 16 * 24).reshape(16, 24)
    report = step.audit(x)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    np.testing.assert_allclose(step(x), LITERALS[name](lambda function, *_: function, x), rtol=1e-4)

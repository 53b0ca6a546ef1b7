"""What a plan has in memory beside its values: reductions in place, copies for what runs last, slices of gathered copies."""

import functools

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.copies import Copies
from spmdctx.cost.memory.lives import Copy, step_memory
from tests.road import trace

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def forward(x, w):
    return jnp.tanh(x @ w) @ w


def step(weights, x):
    def loss(weights):
        return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum()

    return [weight - 0.1 * gradient for weight, gradient in zip(weights, jax.grad(loss)(weights), strict=True)]


def copies_of(function, *arguments):
    program = trace(function, *arguments)
    memory = step_memory(program.graph, program.scopes)
    return program.graph, memory, Copies(program.graph, memory)


def products(graph):
    return [op for op in graph.ops if op.primitive == "dot_general"]


def found(copies, graph, moved=(), reduced=()):
    sizes = [100 + value for value in range(len(graph.values))]
    return copies.finish(moved, sizes, copies.late(moved, reduced, sizes))


@pytest.mark.parametrize("gathers", [True, False])
def test_a_reduction_is_in_place_unless_a_gather_is_fused_with_its_product(gathers):
    graph, _, copies = copies_of(forward, X, W)
    first, second = products(graph)
    copies.reduce_in_place(first, 70)
    if gathers:
        copies.make(second, second.operands[1], "gathered", 30, gathered=True)
    assert (Copy(first.id, first.id, 70) in [copy._replace(end=copy.start) for copy in found(copies, graph)]) == gathers


def test_what_a_product_makes_is_gathered_after_it():
    graph, _, copies = copies_of(forward, X, W)
    first, second = products(graph)
    copies.reduce_in_place(first, 70)
    copies.make(second, first.results[0], "gathered", 30, gathered=True)
    assert [copy.bytes for copy in found(copies, graph)] == [30], "the reduction is in place"


@pytest.mark.parametrize(("behind", "in_place"), [(1, False), (3, False), (4, True)])
def test_a_gather_is_fused_with_three_products_at_most(behind, in_place):
    graph, _, copies = copies_of(lambda x, w: forward(forward(forward(x, w), w), w), X, W)
    run = products(graph)
    copies.reduce_in_place(run[0], 70)
    copies.make(run[behind], run[behind].operands[1], "gathered", 30, gathered=True)
    assert (70 not in [copy.bytes for copy in found(copies, graph)]) == in_place


@pytest.mark.parametrize("put_off", [True, False])
def test_a_gradient_that_is_scattered_waits_behind_twelve_products(put_off):
    graph, memory, copies = copies_of(lambda x, w: functools.reduce(lambda x, _: jnp.tanh(x @ w), range(20), x), X, W)
    run = products(graph)
    copies.keep(run[1], run[1].results[0], 70, to_the_end=False, put_off=put_off)
    (copy,) = found(copies, graph)
    assert memory.products[:2] == (run[0].id, run[1].id)
    assert copy.end == (run[13].id if put_off else memory.times[run[1].id])


def test_the_gather_of_a_gradient_is_fused_with_no_product():
    graph, _, copies = copies_of(step, [W, W], X)
    gradient = next(
        op for op in products(graph) if op.results[0] in [one.made[0] for one in step_memory(graph, (0,) * len(graph.ops)).gradients]
    )
    reader = graph.readers[gradient.results[0]][0]
    copies.reduce_in_place(products(graph)[0], 70)
    copies.make(reader, gradient.results[0], "gathered", 30, gathered=True)
    assert 70 not in [copy.bytes for copy in found(copies, graph)]


def test_the_next_value_of_a_carry_is_beside_it_where_it_is_moved():
    def loop(total, xs):
        return jax.lax.scan(lambda total, x: (total + x @ x, None), total, xs)[0]

    graph, memory, copies = copies_of(loop, W, jnp.ones((3, 64, 64)))
    (life,) = memory.in_carries
    assert found(copies, graph) == []
    assert found(copies, graph, moved=[life.value]) == [Copy(life.start, life.end, 100 + life.value)]


@pytest.mark.parametrize("how", ["as it is", "moved", "reduced"])
def test_what_a_product_reads_that_runs_last_is_there_to_the_end(how):
    graph, memory, copies = copies_of(step, [W, W], X)
    last, product = len(graph.ops) - 1, memory.gradients[0]
    kept = next(value for value in (*product.read, *product.read_inside) if value not in graph.inputs)
    moved = {one.made[-1] for one in memory.gradients} if how == "moved" else set()
    reduced = {one.op for one in memory.gradients} if how == "reduced" else set()
    extended = [copy.end for copy in found(copies, graph, moved, reduced) if copy.bytes == 100 + kept]
    assert extended == ([last] if how == "as it is" else [])


@pytest.mark.parametrize(("update_bytes", "is_last"), [(128 * 2**20, True), (128 * 2**20 + 1, False)])
def test_a_product_whose_update_makes_more_than_the_chip_holds_does_not_run_last(update_bytes, is_last):
    graph, memory, copies = copies_of(step, [W, W], X)
    product = memory.gradients[0]
    kept = next(value for value in (*product.read, *product.read_inside) if value not in graph.inputs)
    sizes = [0] * len(graph.values)
    sizes[kept] = 100
    (updated,) = [value for value in product.made if memory.materialized[value]]
    sizes[updated] = update_bytes
    made = copies.finish((), sizes, copies.late((), {one.op for one in memory.gradients[1:]}, sizes))
    assert any(copy.bytes == 100 for copy in made) == is_last


@pytest.mark.parametrize("reduced", [True, False])
def test_a_copy_for_a_product_that_runs_last_is_made_then(reduced):
    graph, memory, copies = copies_of(step, [W, W], X)
    product = next(one for one in memory.gradients if one.read)
    op = graph.ops[product.op]
    copies.make(op, product.read[0], "copy", 7, gathered=False)
    time = memory.times[op.id] if reduced else len(graph.ops) - 1
    (copy,) = [copy for copy in found(copies, graph, (), {op.id} if reduced else set()) if copy.bytes == 7]
    assert copy == Copy(memory.firsts[op.id] if reduced else time, time, 7)


def test_a_gathered_copy_lives_as_long_as_what_is_a_slice_of_it():
    graph, memory, copies = copies_of(forward, X, W)
    first = products(graph)[0]
    copies.make(first, first.operands[0], "gathered", 9, gathered=False)
    life = max((life for life in memory.lives if life.value not in graph.inputs), key=lambda life: life.end)
    copies.slice_of("gathered", life.value)
    assert [copy.end for copy in found(copies, graph)] == [life.end]


def on_the_way(*passes, read=()):
    """The bytes beside the copies that are read, at the time of the first product: `passes` are keys and bytes."""
    graph, memory, copies = copies_of(step, [W, W], X)
    reader = next(op for op in products(graph) if memory.times[op.id] == memory.firsts[op.id])
    for key, num_bytes in passes:
        copies.pass_through(reader, key, num_bytes)
    for key in ("taken", *read):
        copies.make(reader, reader.operands[1], key, 30, gathered=False)
        copies.make(products(graph)[-1], reader.operands[1], key, 30, gathered=False)
    time = memory.firsts[reader.id]
    assert {copy.end > time for copy in found(copies, graph) if copy.bytes == 30} == {True}
    return [copy.bytes for copy in found(copies, graph) if (copy.start, copy.end) == (time, time)]


def test_a_copy_on_the_way_to_another_is_there_only_when_that_is_made():
    assert on_the_way(("step", 50)) == [50]


def test_of_copies_on_the_way_to_others_one_is_there_after_the_other():
    assert on_the_way(("one", 50), ("another", 70), ("a third", 60)) == [70]


def test_a_copy_on_the_way_that_is_read_too_counts_once():
    assert on_the_way(("step", 30), read=["step"]) == []


def test_what_enters_a_loop_as_a_copy_is_there_until_the_loop_ends():
    graph, _, copies = copies_of(forward, X, W)
    copies.keep_for_loop(graph.ops[0], "part", 2, 50)
    assert found(copies, graph) == [Copy(0, 2, 50)]

"""Lives of values: what the compiled program keeps in memory, from when to when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmdctx.cost.memory.lives import Copy, Peak, ValueLife, lives, peak, profile, step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.xla.memory.on_chip import OnChip
from tests.road import trace

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def found(function, *args, donated=()):
    """Lives of all but the arguments, by the primitive that makes the value."""
    program, _ = traced(function, *args)
    graph = program.graph
    kept = lives(graph, program.scopes, frozenset(graph.inputs[index] for index in donated))
    return [(graph.ops[graph.producers[value]].primitive, start, end) for value, start, end in kept if value in graph.producers]


def traced(function, *args):
    program = trace(function, *args)
    return program, program.graph


def test_a_chain_of_elementwise_ops_is_computed_in_the_op_that_reads_it():
    assert [name for name, _, _ in found(lambda x, w: jnp.exp(jnp.sin(x) * 2) @ w, X, W)] == ["dot_general"]


def test_a_chain_behind_a_product_is_computed_in_it_and_keeps_what_it_adds():
    kept = found(lambda x, w: jnp.tanh(x @ w + 1) @ w, X, W)
    assert [name for name, _, _ in kept] == ["tanh", "dot_general"]


@pytest.mark.parametrize(("fuses", "kept"), [(True, ["dot_general"]), (False, ["mul", "dot_general"])])
def test_what_a_product_reads_is_in_memory_where_nothing_is_fused_into_products(fuses, kept):
    program, graph = traced(lambda x, w: (jnp.sin(x) * 2) @ w, X, W)
    materialized = step_memory(graph, program.scopes, fuses_into_products=fuses).materialized
    assert [op.primitive for op in graph.ops if materialized[op.results[0]]] == kept


def test_a_mark_before_a_product_is_but_another_name():
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    program, graph = traced(lambda x, w: lax.with_sharding_constraint(jnp.sin(x), place) @ w, X, W)
    materialized = step_memory(graph, program.scopes, fuses_into_products=False).materialized
    assert [op.primitive for op in graph.ops if materialized[op.results[0]]] == ["sin", "dot_general"]


def test_a_product_that_two_ops_read_is_in_memory():
    kept = found(lambda x, w: (lambda y: (jnp.tanh(y) @ w, jnp.exp(y) @ w))(x @ w), X, W)
    assert [name for name, _, _ in kept] == ["dot_general"] * 3


def test_what_a_fused_op_reads_lives_until_the_op_that_it_is_fused_into():
    def function(x, w):
        first = x @ w
        used = jnp.sin(first)
        return (((first @ w) @ w) + used) @ w

    kept = found(function, X, W)
    assert kept[0][:2] == ("dot_general", 0)
    assert kept[0][2] >= 3


def test_arguments_live_throughout_and_donated_state_is_written_in_place():
    program, graph = traced(lambda state, x: state + (x @ x.T), jnp.ones((32, 32)), X)
    state, _ = graph.inputs
    tied = graph.__class__(**{**graph.__dict__, "ties": ((state, graph.outputs[0]),)})
    last = len(graph.ops) - 1
    kept = lives(tied, program.scopes)
    assert [(life.start, life.end) for life in kept if life.value in graph.inputs] == [(0, last)] * 2
    assert graph.outputs[0] in [life.value for life in kept]
    assert graph.outputs[0] not in [life.value for life in lives(tied, program.scopes, frozenset([state]))]


def test_what_a_step_closes_over_lives_throughout():
    table = jnp.ones((8, 8))
    program = trace(lambda x: jnp.tanh(x @ table) @ table, jnp.ones((4, 8)))
    constant = next(value.id for value in program.graph.values if value.role is Role.CONSTANT)
    assert ValueLife(constant, 0, len(program.graph.ops) - 1) in lives(program.graph, program.scopes)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_gradient_of_picked_elements_is_scattered_into_memory_on_gpu_alone(is_gpu):
    def function(x, picked):
        return jax.grad(lambda x: jnp.exp(x).sum() - jnp.take_along_axis(x, picked, -1).sum())(x)

    program, graph = traced(function, X, jnp.ones((32, 1), int))
    memory = step_memory(graph, program.scopes, fuses_into_products=not is_gpu, delays_gradients=is_gpu)
    (scattered,) = [op.results[0] for op in graph.ops if op.primitive == "scatter-add"]
    assert bool(memory.materialized[scattered]) is is_gpu


def test_a_loop_keeps_what_it_stacks_and_what_it_reads_from_its_start_to_its_end():
    def function(x, ws):
        def body(carry, w):
            carry = lax.sort(carry @ w)
            return carry, carry

        return lax.scan(body, lax.sort(x), ws)

    program, graph = traced(function, X, jnp.ones((3, 64, 64)))
    kept = {life.value: life for life in lives(graph, program.scopes)}
    stacked = kept[graph.outputs[1]]
    enters = [op.id for op in graph.ops if op.primitive == "scan.enter"]
    assert graph.values[stacked.value].shape == (3, 32, 64)
    assert stacked.start == enters[0]
    assert stacked.end == len(graph.ops) - 1


def test_a_carry_that_an_elementwise_op_changes_is_changed_in_place():
    def function(x, w):
        return lax.scan(lambda carry, _: (carry + carry @ w, None), lax.sort(x), None, length=3)[0]

    program, graph = traced(function, X, W)
    sizes = [int(np.prod(value.shape)) * 4 for value in graph.values]
    top = peak(lives(graph, program.scopes), sizes, len(graph.ops))
    assert top.bytes <= (2 * 32 * 64 + 64 * 64 + 32 * 64) * 4


def test_activations_saved_for_the_backward_pass_outweigh_those_computed_again():
    def loss(remat):
        def layer(x):
            return jnp.tanh(jnp.tanh(jnp.tanh(x @ W) @ W) @ W)

        layer = jax.checkpoint(layer) if remat else layer

        def run(x):
            for _ in range(4):
                x = layer(x)
            return x.sum()

        return jax.grad(run)

    def top(remat):
        program, graph = traced(loss(remat), jnp.ones((4096, 64)))
        sizes = [int(np.prod(value.shape)) * 4 for value in graph.values]
        return peak(lives(graph, program.scopes), sizes, len(graph.ops)).bytes

    assert top(True) < 0.75 * top(False)


def test_the_profile_adds_up_lives_and_copies():
    kept = (ValueLife(0, 0, 2), ValueLife(1, 1, 1))
    assert profile(kept, [10, 5], 3).tolist() == [10, 15, 10]
    assert profile(kept, [10, 5], 3, [Copy(1, 2, 7)]).tolist() == [10, 22, 17]
    assert peak(kept, [10, 5], 3) == Peak(1, 15)


def test_small_and_short_lived_values_are_on_the_chip_as_far_as_they_fit():
    kept = (ValueLife(0, 0, 3), ValueLife(1, 1, 2), ValueLife(2, 1, 2))
    assert profile(kept, [40, 5, 10], 4, (), OnChip(30, 10)).tolist() == [40, 40, 40, 40]
    assert profile(kept, [40, 5, 11], 4, (), OnChip(30, 10)).tolist() == [40, 51, 51, 40]
    assert profile(kept, [40, 5, 10], 4, (), OnChip(26, 8)).tolist() == [40, 50, 50, 40]
    several = (*kept, ValueLife(2, 1, 1), ValueLife(2, 1, 3))
    assert profile(several, [40, 5, 10], 4, (), OnChip(30, 10)).tolist() == [40, 45, 40, 40]


@pytest.mark.parametrize(
    ("changed", "kept"), [(lambda mask: mask * 2, 1), (lambda _: jnp.full((32, 64), 3.0), 0)], ids=["computed", "a number spread out"]
)
def test_what_a_loop_reads_is_in_memory_before_it(changed, kept):
    def function(x, mask):
        constant = changed(jnp.tanh(mask))
        return lax.scan(lambda carry, _: (carry + constant, None), x, None, length=3)[0]

    program, graph = traced(function, X, X)
    materialized = step_memory(graph, program.scopes).materialized
    entered = [op.operands[0] for op in graph.ops if op.primitive == "scan.enter" and op.operands[0] in graph.producers]
    assert sum(materialized[value] for value in entered) == kept


@pytest.mark.parametrize("num_ops", [0, 1])
def test_a_step_of_no_ops_has_a_peak_too(num_ops):
    assert peak((ValueLife(0, 0, 0),), [8], num_ops) == Peak(0, 8)


def test_a_fused_op_runs_when_its_last_reader_does():
    program, graph = traced(lambda x, w: jnp.sin(x) @ w, X, W)
    assert step_memory(graph, program.scopes).times == (1, 1)


def accumulated(hide):
    """A loop that adds up products of weights that stay the same, read in a narrower type."""

    def function(total, w, xs):
        def turn(total, x):
            return total + hide(w).T @ x, None

        return lax.scan(turn, total, xs)[0]

    return traced(function, jnp.ones((64, 64)), W, jnp.ones((3, 64, 64), jnp.bfloat16))


def test_what_takes_the_place_of_a_carry_has_its_memory():
    program, graph = accumulated(lambda w: w)
    memory = step_memory(graph, program.scopes)
    added = next(op.results[0] for op in graph.ops if op.primitive == "add")
    product = next(op.results[0] for op in graph.ops if op.primitive == "dot_general")
    assert [life.value for life in memory.in_carries] == [added if memory.materialized[added] else product]
    assert not {life.value for life in memory.in_carries} & {life.value for life in memory.lives}


def test_a_carry_that_is_read_after_its_next_value_is_there_keeps_its_memory():
    def function(start, xs):
        def turn(carry, x):
            following = carry @ x
            return following, jnp.sum(jnp.sin(following) @ carry)

        return lax.scan(turn, start, xs)

    program, graph = traced(function, W, jnp.ones((3, 64, 64)))
    assert step_memory(graph, program.scopes).in_carries == ()


def test_a_loop_keeps_a_narrowed_constant_for_all_of_its_iterations():
    program, graph = accumulated(lambda w: w.astype(jnp.bfloat16))
    narrowed = next(op.results[0] for op in graph.ops if op.primitive == "convert_element_type")
    memory = step_memory(graph, program.scopes)
    assert not memory.materialized[narrowed], "made where it is read, as far as the trace says"
    kept = next(life for life in memory.lives if life.value == narrowed)
    weight = next(op for op in graph.ops if op.primitive == "scan.enter" and op.operands == (graph.inputs[1],))
    assert kept.start == weight.id
    assert graph.ops[kept.end].primitive == "scan.next"


def test_inputs_are_read_from_their_first_reader_to_their_last():
    program, graph = traced(lambda x, w, v: (((x @ w) @ v) @ w, x), X, W, W)
    x, w, v = graph.inputs
    reads = {value: (start, end) for value, start, end in step_memory(graph, program.scopes).reads}
    first, second, third = (op.id for op in graph.ops if op.primitive == "dot_general")
    assert (reads[w], reads[v]) == ((first, third), (second, second))
    assert reads[x] == (first, len(graph.ops) - 1), "what a step hands on is kept"


def test_a_product_that_is_transposed_is_made_so():
    program, graph = traced(lambda x, w: (x @ w).T, X, W)
    product = graph.ops[0].results[0]
    memory = step_memory(graph, program.scopes)
    assert (memory.materialized[product], memory.settled[product]) == (0, 1)


def test_a_product_that_bears_a_mark_is_made_under_it():
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    program, graph = traced(lambda x, w: lax.with_sharding_constraint(x @ w, place), X, W)
    product = graph.ops[0].results[0]
    memory = step_memory(graph, program.scopes)
    assert (memory.materialized[product], memory.settled[product]) == (0, 1)

"""Jaxprs to graphs: calls inlined, loops entered through boundaries, dead code dropped, ties, repeats, origins."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdctx.ir.graph import LITERAL, Role
from tests.road import ops, trace

X = jnp.ones((8, 16))
W = jnp.ones((16, 16))
STACK = jnp.ones((5, 16, 16))


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def primitives(program):
    return [op.primitive for op in program.graph.ops]


def shapes(program, values):
    return [program.graph.values[value].shape for value in values]


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (bent(primals[0]), 7.0 * tangents[0]))


@jax.custom_vjp
def warped(x):
    return jnp.sin(x)


warped.defvjp(lambda x: (warped(x), x), lambda x, ct: (3.0 * ct * x,))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))], ids=["jit", "remat", "jit in jit"])
def test_a_call_is_inlined(wrap):
    program = trace(wrap(lambda x, w: jnp.tanh(x @ w)), X, W)
    assert primitives(program) == ["dot_general", "tanh"]
    assert program.graph.ops[0].operands == program.graph.inputs
    assert program.graph.ops[1].results == program.graph.outputs


@pytest.mark.parametrize("function", [bent, warped], ids=["custom_jvp", "custom_vjp"])
def test_a_custom_rule_is_walked_through_its_forward_function(function):
    assert primitives(trace(function, X)) == ["sin"]


@pytest.mark.parametrize("function", [bent, warped], ids=["custom_jvp", "custom_vjp"])
def test_the_gradient_of_a_custom_rule_is_that_rule(function):
    assert not {"sin", "cos"}.intersection(primitives(trace(jax.grad(lambda x: function(x).sum()), X)))


def test_a_jitted_function_called_twice_makes_ops_twice():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    program = trace(lambda x, w: layer(layer(x, w), w), X, W)
    assert primitives(program) == ["dot_general", "tanh", "dot_general", "tanh"]
    assert ops(program, "dot_general")[1].operands[0] == ops(program, "tanh")[0].results[0]
    assert ops(program, "dot_general")[0].rule is ops(program, "dot_general")[1].rule


def test_a_remat_body_is_a_computation_of_its_own():
    program = trace(lambda x, w: jnp.sin(jax.checkpoint(lambda x: x @ w)(x)), X, W)
    assert program.scopes == (1, 0)


def test_closed_over_arrays_are_constants():
    array, numpy_array = jnp.ones((16, 4)), np.ones((16, 4), np.float32)
    program = trace(lambda x: (x @ array, jax.jit(lambda x: x @ numpy_array)(x)), X)
    first, second = ops(program, "dot_general")
    assert shapes(program, (first.operands[1], second.operands[1])) == [(16, 4), (16, 4)]
    assert program.graph.values[first.operands[1]].role is Role.CONSTANT
    assert not program.from_literals.intersection((first.operands[1], second.operands[1]))


def test_a_scan_has_boundaries_ties_and_repeats():
    program = trace(lambda x, w, stack: lax.scan(lambda c, v: (jnp.tanh(c @ w), v * 2), x, stack), X, W, STACK)
    assert primitives(program) == ["scan.enter"] * 3 + ["dot_general", "tanh", "mul", "scan.next", "scan.exit"]
    assert [op.repeats for op in program.graph.ops] == [1, 1, 1, 5, 5, 5, 5, 1]
    enter = ops(program, "scan.enter")
    assert [shapes(program, op.results) for op in enter] == [[(16, 16)], [(8, 16)], [(16, 16)]]
    assert program.graph.ties == ((enter[1].results[0], ops(program, "scan.next")[0].results[0]),)
    assert program.graph.outputs == (*ops(program, "scan.next")[0].results, *ops(program, "scan.exit")[0].results)
    assert str(enter[2].rule) == "([i, j, k])->([j, k]) {i=5, j=16, k=16} blocked_propagation={i}"
    assert str(ops(program, "scan.exit")[0].rule) == "([j, k])->([i, j, k]) {i=5, j=16, k=16} blocked_propagation={i}"


def test_a_reverse_scan_has_the_same_ops_as_a_forward_one():
    forward, backward = (trace(lambda x, r=r: lax.scan(lambda c, a: (c + a, c * a), x[0], x, reverse=r), X) for r in (False, True))
    assert primitives(forward) == primitives(backward)
    assert forward.graph.ties == backward.graph.ties


def test_nested_scans_multiply_their_repeats():
    def inner(c, _):
        return jnp.sin(c), None

    program = trace(lambda x: lax.scan(lambda c, _: (lax.scan(inner, c, None, length=3)[0], None), x, None, length=4)[0], X)
    assert [op.repeats for op in ops(program, "sin")] == [12]


def test_the_gradient_of_a_remat_scan_recomputes_in_the_backward_loop():
    def loss(stack, x):
        return lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, stack)[0].sum()

    program = trace(jax.grad(loss), STACK, X)
    assert [op.repeats for op in ops(program, "dot_general")] == [5] * 4
    assert len({program.scopes[op.id] for op in ops(program, "dot_general")}) == 2


@pytest.mark.parametrize(
    ("loop", "repeats"),
    [
        (lambda x: lax.fori_loop(0, 6, lambda i, s: jnp.sin(s), x), 6),
        (lambda x: lax.while_loop(lambda s: s[0] < 6, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)), 6),
        (lambda x: lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 2, jnp.sin(s[1])), (0, x)), 4),
        (lambda x: lax.while_loop(lambda s: s[1] < 7, lambda s: (jnp.sin(s[0]), s[1] + 1), (x, 3)), 4),
    ],
    ids=["fori_loop", "while", "steps of two", "start at three"],
)
def test_a_counting_loop_knows_its_trip_count(loop, repeats):
    program = trace(loop, X)
    assert [op.repeats for op in ops(program, "sin")] == [repeats]
    assert program.graph.notes == ()


@pytest.mark.parametrize(
    ("loop", "args"),
    [
        (lambda x, n: lax.fori_loop(0, n, lambda i, s: jnp.sin(s), x), (X, 3)),
        (lambda x: lax.while_loop(lambda s: jnp.sum(s) > 1.0, jnp.sin, x), (X,)),
        (lambda x: lax.while_loop(lambda s: s[0] < 64, lambda s: (s[0] * 2, jnp.sin(s[1])), (1, x)), (X,)),
        (lambda x, n: lax.while_loop(lambda s: n < 5, jnp.sin, x), (X, 3)),
    ],
    ids=["dynamic fori_loop", "data", "doubling", "constant condition"],
)
def test_a_loop_of_unknown_length_counts_once_and_is_noted(loop, args):
    program = trace(loop, *args)
    assert [op.repeats for op in ops(program, "sin")] == [1]
    assert [note for note in program.graph.notes if "trip count" in note]


def test_the_condition_of_a_loop_is_alive_and_reads_the_carry():
    program = trace(lambda x: lax.while_loop(lambda s: jnp.sum(s) > 1.0, jnp.sin, x), X)
    assert primitives(program) == ["while.enter", "reduce_sum", "gt", "sin", "while.next"]
    assert ops(program, "while.next")[0].operands == (*ops(program, "sin")[0].results, *ops(program, "gt")[0].results)
    assert ops(program, "reduce_sum")[0].operands == ops(program, "sin")[0].operands


def test_the_predicate_of_a_batched_loop_leads_the_dimensions_of_its_carry():
    program = trace(jax.vmap(lambda r: lax.while_loop(lambda s: jnp.sum(s) > 1.0, jnp.sin, r)), X)
    assert str(ops(program, "while.next")[0].rule) == "([i, j], [i])->([i, j]) {i=8, j=16}"


@pytest.mark.parametrize("num_branches", [2, 3])
def test_a_cond_takes_a_result_from_each_branch_and_keeps_its_predicate_alive(num_branches):
    branches = [jnp.sin, jnp.cos, jnp.tanh][:num_branches]
    program = trace(lambda x, i: lax.switch(i + 1, branches, x), X, 1)
    (merged,) = ops(program, "cond.exit")
    assert shapes(program, merged.operands) == [X.shape] * num_branches + [()]
    assert {"add", "clamp"} <= set(primitives(program))
    assert len({program.scopes[op.id] for op in program.graph.ops if op.primitive in ("sin", "cos", "tanh")}) == num_branches


def test_a_shard_map_is_one_op_with_its_specs_and_collectives():
    def local(x):
        return lax.scan(lambda c, _: (lax.psum(c, "model"), None), x, None, length=3)[0]

    program = trace(jax.shard_map(local, mesh=mesh(), in_specs=P("data", "model"), out_specs=P("data"), check_vma=False), X)
    assert primitives(program) == ["shard_map"]
    (region,) = program.manual
    assert (region.operands, region.results) == (((("data",), ("model",)),), ((("data",), ()),))
    assert [(row.kind, row.axes, row.payload_bytes, row.repeats) for row in region.collectives] == [("all_reduce", ("model",), 64, 3)]
    assert region.collectives[0].source.startswith("test_build.py:")


def test_a_constraint_and_the_shardings_of_a_nested_jit_are_pins():
    place = NamedSharding(mesh(), P("data", P.UNCONSTRAINED))

    def step(x):
        return jax.jit(lambda x: lax.with_sharding_constraint(x * 2, place), out_shardings=NamedSharding(mesh(), P(None, "model")))(x)

    program = trace(step, X)
    assert primitives(program) == ["mul", "sharding_constraint", "sharding_constraint"]
    assert [pin.dims for pin in program.user_pins] == [(("data",), None), ((), ("model",))]
    assert {pin.mesh_axes for pin in program.user_pins} == {(("data", 4), ("model", 2))}


def test_a_literal_that_a_constraint_reshards_has_its_own_shape():
    sharding = NamedSharding(mesh(), P(None, "model"))
    program = trace(jax.grad(lambda w, x: jnp.tanh(x @ lax.with_sharding_constraint(w, sharding)).mean()), W, X)
    pinned = [program.graph.values[pin.value].shape for pin in program.user_pins]
    assert () in pinned
    assert all(len(shape) == len(pin.dims) for shape, pin in zip(pinned, program.user_pins, strict=True))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_random_numbers_depend_on_their_key(key):
    program = trace(lambda k, x: x + jax.random.normal(k, x.shape), key, X)
    assert program.graph.values[program.graph.inputs[0]].shape == key.shape
    assert ops(program, "random_bits")[0].results[0] not in program.from_literals


def test_a_key_made_from_a_literal_is_not_free_to_make_anywhere():
    program = trace(lambda x: x + jax.random.normal(jax.random.key(3), x.shape), X)
    assert ops(program, "random_bits")[0].results[0] not in program.from_literals


def test_values_made_of_literals_are_told_apart():
    program = trace(lambda x: x + jnp.zeros((8, 16)) + lax.iota(jnp.float32, 16), X)
    assert {ops(program, "iota")[0].results[0], ops(program, "broadcast_in_dim")[0].results[0]} <= program.from_literals
    assert not program.from_literals.intersection(program.graph.inputs)


def test_dead_code_is_dropped():
    def step(x, w):
        unused = jnp.cos(x) @ w
        del unused
        return jnp.sin(x)

    program = trace(step, X, W)
    assert primitives(program) == ["sin"]
    assert program.op_of_site == (-1, -1, 0)
    assert program.graph.ops[0].id == 0


def test_a_dead_loop_is_dropped_and_a_dead_carry_with_what_feeds_it():
    def step(x, w):
        lax.scan(lambda c, _: (c @ w, None), x, None, length=3)
        (_, kept), sums = lax.scan(lambda c, _: ((jnp.cos(c[0]), jnp.sin(c[1])), c[1].sum()), (x, x), None, length=3)
        del sums
        return kept

    program = trace(step, X, W)
    assert primitives(program) == ["scan.enter", "sin", "scan.next"]
    assert len(program.op_of_site) > 3


def test_a_carry_that_only_another_carry_reads_is_alive():
    def step(x):
        return lax.scan(lambda c, _: ((jnp.cos(c[0]), c[1] + c[2], jnp.sin(c[2] * c[0])), None), (x, x, x), None, length=3)[0][1]

    assert {"cos", "sin", "add", "mul"} <= set(primitives(trace(step, X)))


def test_effects_are_not_dead():
    program = trace(lambda x: (jax.debug.print("{}", x.sum()), jnp.sin(x))[1], X)
    assert "reduce_sum" in primitives(program)


def test_carried_state_is_tied():
    program = trace(lambda p, x: (p - x.sum(), x), W, X, carried=[(0, 0)])
    assert program.graph.ties == ((program.graph.inputs[0], program.graph.outputs[0]),)


def test_a_literal_result_is_no_value():
    program = trace(lambda x: (x + 1.0, 3.0), X)
    assert program.graph.outputs[1] == LITERAL
    assert trace(lambda x: (x + 1.0, 3.0), X, carried=[(1, 0)]).graph.ties == ()


def test_flops_are_those_of_one_execution():
    program = trace(lambda x, stack: lax.scan(lambda c, w: (c @ w, None), x, stack)[0], X, STACK)
    (dot,) = ops(program, "dot_general")
    assert dot.flops == 2 * math.prod((8, 16, 16))


def test_an_op_knows_its_scope_and_source_line():
    def step(x, w):
        with jax.named_scope("block"):
            return jax.jit(lambda x: jnp.tanh(x @ w))(x)

    program = trace(step, X, W)
    origin = program.graph.origins[ops(program, "tanh")[0].id]
    assert origin.name.startswith("block")
    assert origin.source.startswith(f"test_build.py:{step.__code__.co_firstlineno + 2} ")


def test_what_jaxs_own_functions_do_has_the_source_line_of_their_call():
    def step(x):
        return jax.nn.gelu(jnp.sort(x)), jnp.linalg.cholesky(x[:, :8])

    program = trace(step, X)
    lines = {origin.source.split(" ")[0] for origin in program.graph.origins}
    assert lines == {f"test_build.py:{step.__code__.co_firstlineno + 1}"}


def test_an_op_in_a_loop_knows_the_scope_of_the_loop():
    def step(x):
        with jax.named_scope("layers"):
            return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0]

    program = trace(step, X)
    assert program.graph.origins[ops(program, "sin")[0].id].name.startswith("layers")


def scanned(length=3, unroll_to=jnp.sin):
    return lambda x: lax.scan(lambda c, _: (unroll_to(c), None), x, None, length=length)[0]


def manual(spec):
    return jax.shard_map(lambda x: 2 * x, mesh=mesh(), in_specs=spec, out_specs=spec)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.sin, jnp.cos),
        (scanned(3), scanned(4)),
        (scanned(), scanned(unroll_to=jax.checkpoint(jnp.sin))),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (manual(P("data", "model")), manual(P("model", "data"))),
        (lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh(), P("data"))), lambda x: jax.checkpoint(lambda x: x)(x)),
    ],
    ids=["primitive", "length", "remat", "parameters", "order of results", "specs", "constraint"],
)
def test_programs_that_can_plan_differently_have_different_fingerprints(one, other):
    assert trace(one, X).graph.fingerprint != trace(other, X).graph.fingerprint


@pytest.mark.parametrize("function", [scanned(), manual(P("data")), jnp.sin], ids=["scan", "shard_map", "sin"])
def test_the_same_program_has_the_same_fingerprint(function):
    assert trace(function, X).graph.fingerprint == trace(function, X).graph.fingerprint


def test_shapes_dtypes_roles_and_ties_are_in_the_fingerprint():
    known = {
        trace(jnp.sin, X).graph.fingerprint,
        trace(jnp.sin, X[:4]).graph.fingerprint,
        trace(jnp.sin, X.astype(jnp.bfloat16)).graph.fingerprint,
        trace(jnp.sin, X, roles=[Role.BATCH]).graph.fingerprint,
        trace(jnp.sin, X, carried=[(0, 0)]).graph.fingerprint,
    }
    assert len(known) == 5

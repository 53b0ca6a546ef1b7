"""The bill of an assignment: which collectives, how large, how often, and what is counted once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.reductions import reduction_plan
from spmdctx.rules import rule_for
from spmdctx.rules.builder import identity
from spmdctx.search.problem.space import Space
from tests.road import CPU, MESH, bill_of, ops, spread, trace
from tests.search.graphs import GraphMaker

D, M = ("data",), ("model",)
WHOLE = ((), ())
X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def bill(graph, ops, values, *, topology=CPU, mesh=MESH, manual=(), from_literals=frozenset(), scopes=None):
    assignment = Assignment(tuple(map(OpSharding, ops)), tuple(values), "by hand")
    return price(Step(graph, tuple(scopes or [0] * len(graph.ops)), from_literals), assignment, mesh, topology, written=manual)


def rows(found):
    return [(row.kind, row.axes, row.payload_bytes, row.repeats) for row in found.collectives]


def one_dot(repeats=1, width=16):
    """[32, 64] times [64, width]."""
    make = GraphMaker()
    left, right = make.input(32, 64), make.input(64, width)
    rule = rule_for("dot_general", ((32, 64), (64, width)), ((32, width),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    result = make.op("dot_general", rule, left, right, shape=(32, width), repeats=repeats)
    contracted, rows_, columns = rule.operands[0][1][0], rule.operands[0][0][0], rule.operands[1][1][0]

    def axes(**named):
        own = {contracted: named.get("k", ()), rows_: named.get("i", ()), columns: named.get("j", ())}
        return tuple(own[index] for index in range(3))

    return make.graph(result), axes


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (WHOLE, [("all_reduce", M, 32 * 16 * 4, 1)]),
        ((M, ()), [("reduce_scatter", M, 32 * 16 * 4, 1)]),
        (((), M), [("reduce_scatter", M, 32 * 16 * 4, 1)]),
        ((D, ()), [("all_reduce", M, 32 * 16 * 4, 1)]),
    ],
    ids=["whole", "rows", "columns", "sliced after"],
)
def test_a_partial_result_is_reduced_or_scattered_as_it_is_stored(stored, expected):
    graph, axes = one_dot()
    assert rows(bill(graph, [axes(k=M)], [((), M), (M, ()), stored])) == expected


def test_a_scatter_that_the_compiler_does_not_make_costs_what_it_makes_instead():
    """Blocks of 96 columns are no whole words on all lanes: the sum is reduced whole and sliced. It is planned as a scatter."""
    graph, axes = one_dot(width=96 * MESH.sizes["model"])
    machine = PRESETS["tpu-v5e"]
    for stored, made in ((((), M), "all_reduce"), ((M, ()), "reduce_scatter")):
        found = bill(graph, [axes(k=M)], [((), M), (M, ()), stored], topology=machine)
        (row,) = found.collectives
        assert row.kind == "reduce_scatter"
        alone = dataclasses.replace(machine, latency_s=0.0) if machine.compiler.combines_reductions else machine
        assert row.time_s == pytest.approx(collective_time_s(made, row.payload_bytes, M, MESH, alone))


def test_a_sum_over_two_axes_is_scattered_over_one_and_reduced_over_the_other():
    graph, axes = one_dot()
    both = ("data", "model")
    found = bill(graph, [axes(k=both)], [((), both), (both, ()), (D, ())])
    assert rows(found) == [("reduce_scatter", D, 2048, 1), ("all_reduce", M, 512, 1)]


def test_what_a_loop_does_counts_as_often_as_it_runs():
    graph, axes = one_dot(repeats=7)
    found = bill(graph, [axes(k=M)], [((), M), (M, ()), WHOLE])
    assert rows(found) == [("all_reduce", M, 2048, 7)]
    assert found.communication_s == pytest.approx(7 * collective_time_s("all_reduce", 2048, M, MESH, CPU))


@pytest.mark.parametrize("scopes", [(0, 0), (0, 1)], ids=["same computation", "another computation"])
def test_a_reshard_is_done_once_per_computation_however_many_read_it(scopes):
    make = GraphMaker()
    shared = make.input(32, 64)
    first, second = (make.op(name, identity((32, 64)), shared, shape=(32, 64)) for name in ("sin", "cos"))
    found = bill(make.graph(first, second), [WHOLE, WHOLE], [(D, ()), WHOLE, WHOLE], scopes=scopes)
    assert rows(found) == [("all_gather", D, 32 * 64 * 4, 1)] * len(set(scopes))
    assert len(found.moves) == 2


def test_a_reshard_names_its_value_its_cause_and_its_line():
    make = GraphMaker()
    make.op("sin", identity((32, 64)), make.input(32, 64, path="state/w"), shape=(32, 64))
    (row,) = bill(make.graph(1), [WHOLE], [(D, ()), WHOLE]).collectives
    assert row.cause == "operand 0 of sin: state/w [data, -] -> [-, -]"
    assert row.source == "made.py:0"


def test_slicing_is_free():
    make = GraphMaker()
    make.op("sin", identity((32, 64)), make.input(32, 64), shape=(32, 64))
    assert rows(bill(make.graph(1), [(D, M)], [WHOLE, (D, M)])) == []


def test_a_value_that_depends_on_no_input_is_made_where_it_is_wanted():
    make = GraphMaker()
    make.op("sin", identity((32, 64)), make.input(32, 64), shape=(32, 64))
    graph = make.graph(1)
    assert rows(bill(graph, [WHOLE], [(D, ()), WHOLE], from_literals=frozenset({0}))) == []


@pytest.mark.parametrize(("topology", "count"), [("cpu", 2), ("h100", 1), ("tpu-v5e", 1)])
def test_a_sum_of_partial_results_is_reduced_once_where_the_compiler_does_so(topology, count):
    program = trace(lambda x, y, w: x @ w + y @ w, X, X, W)
    assignment = spread(program, {0: ((), M), 1: ((), M), 2: (M, ())})
    found = price(Step(program.graph, program.scopes, program.from_literals), assignment, MESH, PRESETS[topology])
    assert rows(found) == [("all_reduce", M, 32 * 64 * 4, 1)] * count


def test_equal_ops_on_other_dtypes_move_other_numbers_of_bytes():
    make, rule = GraphMaker(), identity((32, 64))
    wide = make.op("sin", rule, make.input(32, 64), shape=(32, 64))
    narrow = make.op("sin", rule, make.input(32, 64, dtype="bfloat16"), shape=(32, 64), dtype="bfloat16")
    found = bill(make.graph(wide, narrow), [WHOLE] * 2, [WHOLE] * 4)
    assert found.compute_s == pytest.approx(2 * 32 * 64 * (4 + 2) / CPU.memory_bytes_per_s)


def test_collectives_that_the_user_wrote_are_on_the_bill_with_a_price():
    graph, axes = one_dot()
    written = Collective("all_reduce", M, 4096, 0.0, 3, Cause(CauseForm.WRITTEN, primitive="psum"), "model.py:7")
    found = bill(graph, [axes()], [WHOLE] * 3, manual=[written])
    assert found.collectives == [
        Collective("all_reduce", M, 4096, collective_time_s("all_reduce", 4096, M, MESH, CPU), 3, written.cause, "model.py:7")
    ]


@pytest.mark.parametrize(("axes", "slices"), [({}, 1), ({"i": D}, 4), ({"i": D, "j": M}, 8), ({"k": ("data", "model")}, 8)])
def test_split_flops_are_counted_by_the_devices_that_share_them(axes, slices):
    graph, named = one_dot()
    graph = graph.__class__(**{**graph.__dict__, "ops": (graph.ops[0]._replace(flops=2 * 32 * 64 * 16),)})
    found = bill(graph, [named(**axes)], [WHOLE] * 3)
    assert found.split_flops / found.flops == slices / 8


def test_peak_memory_is_of_what_lives_at_once_on_one_device():
    make = GraphMaker()
    start = make.input(32, 64)
    first = make.op("sort", identity((32, 64)), start, shape=(32, 64))
    third = make.op("sort", identity((32, 64)), first, shape=(32, 64))
    size = 32 * 64 * 4
    graph = make.graph(third)
    assert bill(graph, [WHOLE] * 2, [WHOLE] * 3).memory_bytes == 2 * size
    assert bill(graph, [(D, M)] * 2, [(D, M)] * 3).memory_bytes == 2 * size // 8


def test_a_gathered_copy_is_in_memory_from_its_first_reader_to_its_last():
    make = GraphMaker()
    start, other = make.input(64, 64), make.input(64, 64)
    square = rule_for("dot_general", ((64, 64), (64, 64)), ((64, 64),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    first = make.op("dot_general", square, start, other, shape=(64, 64))
    second = make.op("dot_general", square, first, first, shape=(64, 64))
    third = make.op("dot_general", square, second, start, shape=(64, 64))
    found = bill(make.graph(third), [((),) * 3] * 3, [(D, ()), WHOLE, WHOLE, WHOLE, WHOLE])
    assert [(row.kind, row.cause.form, row.cause.gaps["position"]) for row in found.collectives] == [("all_gather", CauseForm.OPERAND, "0")]
    # The arguments' blocks, the gathered copy of one, and two results.
    assert found.memory_bytes == 64 * 64 * 4 * (1 + 4 + 4 + 4 + 4) // 4


@pytest.mark.parametrize(
    ("natural", "stored", "partial", "expected"),
    [
        (WHOLE, WHOLE, M, (M, (), WHOLE)),
        (WHOLE, (M, ()), M, ((), M, (M, ()))),
        ((D, ()), (("data", "model"), ()), M, ((), M, (("data", "model"), ()))),
        ((D, ()), (("model", "data"), ()), M, (M, (), (D, ()))),
        (WHOLE, (D, ()), M, (M, (), WHOLE)),
        (WHOLE, (D, M), ("data", "model"), (M, D, (D, ()))),
        ((("a",), ()), (("a", "data"), ()), ("data", "model"), (("data", "model"), (), (("a",), ()))),
        ((("a",), ()), (("a",), D), ("data", "model"), (M, D, (("a",), D))),
    ],
)
def test_what_of_a_partial_dot_is_reduced_and_what_is_scattered(natural, stored, partial, expected):
    (dot,) = one_dot()[0].ops
    assert reduction_plan(dot, natural, stored, partial) == expected


def test_only_sums_are_scattered():
    make = GraphMaker()
    rule = rule_for("reduce_max", ((32, 64),), ((64,),), {"axes": (0,)})
    make.op("reduce_max", rule, make.input(32, 64), shape=(64,))
    factor = rule.operands[0][0][0]
    axes = tuple(D if index == factor else () for index in range(2))
    assert rows(bill(make.graph(1), [axes], [(D, ()), (D,)])) == [("all_reduce", D, 256, 1)]


def test_the_bill_of_a_scan_is_that_of_its_iterations():
    def once(x, w):
        return jnp.tanh(x @ w)

    looped = trace(lambda x, w: lax.scan(lambda c, _: (once(c, w), None), x, None, length=6)[0], X, W)
    single = trace(once, X, W)
    pins = {0: ((), M), 1: (M, ())}
    per_iteration = bill_of(single, spread(single, {**pins, single.graph.ops[-1]: ((), M)}))
    found = bill_of(looped, spread(looped, pins))
    assert [(row.kind, row.axes, row.payload_bytes, 6) for row in per_iteration.collectives] == rows(found)


def test_a_single_device_pays_nothing():
    program = trace(lambda x, w: jax.grad(lambda w: jnp.sum(x @ w))(w), X, W)
    mesh = LogicalMesh.of({"data": 1})
    assert bill_of(program, spread(program, {}, mesh), mesh).collectives == []


@pytest.mark.parametrize("stored", [WHOLE, (D, ()), (("data", "model"), ()), ((), M), (D, M)], ids=str)
def test_the_search_prices_an_op_as_the_bill_does(stored):
    graph, _ = one_dot()
    values = [((), ("data", "model")), (("data", "model"), ()), stored]
    space = Space(graph, MESH, CPU, frozenset())
    choice = space.choose(0, [space.number(sharding) for sharding in values])
    found = bill(graph, [choice.axes], values)
    assert choice.time_s == pytest.approx(found.compute_s + found.communication_s)


@pytest.mark.parametrize(("axis", "share"), [(M, 1.5), ((), 0.5)], ids=["a sum over devices", "whole"])
@pytest.mark.parametrize("narrows", [True, False])
def test_a_sum_that_is_kept_narrow_is_reduced_before_it_is_narrowed(axis, share, narrows):
    machine = dataclasses.replace(CPU, narrows_matrix_operands=narrows, fuses_into_products=True)
    program = trace(lambda x, w, v: jnp.sum((lambda y: jnp.tanh(y) * jnp.cos(y))(x @ w) @ v), X, W, W)
    first = program.graph.ops[0]
    assignment = spread(program, {0: ((), axis), 1: (axis, ()), 2: WHOLE})
    profile = price(Step(program.graph, program.scopes, program.from_literals), assignment, MESH, machine).memory_profile
    arguments = (32 + 64 + 64) * 64 * 4 if not axis else (32 + 64) * 64 * 4 // 2 + 64 * 64 * 4
    # Kept as float32, a sum is reduced in its own place.
    assert profile[first.id] - arguments == (share if narrows else 1) * 32 * 64 * 4


def test_a_sum_over_an_axis_of_one_device_is_none():
    """Its product may run last, and what it reads is there until then."""

    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    program = trace(step, [W, W], X)
    mesh = LogicalMesh.of({"data": 1, "model": 8})
    split, whole = (spread(program, {2: (axes, ()), 0: ((), M), 1: (M, ())}, mesh) for axes in (D, ()))
    profiles = [
        price(Step(program.graph, program.scopes, program.from_literals), assignment, mesh, CPU).memory_profile
        for assignment in (split, whole)
    ]
    assert profiles[0] == profiles[1]


@pytest.mark.parametrize(("name", "count"), [("scan.enter", 1), ("while.enter", 1), ("sharding_constraint", 1), ("tanh", 2)])
@pytest.mark.parametrize("axes", [(D, ()), WHOLE], ids=["as a result", "as an operand"])
def test_what_moves_on_its_way_into_a_loop_and_for_another_op_moves_once(name, count, axes):
    make = GraphMaker()
    shared = make.input(32, 64)
    entered, read = (make.op(own, identity((32, 64)), shared, shape=(32, 64)) for own in (name, "sin"))
    found = bill(make.graph(entered, read), [axes, WHOLE], [(D, ()), WHOLE, WHOLE])
    assert rows(found) == [("all_gather", D, 32 * 64 * 4, 1)] * (count if axes != WHOLE else 1)


def test_parts_of_a_whole_stack_are_cut_off_before_the_loop():
    program = trace(lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0], X, jnp.ones((6, 64, 64)))
    stack, (product,) = program.graph.inputs[1], ops(program, "dot_general")
    (enter,) = (op for op in ops(program, "scan.enter") if op.operands[0] == stack)
    found = []
    for axes in ((), M):
        assignment = spread(program, {1: ((), (), axes), enter: ((), M)})
        assert assignment.values[stack] == ((), (), axes)
        assert assignment.values[enter.results[0]] == ((), M)
        found.append(bill_of(program, assignment).memory_profile[product.id])
    # The whole stack is twice the part that each device reads.
    assert found[0] - found[1] == 2 * 6 * 64 * 64 * 4 // 2

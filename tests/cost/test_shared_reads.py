"""Products that take a value in two shardings share a copy on the way, in the price and in the compiled program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cost.evaluate import evaluate, sharing_ids
from spmdctx.cost.price import price
from spmdctx.cost.price.directives import Directives, completed
from spmdctx.cost.shared_reads import shared_reads
from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.lowering.compile import jit_program
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.narrowing import sharing_ops
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.search.setup.request import Setup
from tests.audit.compile_only import need_tpu
from tests.lowering.gradients import combined
from tests.oracles.exhaustive import exhaustive
from tests.road import trace

MESH = LogicalMesh.of({"data": 2, "model": 4})
MACHINE = PRESETS["tpu-v5e"]
X, W = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
STORED, SHARED, WHOLE = (("model", "data"), ()), (("model",), ()), ((), ())


def assigned(second, function=lambda x, y, w: (x @ w, y @ w)):
    """Two products with one weight: the first takes it whole, the second split so along the dimension that it sums over."""
    program = trace(function, X, X, W)
    ops, values = [], [replicated(len(value.shape)) for value in program.graph.values]
    products = [op for op in program.graph.ops if op.primitive == "dot_general"]
    for op in program.graph.ops:
        axes = [()] * len(op.rule.sizes)
        if op is products[-1] and len(products) > 1:
            axes[op.rule.operands[1][0][0]] = second
        ops.append(OpSharding(tuple(axes)))
    if len(products) > 1:
        values[products[1].operands[0]] = ((), second)
    values[products[0].operands[1]] = STORED
    return program, Assignment(tuple(ops), tuple(values), "test")


def routes_of(program, assignment):
    return shared_reads(program.graph, program.scopes, assignment, MESH, MACHINE)


def test_what_one_product_takes_is_on_the_way_to_the_other():
    program, assignment = assigned(("model",))
    assert list(routes_of(program, assignment).values()) == [SHARED]
    bill = price(Step(program.graph, program.scopes, program.from_literals), assignment, MESH, MACHINE)
    assert [row.axes for row in bill.collectives if row.kind == "all_gather"] == [("data",), ("model",)]


@pytest.mark.parametrize("second", [(), ("model", "data")])
def test_what_several_products_read_takes_the_cheapest_route_to_one_sharding(second):
    # Gathers over 2 and then 4 devices have 4 steps, one over 8 has 7.
    program, assignment = assigned(second)
    assert list(routes_of(program, assignment).values()) == [SHARED]
    bill = price(Step(program.graph, program.scopes, program.from_literals), assignment, MESH, MACHINE)
    assert [row.axes for row in bill.collectives if row.kind == "all_gather"] == [("data",), ("model",)]


def test_what_one_product_reads_is_brought_there_at_once():
    assert not routes_of(*assigned((), lambda x, y, w: (x @ w, y)))


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_the_compiled_program_gathers_along_the_way(backend):
    program, assignment = assigned(("model",))
    devices = need_tpu() if backend == "tpu" else jax.devices()
    directives = completed(Directives(routes=routes_of(program, assignment)), program.graph, program.scopes, assignment, MESH)
    made = jit_program(program, assignment, MESH, devices, directives)
    text = made.jitted.lower(X, X, W).compile().as_text()
    gathers = [one.shapes for one in combined(text) if one.kind == "all_gather"]
    assert sorted(shape[0] for (shape,) in gathers) == [32, 64]


def autoencoder(weights, x):
    """A training step in which every weight is read as it is, and transposed."""

    def loss(weights):
        h = jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])
        return jnp.mean((h @ weights[1].T @ weights[0].T - x) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, slopes)


def sized(rows, width):
    return [jnp.ones((width, 2 * width)), jnp.ones((2 * width, width))], jnp.ones((rows, width))


@pytest.mark.parametrize("machine", ["tpu-v5e", "h100", "cpu"])
@pytest.mark.parametrize("shape", [(2,), (4,)], ids=str)
def test_a_weight_that_is_read_transposed_too_is_gathered_once(shape, machine):
    program, mesh, machine = trace(autoencoder, *sized(16, 8)), LogicalMesh.of(shape), PRESETS[machine]
    step = Step(program.graph, program.scopes, program.from_literals, frozenset())
    machine = replace(machine, latency_s=1e-9, peak_flops_per_s=1e11, memory_bytes_per_s=1e11, link_bytes_per_s=1e10)
    found = Searcher(step, machine, DynamicOptions()).search(Setup(mesh))
    truth = exhaustive(program.graph, program.scopes, program.from_literals, mesh, machine)
    assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9)
    assert found.cost_s == found.lower_bound_s
    assert evaluate(program.graph, program.scopes, program.from_literals, found.assignment, mesh, machine).total_s == pytest.approx(
        truth.cost_s
    )
    bill = price(Step(program.graph, program.scopes, program.from_literals), found.assignment, mesh, machine)
    assert bill.compute_s + bill.exposed_communication_s == pytest.approx(truth.cost_s, rel=1e-9)


def test_only_what_leads_to_products_alone_shares_their_copies():
    def function(w, x):
        returned, added, read = w.T, w.T.reshape(-1), w.T.reshape(-1, 2)
        return returned, added + 1, x @ read

    program = trace(function, W, jnp.ones((64, W.size // 2), jnp.bfloat16))
    sharing = sharing_ops(program.graph)
    assert sorted(op.primitive for op in sharing if op.primitive != "dot_general") == ["reshape", "transpose"]
    assert len([op for op in program.graph.ops if op.primitive in ("reshape", "transpose")]) > 2
    assert {op.id for op in sharing} == sharing_ids(program.graph)


def test_the_plan_of_shared_weights_is_what_is_compiled():
    args = jax.eval_shape(lambda: sized(2048, 1024))
    options = {"parallel_mode": "auto_parallel", "devices": need_tpu()}
    fastest = spmdctx.plan(autoencoder, *args, **options)
    tighter = spmdctx.plan(autoencoder, *args, memory_bytes=fastest.safe_memory_bytes // 2, **options)
    assert fastest.gap == 0
    assert fastest.lower_bound_s <= tighter.cost.total_s
    report = spmdctx.parallel(autoencoder, **options).audit(*args)
    assert (report.found_share, report.unplanned_share) == (1, 0)

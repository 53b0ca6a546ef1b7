"""Products that take a value in two shardings share a copy on the way, in the price and in the compiled program."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.topology import PRESETS
from spmdctx.ir import Assignment, OpSharding
from spmdctx.lowering.compile import jit_program
from spmdctx.lowering.wishes import Wishes
from spmdctx.mesh import LogicalMesh, replicated
from spmdctx.search.price import price
from spmdctx.search.shared_reads import shared_reads
from tests.audit.compile_only import need_tpu
from tests.lowering.gradients import combined
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
    bill = price(program.graph, program.scopes, program.loose, (), assignment, MESH, MACHINE)
    assert [row.axes for row in bill.collectives if row.kind == "all_gather"] == [("data",), ("model",)]


@pytest.mark.parametrize("second", [(), ("model", "data")])
def test_what_several_products_read_takes_the_cheapest_way_though_only_one_sharding_is_wanted(second):
    # Gathers over 2 and then 4 devices have 4 steps, one over 8 has 7.
    program, assignment = assigned(second)
    assert list(routes_of(program, assignment).values()) == [SHARED]
    bill = price(program.graph, program.scopes, program.loose, (), assignment, MESH, MACHINE)
    assert [row.axes for row in bill.collectives if row.kind == "all_gather"] == [("data",), ("model",)]


def test_what_one_product_reads_is_brought_there_at_once():
    assert not routes_of(*assigned((), lambda x, y, w: (x @ w, y)))


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_the_compiled_program_gathers_along_the_way(backend):
    program, assignment = assigned(("model",))
    devices = need_tpu() if backend == "tpu" else jax.devices()
    made = jit_program(program, assignment, MESH, devices, wishes=Wishes(routes=routes_of(program, assignment)))
    text = made.jitted.lower(X, X, W).compile().as_text()
    gathers = [one.shapes for one in combined(text) if one.kind == "all_gather"]
    assert sorted(shape[0] for (shape,) in gathers) == [32, 64]

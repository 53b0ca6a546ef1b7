"""Sums of several terms are scattered in the order in which the devices add them up."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from spmdctx.cost.step import Step, bill_of
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.search.setup.request import Setup
from spmdctx.search.whatif.axis_order import with_axes_in_order
from tests.road import ops, spread, trace

MESH, TPU = LogicalMesh.of({"data": 2, "model": 4}), PRESETS["tpu-v5e"]
TABLE, ROWS = jnp.ones((1024, 256)), jnp.ones((512, 1280))
OWN, OTHER = ("model", "data"), ("data", "model")


def step(table, moment, rows):
    one, other, gradient = jnp.split(rows, (256, 512), 1)[0], jnp.cos(rows[:, :256]), rows[:, 256:]
    moment = moment + (gradient.T @ one + gradient.T @ other)
    return table - moment, moment


def planned(table_axes, batch_axes=OWN):
    """A step whose table is split over axes in one order, and whose batch in another."""
    program = trace(step, TABLE, TABLE, ROWS, carried=[(0, 0), (1, 1)])
    whole = dict.fromkeys((*ops(program, "dot_general"), ops(program, "add")[0]), ((), ()))
    pins = {0: (table_axes, ()), 1: (table_axes, ()), 2: (batch_axes, ()), **whole}
    return Step(program.graph, program.scopes, program.from_literals), spread(program, pins, mesh=MESH)


@pytest.mark.parametrize("batch_axes", [OWN, OTHER])
def test_the_axes_of_all_that_is_split_like_a_sum_take_its_order(batch_axes):
    own, crossed = planned(batch_axes, batch_axes), planned(batch_axes[::-1], batch_axes)
    bills = [bill_of(*one, MESH, TPU) for one in (own, crossed)]
    assert [bool(bill.crossed) for bill in bills] == [False, True]
    assert bills[0].total_s < bills[1].total_s
    found = with_axes_in_order(crossed[0], Setup(MESH), crossed[1], TPU)
    assert found == own[1]


def test_an_order_that_costs_nothing_stays():
    made, assignment = planned(OWN)
    assert with_axes_in_order(made, Setup(MESH), assignment, TPU) is assignment


@pytest.mark.parametrize("where", ["pins", "partial_pins"])
def test_what_is_pinned_keeps_its_order(where):
    made, assignment = planned(OTHER)
    setup = replace(Setup(MESH), **{where: {made.graph.inputs[1]: (OTHER, ())}})
    assert with_axes_in_order(made, setup, assignment, TPU) is assignment


def test_machines_that_scatter_in_any_order_change_nothing():
    made, assignment = planned(OTHER)
    assert with_axes_in_order(made, Setup(MESH), assignment, PRESETS["h100"]) is assignment

"""What changes between two plans."""

from __future__ import annotations

import dataclasses

import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import OpSharding
from spmdctx.plan import Cost, OpTable
from spmdctx.plan.diff import Change
from spmdctx.plan.groups import by_cause, by_kind
from tests.plan import small_graph, small_plan
from tests.plan.show.test_page import read


def test_equal_plans_have_no_difference():
    diff = small_plan().diff(small_plan())
    assert not diff
    assert str(diff) == "The plans are equal."
    assert (diff.settings, diff.costs, diff.tensors, diff.communication, diff.num_ops) == ((), (), (), (), 0)


def test_only_plans_are_compared():
    with pytest.raises(TypeError, match=r"(?s)compared with another plan.*got: +None.*need: +a Plan"):
        small_plan().diff(None)


def test_settings_and_options_that_changed_are_named():
    diff = small_plan().diff(small_plan(mode="data_parallel", logical_mesh=LogicalMesh.of({"data": 4}), options=(("full_batch", True),)))
    assert diff.settings == (
        Change("mesh", "data 8", "data 4"),
        Change("mode", "auto_parallel", "data_parallel"),
        Change("device_num", "8", ""),
        Change("full_batch", "", "True"),
    )


def test_costs_come_with_their_relative_change():
    diff = small_plan().diff(small_plan(cost=Cost(3e-4, 2e-4, 5e-4, 5 * 2**20)))
    assert diff.costs == (Change("step", "400 µs", "500 µs  (+25.0 %)"), Change("communication", "100 µs", "200 µs  (+100.0 %)"))


def test_layers_that_changed_alike_are_one_row():
    plan = small_plan()
    whole = tuple(tensor._replace(sharding=((), ())) if "layers" in tensor.path else tensor for tensor in plan.inputs)
    assert plan.diff(small_plan(inputs=whole)).tensors == (Change("state/layers/*/w  \N{MULTIPLICATION SIGN}2", "[data, -]", "whole"),)


def test_tensors_that_only_one_plan_has_and_other_shapes_are_shown():
    plan = small_plan()
    other = small_plan(inputs=(plan.inputs[0], plan.inputs[2]._replace(shape=(128, 32))))
    assert plan.diff(other).tensors == (
        Change("batch", "float32[64, 32] [data, -]", "float32[128, 32] [data, -]"),
        Change("state/layers/1/w", "[data, -]", ""),
    )


def test_communication_is_compared_by_kind_and_axes():
    plan = small_plan()
    (row,) = plan.diff(small_plan(collectives=plan.collectives[2:])).communication
    assert (row.kind, row.axes, row.counts, row.payload_bytes) == ("all_gather", ("data",), (2, 0), (8192, 0))


def test_ops_split_otherwise_are_counted():
    graph, plan = small_graph(), small_plan()
    choices = (OpSharding(((), (), ())), *plan.assignment.ops[1:])
    table = OpTable(graph.ops, graph.origins, choices, graph.inputs, graph.outputs)
    diff = plan.diff(small_plan(op_table=table))
    assert diff.num_ops == 1
    assert "1 op is split otherwise." in str(diff)
    assert plan.diff(small_plan(fingerprint="0" * 64)).num_ops is None


def test_notes_that_came_and_went_are_listed():
    text = str(small_plan().diff(small_plan(notes=("new [x]",))))
    assert "- The batch is split over data by default." in text
    assert "+ new [x]" in text


def test_what_a_device_stores_is_compared_by_role():
    plan = small_plan()
    whole = tuple(tensor._replace(sharding=((), ())) if "layers" in tensor.path else tensor for tensor in plan.inputs)
    assert plan.diff(small_plan(inputs=whole)).costs == (Change("stored: parameter", "1.00 KiB", "8.00 KiB  (+700.0 %)"),)


def test_the_page_of_a_difference_is_well_formed_and_holds_every_part():
    plan = small_plan()
    whole = tuple(tensor._replace(sharding=((), ())) if "layers" in tensor.path else tensor for tensor in plan.inputs)
    changes = {"inputs": whole, "collectives": plan.collectives[2:], "notes": ("a <b>",), "mode": "data_parallel"}
    text = "".join(read(plan.diff(small_plan(**changes))._repr_html_()).words)
    for words in ("stored: parameter", "state/layers/*/w", "all_gather over data", "data_parallel", "+ a <b>"):
        assert words in text
    assert "The plans are equal." in plan.diff(plan)._repr_html_()


def test_what_changes_by_less_than_can_be_shown_is_not_told():
    plan = small_plan()
    diff = plan.diff(small_plan(cost=plan.cost._replace(total_s=plan.cost.total_s * 1.0004)))
    assert diff
    assert diff.costs == ()
    assert "in details only" in str(diff)
    assert "in details only" in diff._repr_html_()


def test_the_order_of_axes_makes_no_other_kind_of_collective():
    rows = small_plan().collectives
    before, after = (tuple(dataclasses.replace(row, axes=axes) for row in rows) for axes in (("data", "model"), ("model", "data")))
    assert small_plan(collectives=before).diff(small_plan(collectives=after)).communication == ()
    assert [group.count for group in by_kind((*before, *after))] == [4, 4]
    assert len(by_cause((*before, *after))) == len(by_cause(before))

"""The plan's rows and what counts as equal."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import pytest

from spmdctx.ir.graph import Op, Origin, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.plan import OpTable, Plan, PlannedTensor, Timing
from spmdctx.plan.data import PlannedGradient
from spmdctx.plan.rows import LazyRows
from tests.plan import DOT, small_graph, small_plan


def test_ops_read_as_rows():
    ops = small_plan().ops
    assert len(ops) == 6
    assert ops[0] == ("layers/0/w", "dot_general", "model.py:12 (step.<locals>.loss)", DOT, "i=data", 1, 131072)
    assert ops[2].sharding == "k=data"
    assert [op.primitive for op in ops[-2:]] == ["sub", "sub"]


def test_axes_of_one_factor_are_joined_and_whole_ops_have_no_text():
    graph = small_graph()
    choices = (OpSharding((("data", "model"), (), ("axis2",))), OpSharding(((), (), ())))
    table = OpTable(graph.ops[:2], graph.origins[:2], choices)
    assert [op.sharding for op in table] == ["i=data+model, k=axis2", ""]


class Unread(Sequence):
    """Origins that must not be read."""

    def __len__(self) -> int:
        return 12_000

    def __getitem__(self, index):
        raise AssertionError("an origin was read")


def test_making_a_table_of_a_large_graph_reads_no_origin():
    graph = small_graph()
    ops = tuple(Op(number, "sub", (0, 0), (0,), DOT, 1, 1) for number in range(12_000))
    large = type(graph)(graph.values, ops, (), (), (), Unread(), "f")
    table = OpTable.of(large, Assignment((OpSharding(((), (), ())),) * 12_000, (), "x"))
    assert len(table) == 12_000
    with pytest.raises(AssertionError, match="an origin was read"):
        table[3]


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="1 ops, 2 origins and 1 shardings"):
        OpTable(small_graph().ops[:1], (Origin("", ""),) * 2, (OpSharding(()),))


def test_mesh_reads_as_a_dictionary():
    assert small_plan().mesh == {"data": 8}


def test_a_plan_is_one_line_in_a_console():
    assert repr(small_plan()) == "<spmdctx.Plan data 8 on h100: 400 µs, 5.00 MiB per device>"


def test_plans_are_equal_whatever_their_timing_and_hash_alike():
    slow = small_plan(timing=Timing(9.0, 9.0))
    assert slow == small_plan()
    assert hash(slow) == hash(small_plan())


@pytest.mark.parametrize("change", [{"mode": "data_parallel"}, {"notes": ()}, {"logical_mesh": LogicalMesh.of({"data": 4})}, {"gap": 0.5}])
def test_plans_that_differ_in_anything_else_are_not_equal(change):
    assert small_plan(**change) != small_plan()


def test_plans_with_ops_split_otherwise_are_not_equal():
    graph, plan = small_graph(), small_plan()
    choices = (OpSharding(((), (), ())), *plan.assignment.ops[1:])
    assert small_plan(op_table=OpTable(graph.ops, graph.origins, choices, graph.inputs, graph.outputs)) != plan


def test_a_copy_of_a_plan_is_an_equal_plan_that_nobody_changes(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    for copy in (replace(plan), pickle.loads(pickle.dumps(plan)), Plan.load(tmp_path / "plan.json")):
        assert type(copy) is Plan
        assert copy == plan
        with pytest.raises(FrozenInstanceError):
            copy.mode = "data_parallel"
        with pytest.raises(FrozenInstanceError):
            copy.comment = "a field that plans do not have"


def test_option_values_become_plain():
    class Special:
        def __str__(self) -> str:
            return "special"

    plan = small_plan(options=(("a", [1, (2, [3])]), ("b", {"x": [1]}), ("c", Special())))
    assert plan.options == (("a", (1, (2, (3,)))), ("b", {"x": (1,)}), ("c", "special"))


def test_bytes_of_a_block_are_rounded_up_as_xla_pads():
    tensor = PlannedTensor("w", Role.PARAMETER, (12, 3), "bfloat16", (("data",), ()))
    assert tensor.num_bytes == 72
    assert tensor.local_bytes(LogicalMesh.of({"data": 8})) == 2 * 3 * 2


def test_gradients_without_buckets_are_found_once_and_only_when_asked_for(tmp_path):
    calls = []

    def find():
        calls.append(1)
        return [PlannedGradient("w"), PlannedGradient("b")]

    plan = replace(small_plan(), gradients=LazyRows(find))
    assert not calls
    assert [one.path for one in plan.gradients] == ["w", "b"]
    assert plan.gradients[1] == PlannedGradient("b", None)
    assert plan.gradients[:1] == (PlannedGradient("w"),)
    assert plan == replace(plan, gradients=(PlannedGradient("w"), PlannedGradient("b")))
    assert plan != replace(plan, gradients=())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert len(calls) == 1

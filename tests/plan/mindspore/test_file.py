"""MindSpore's strategy files: tensor maps from the right, the optimizer's slices, names, and what the format cannot hold."""

from __future__ import annotations

import dataclasses
import json

import pytest

from spmdctx.errors import PlanFormatError, PlanMismatchError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.plan import OpTable, Plan
from spmdctx.plan.file import read_strategy
from spmdctx.plan.mindspore.file import MindSporeStrategy, mindspore_body, parse_mindspore, write_mindspore
from spmdctx.plan.mindspore.pins import Parameter, file_pins
from tests.plan import small_graph, small_plan

WEIGHT = Parameter("params/layers/0/w", Role.PARAMETER, (64, 128))
MOMENT = Parameter("opt/layers/0/w", Role.OPTIMIZER, (64, 128))


def layout(matrix, tensor_map, shape=(64, 128), step=0, size=0):
    return {
        "dev_matrix": matrix,
        "tensor_map": tensor_map,
        "tensor_shape": list(shape),
        "field": 0,
        "opt_weight_shard_step": step,
        "opt_weight_shard_size": size,
    }


def read(layouts=None, strategies=None) -> MindSporeStrategy:
    return parse_mindspore({"parallel_layout_item": layouts or {}, "parallel_strategy_item": strategies or {}}, "s.json")


def pins(layouts=None, strategies=None, parameters=(WEIGHT, MOMENT), num_devices=8, mesh=None):
    return file_pins(read(layouts, strategies), parameters, num_devices, mesh, "s.json")


def plan_with(mesh: LogicalMesh, stored, needs=None) -> Plan:
    """The small plan with its first parameter stored as `stored` and read as `needs`."""
    graph = small_graph()
    stored_of = [((), ())] * len(graph.values)
    stored_of[0] = stored_of[7] = stored
    choices = [OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops]
    needs = needs or stored
    choices[0] = OpSharding(((), needs[0], needs[1]))
    assignment = Assignment(tuple(choices), tuple(stored_of), "hand")
    plan = small_plan(logical_mesh=mesh, assignment=assignment, op_table=OpTable.of(graph, assignment))
    whole = [tensor._replace(sharding=((), ())) for tensor in plan.inputs[1:]]
    return dataclasses.replace(plan, inputs=(plan.inputs[0]._replace(sharding=stored), *whole))


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "mesh", "sharding"),
    [
        ([2, 4], [-1, 0], (2, 4), ((), ("model",))),
        ([2, 4], [1, 0], (2, 4), (("data",), ("model",))),
        ([8], [-1, -1], (8,), ((), ())),
        ([2, 2, 2], [1, 0], (2, 2, 2), (("model",), ("axis2",))),
        ([2, 1, 4], [0, -1], (2, 4), (("model",), ())),
        ([2, 2, 2], [[2, 0], 1], (2, 2, 2), (("data", "axis2"), ("model",))),
    ],
)
def test_tensor_maps_count_from_the_right(matrix, tensor_map, mesh, sharding):
    found = pins({"params.layers.0.w": layout(matrix, tensor_map)})
    assert found.mesh.shape == mesh
    assert dict(found.shardings) == {WEIGHT.path: sharding}


@pytest.mark.parametrize(
    ("step", "size", "sharding"),
    [(4, 2, (("data",), ("model",))), (8, 2, None), (2, 4, None)],
    ids=["over the other axis", "beyond the devices", "over an axis in use"],
)
def test_slices_of_the_optimizer_split_dimension_0_further(step, size, sharding):
    entry = {"params.layers.0.w": layout([2, 4], [-1, 0], step=step, size=size)}
    if sharding is None:
        with pytest.raises(PlanMismatchError, match="The optimizer's sharding of a parameter"):
            pins(entry)
    else:
        assert dict(pins(entry).shardings) == {WEIGHT.path: sharding}


def test_the_optimizer_may_use_a_part_of_an_axis():
    found = pins({"params.layers.0.w": layout([8], [-1, -1], step=2, size=2)})
    assert found.mesh.shape == (2, 2, 2)
    assert dict(found.shardings) == {WEIGHT.path: (("model",), ())}


def test_different_device_matrices_share_one_mesh():
    other = Parameter("params/b", Role.PARAMETER, (16,))
    found = pins({"layers.0.w": layout([2, 4], [-1, 0]), "b": layout([4, 2], [1], (16,))}, parameters=(WEIGHT, other))
    assert found.mesh.shape == (2, 2, 2)
    assert dict(found.shardings) == {WEIGHT.path: ((), ("model", "axis2")), other.path: (("data", "model"),)}


def test_a_mesh_of_the_user_gives_the_names():
    found = pins({"layers.0.w": layout([2, 4], [1, 0])}, mesh=LogicalMesh.of({"dp": 2, "mp": 4}))
    assert dict(found.shardings) == {WEIGHT.path: (("dp",), ("mp",))}


def test_a_strategy_of_an_op_pins_the_parameter_that_has_no_layout():
    found = pins(strategies={"MatMul_layers.0.w": {"stage": 0, "parallel_strategy": [[2, 2], [2, 2]]}})
    assert found.mesh.num_devices == 8
    assert [found.mesh.num_slices(dim) for dim in found.shardings[WEIGHT.path]] == [2, 2]


def test_parameters_come_before_optimizer_state_of_the_same_name():
    assert list(pins({"w": layout([8], [0, -1])}).shardings) == [WEIGHT.path]


def test_unknown_names_are_told_with_the_nearest_ones():
    found = pins({"layers.0.w": layout([8], [0, -1]), "params.layers.0.ww": layout([8], [0, -1])})
    assert found.notes == (
        "Strategy file: 'params.layers.0.ww' is no parameter of the step (nearest: 'params.layers.0.w', 'opt.layers.0.w'): ignored.",
    )


def test_a_name_that_several_parameters_end_in_is_told():
    second = Parameter("params/layers/1/w", Role.PARAMETER, (64, 128))
    found = pins({"w": layout([8], [0, -1]), "layers.1.w": layout([8], [0, -1])}, parameters=(WEIGHT, second))
    assert found.notes == ("Strategy file: 'w' may be 'params/layers/0/w' or 'params/layers/1/w': ignored.",)


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"layers.0.kernel": layout([8], [0, -1])}, "names no parameter of the step"),
        ({"layers.0.w": layout([8], [0, -1], (64, 64))}, r"tensor_shape \[64, 64\] in the file, \[64, 128\] here"),
        ({"layers.0.w": layout([4], [0, -1])}, r"dev_matrix \[4\] is for 4 devices, the step has 8"),
        ({"layers.0.w": layout([2, 4], [0, -1], step=4, size=2)}, None),
    ],
)
def test_a_file_for_another_step_is_refused(layouts, said):
    if said is None:
        assert pins(layouts).shardings[WEIGHT.path] == (("model", "data"), ())
        return
    with pytest.raises(PlanMismatchError, match=said):
        pins(layouts)


def test_a_dimension_that_does_not_divide_is_refused():
    odd = Parameter("w", Role.PARAMETER, (6, 128))
    with pytest.raises(PlanMismatchError, match="dimension 0 of size 6 does not divide into 4 slices"):
        pins({"w": layout([2, 4], [0, -1], (6, 128))}, parameters=(odd,))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (layout([2, 4], [-1, 2]), "names axes that dev_matrix"),
        (layout([2, 4], [0, 0]), "uses an axis twice"),
        (layout([2, 4], [0]), "tensor_map has 1 entries"),
        (layout([2, 0], [0, -1]), "0 is no size"),
        ({"dev_matrix": [8]}, "KeyError: 'tensor_shape'"),
        (3, "TypeError"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(entry, said):
    with pytest.raises(PlanFormatError, match=f"(?s)Entry 'w' of parallel_layout_item cannot be read.*{said}"):
        read({"w": entry})


STORED = [
    (LogicalMesh.of({"a": 2, "b": 4}), ((), ("b",)), None, ([2, 4], [-1, 0], 0, 0)),
    (LogicalMesh.of({"a": 2, "b": 4}), (("a", "b"), ()), None, ([8], [0, -1], 0, 0)),
    (LogicalMesh.of({"a": 2, "b": 4}), (("a",), ("b",)), ((), ("b",)), ([2, 4], [-1, 0], 4, 2)),
    (LogicalMesh.of({"a": 2, "b": 4}), (("b", "a"), ()), None, ([2, 4], [0, -1], 4, 2)),
    (LogicalMesh.of({"a": 2, "one": 1, "b": 4}), (("b",), ()), None, ([2, 4], [0, -1], 0, 0)),
    (LogicalMesh.of({"a": 8}), ((), ()), None, ([8], [-1, -1], 0, 0)),
]


@pytest.mark.parametrize(("mesh", "stored", "needs", "entry"), STORED)
def test_a_layout_is_written_as_mindspore_means_it_and_read_back_as_it_was(mesh, stored, needs, entry):
    body = mindspore_body(plan_with(mesh, stored, needs))
    written = body["parallel_layout_item"]["state.layers.0.w"]
    assert written == layout(entry[0], entry[1], (32, 32), *entry[2:])
    parameters = [Parameter(leaf.path, leaf.role, leaf.shape) for leaf in small_plan().inputs]
    found = file_pins(parse_mindspore(body, "s.json"), parameters, 8, mesh, "s.json")
    assert found.shardings["state/layers/0/w"] == stored
    assert found.notes == ()


def test_ops_are_written_with_the_slices_of_their_operands():
    body = mindspore_body(plan_with(LogicalMesh.of({"a": 2, "b": 4}), ((), ("b",))))
    assert body["parallel_strategy_item"]["MatMul_state.layers.0.w"] == {"stage": 0, "parallel_strategy": [[1, 1], [1, 4]]}
    assert list(body["parallel_layout_item"]) == ["state.layers.0.w", "state.layers.1.w"]


def test_what_the_old_format_cannot_hold_is_named_and_the_new_one_holds_it(tmp_path):
    plan = plan_with(LogicalMesh.of({"a": 2, "b": 2, "c": 2}), ((), ("c", "a")))
    with pytest.raises(UnsupportedError, match=r"'state/layers/0/w' \[-, c\+a\]"):
        plan.save_mindspore(tmp_path / "s.json")
    plan.save_mindspore(tmp_path / "s.json", several_axes=True)
    entry = json.loads((tmp_path / "s.json").read_text())["parallel_layout_item"]["state.layers.0.w"]
    assert entry["tensor_map"] == [-1, [0, 2]]
    strategy = read_strategy(tmp_path / "s.json", Plan)
    assert strategy.layouts["state.layers.0.w"].tensor_map == ((), (0, 2))


def test_the_suffix_must_say_json(tmp_path):
    with pytest.raises(UnsupportedError, match=r"end the name in \.json"):
        write_mindspore(small_plan(), tmp_path / "s.ckpt")


def test_what_a_file_holds_decides_how_it_is_read(tmp_path):
    small_plan().save(tmp_path / "plan.json")
    small_plan().save_mindspore(tmp_path / "new" / "strategy.json")
    assert read_strategy(tmp_path / "plan.json", Plan) == small_plan()
    assert isinstance(read_strategy(tmp_path / "new" / "strategy.json", Plan), MindSporeStrategy)
    with pytest.raises(PlanFormatError, match="which holds layouts and no plan"):
        Plan.load(tmp_path / "new" / "strategy.json")


@pytest.mark.parametrize(
    "entry",
    [
        layout([2.0, 4], [-1, 0]),
        layout([True, 8], [-1, 0]),
        layout([2**40, 2**40], [-1, 0]),
        layout([2] * 40, [-1, 0]),
        layout([2, 4], [-1, 0.0]),
        layout([2, 4], [-1, True]),
        layout([2, 4], "10"),
        layout("24", [-1, 0]),
        {**layout([2, 4], [-1, 0]), "opt_weight_shard_size": 2.5},
        {**layout([2, 4], [-1, 0]), "opt_weight_shard_step": "4"},
        {**layout([2, 4], [-1, 0]), "tensor_shape": [64, 10**30]},
    ],
    ids=str,
)
def test_an_entry_of_wrong_numbers_is_refused(entry):
    with pytest.raises(PlanFormatError, match="Entry 'w' of parallel_layout_item cannot be read"):
        parse_mindspore({"parallel_layout_item": {"w": entry}}, "s.json")


@pytest.mark.parametrize("entries", [[], 0, "", False])
def test_a_section_that_holds_no_entries_by_name_is_refused(entries):
    with pytest.raises(PlanFormatError, match="must hold entries by name"):
        parse_mindspore({"parallel_layout_item": entries}, "s.json")

"""A plan for another program, mesh, machine or context is refused, and the first differences are named."""

from __future__ import annotations

import dataclasses

import pytest

from spmdctx.errors import PlanMismatchError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.mismatch import Wanted, check_plan, program_differences
from tests.plan import OPS, VALUES, small_graph, small_plan

WANTED = Wanted(8, None, "h100", "auto_parallel", (("device_num", 8),))


def other_graph(**changes):
    return dataclasses.replace(small_graph(), fingerprint="e" * 64, **changes)


def with_value(index, **changes):
    return tuple(value._replace(**changes) if value.id == index else value for value in VALUES)


def with_op(index, **changes):
    return tuple(op._replace(**changes) if op.id == index else op for op in OPS)


def refusal(plan=None, wanted=WANTED, graph=None):
    with pytest.raises(PlanMismatchError) as caught:
        check_plan(plan or small_plan(), wanted, graph or small_graph(), "plan.json")
    return str(caught.value)


def test_the_same_program_in_the_same_place_is_accepted():
    check_plan(small_plan(), WANTED, small_graph(), "plan.json")
    check_plan(small_plan(), dataclasses.replace(WANTED, mesh=LogicalMesh.of({"data": 8}), memory_bytes=2**30), None, "plan.json")


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (other_graph(values=with_value(2, shape=(128, 32))), "input 'batch': f32[64, 32] in the file, f32[128, 32] here"),
        (other_graph(values=with_value(1, dtype="bfloat16")), "input 'state/layers/1/w': f32[32, 32] in the file, bf16[32, 32] here"),
        (
            other_graph(values=with_value(1, path="state/layers/1/kernel")),
            "input 'state/layers/1/w' f32[32, 32] is in the file, but not here (nearest: 'state/layers/1/kernel'",
        ),
        (other_graph(ops=with_op(1, primitive="tanh")), "op 2: dot_general (model.py:12 (loss)) in the file, tanh (model.py:12"),
        (other_graph(ops=with_op(0, rule=OPS[2].rule)), "op 1: dot_general ([i, j], [j, k])->([i, k])"),
        (other_graph(ops=with_op(4, repeats=3)), "op 5: sub 1 times (model.py:30 (step)) in the file, sub 3 times"),
        (other_graph(ops=with_op(1, operands=(2, 1))), "op 2: dot_general of value 3, state/layers/1/w"),
        (other_graph(ops=OPS[:4], origins=small_graph().origins[:4]), "op 5: sub (model.py:30 (step)) is only in the file, 2 ops more"),
        (other_graph(), "fingerprint: ffffffffffff in the file, eeeeeeeeeeee here; all inputs and ops have equal shapes"),
    ],
    ids=["shape", "dtype", "path", "primitive", "rule", "repeats", "operands", "fewer ops", "parameters"],
)
def test_what_differs_in_the_program_is_named(graph, said):
    text = refusal(graph=graph)
    assert "The plan was made for another program." in text
    assert said in text
    assert "where: plan.json" in text


def test_a_change_of_an_input_role_is_named():
    graph = other_graph(values=with_value(2, role=VALUES[0].role))
    assert list(program_differences(small_plan(), graph)) == ["input 'batch': batch in the file, parameter here"]


def test_many_differences_are_counted():
    values = tuple(value._replace(path=f"{value.path}/x") for value in VALUES)
    rows = list(program_differences(small_plan(), other_graph(values=values)))
    assert rows[-1] == "and 3 more"
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("changes", "title", "said"),
    [
        ({"num_devices": 16}, "mesh", "mesh: data 8 in the file, 16 devices here"),
        ({"mesh": LogicalMesh.of({"data": 4, "model": 2})}, "mesh", "mesh axis 'data': 8 in the file, 4 here"),
        ({"mesh": LogicalMesh.of({"x": 8})}, "mesh", "mesh axis 'data': 8 in the file, none of that name here (the mesh is x 8)"),
        ({"topology": "a100"}, "topology", "topology: h100 in the file, a100 here"),
        ({"mode": "semi_auto_parallel"}, "context", "parallel_mode: 'auto_parallel' in the file, 'semi_auto_parallel' here"),
        ({"options": (("full_batch", True),)}, "context", "full_batch: its default in the file, True here"),
        ({"memory_bytes": 2**20}, "memory budget", "memory per device: the plan needs 7.25 MiB, memory_bytes is 1.00 MiB"),
    ],
)
def test_what_differs_around_the_program_is_named(changes, title, said):
    text = refusal(wanted=dataclasses.replace(WANTED, **changes))
    assert f"The plan was made for another {title}." in text
    assert said in text


def test_the_order_of_the_axes_is_part_of_the_mesh():
    plan = small_plan(logical_mesh=LogicalMesh.of({"data": 4, "model": 2}))
    text = refusal(plan, dataclasses.replace(WANTED, mesh=LogicalMesh.of({"model": 2, "data": 4})))
    assert "mesh: data 4 x model 2 in the file, model 2 x data 4 here" in text.replace("\N{MULTIPLICATION SIGN}", "x")


def test_options_of_the_search_do_not_matter_to_a_plan_that_is_found():
    options = (("search_mode", "recursive_programming"), ("mem_coeff", 0.5), ("device_num", 8))
    check_plan(small_plan(), dataclasses.replace(WANTED, options=options), small_graph(), "plan.json")

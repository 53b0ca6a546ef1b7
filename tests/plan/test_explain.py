"""Why things are split as they are."""

from __future__ import annotations

import pytest

from spmdctx.cost.reshard import reshard_time_s
from spmdctx.cost.topology import topology
from spmdctx.plan import Plan
from tests.plan import PATHS, small_plan


def test_a_tensor_is_explained_by_its_readers_and_its_writer():
    (one,) = small_plan().explain("layers/1/w").tensors
    assert one.paths == (PATHS[1],)
    assert [(use.primitive, use.needs, use.writes) for use in one.uses] == [
        ("dot_general", ((), ()), False),
        ("sub", (("data",), ()), False),
        ("sub", (("data",), ()), True),
    ]
    assert [row.value for row in one.reshards] == [PATHS[1]]


@pytest.mark.parametrize("pattern", ["layers", "state/*/w", "*/layers/?/w", "layers/*/w"])
def test_equal_layers_are_explained_together(pattern):
    (one,) = small_plan().explain(pattern).tensors
    assert one.pattern == "state/layers/*/w"
    assert one.paths == PATHS[:2]


def test_storing_the_tensor_whole_costs_the_gather_after_the_update_instead_of_the_one_before_the_dot():
    plan = small_plan()
    (one,) = plan.explain("layers/1/w").tensors
    whole = next(row for row in one.alternatives if not any(row.sharding))
    gather_s = reshard_time_s((32, 32), 4, (("data",), ()), ((), ()), plan.logical_mesh, topology("h100"))
    # Chosen: gathered for the dot. Whole: no gather for the dot, a free slice for the update, and one gather of its result.
    assert whole.extra_s == pytest.approx(gather_s - gather_s)
    assert whole.extra_bytes == 4096 * 7 // 8


def test_alternatives_come_cheapest_first_and_do_not_hold_the_chosen_one():
    (one,) = small_plan().explain("layers/1/w").tensors
    assert [row.extra_s for row in one.alternatives] == sorted(row.extra_s for row in one.alternatives)
    assert one.tensor.sharding not in [row.sharding for row in one.alternatives]


def test_an_unknown_machine_gives_no_alternatives():
    (one,) = small_plan(topology="mine").explain("batch").tensors
    assert one.alternatives == ()


@pytest.mark.parametrize("pattern", ["update", "model.py:30"])
def test_ops_are_found_by_name_or_line_where_no_tensor_matches(pattern):
    found = small_plan().explain(pattern)
    assert found.tensors == ()
    assert [op.primitive for op in found.ops] == ["sub", "sub"]
    assert "split     i=data" in str(found)


def test_collectives_at_the_same_places_are_told():
    found = small_plan().explain("layers/0/w")
    assert {row.kind for row in found.collectives} == {"all_gather", "reduce_scatter"}
    assert "\N{MULTIPLICATION SIGN} reduce_scatter over data" in str(found)


def test_the_text_says_chosen_because_and_instead():
    text = str(small_plan().explain("layers/1/w"))
    assert "chosen    [data, -] for f32[32, 32], 512 B of 4.00 KiB per device" in text
    assert "because   sharding_propagation found it" in text
    assert "moves     [data, -] to whole for dot_general (model.py:12 (loss))" in text
    assert "instead" in text


def test_a_reason_given_by_the_planner_is_passed_on():
    plan = small_plan()
    pinned = (plan.inputs[0]._replace(reason="pinned by shard()"), *plan.inputs[1:])
    assert "because   pinned by shard()" in str(small_plan(inputs=pinned).explain("layers/0"))


def test_nothing_found_is_false_and_says_what_patterns_look_like():
    found = small_plan().explain("nowhere")
    assert not found
    assert "Nothing in the plan matches 'nowhere'" in str(found)
    assert PATHS[0] in str(found)


def test_a_loaded_plan_explains_itself_alike(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert str(Plan.load(tmp_path / "plan.json").explain("layers")) == str(plan.explain("layers"))

"""Why things are split as they are."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.plan import OpTable, Plan
from spmdctx.plan.alternatives import Flip
from spmdctx.plan.explain import MAX_PRICED, explain_plan
from tests.plan import PATHS, small_plan
from tests.plan.fake_alternatives import WHOLE, FakeAlternatives


def searched_plan(**changes):
    return small_plan(search_mode="dynamic_programming", **changes)


def test_a_pattern_is_text():
    with pytest.raises(TypeError, match=r"(?s)asked by a pattern.*got: +3.*need: +part of a path"):
        small_plan().explain(3)


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


def test_a_tensor_stored_whole_is_gathered_after_its_update_not_before_its_dot():
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


FLIPS = (
    Flip("link_bytes_per_s", True, 12.5e9, 45e9, 0.0),
    Flip("memory_bytes", True, 3.0 * 2**30, None, 1e-3),
    Flip("batch", False, 512.0, 64, -2e-3),
)


def test_a_plan_that_knows_its_program_prices_whole_steps():
    fake = FakeAlternatives(FLIPS)
    found = searched_plan(alternatives=fake).explain("layers/1/w")
    (one,) = found.tensors
    assert fake.asked == [("value", 1)]
    assert one.whole_step
    assert [(row.sharding, row.extra_s, row.num_moved) for row in one.alternatives] == [(WHOLE, 1e-3, 3), (((), ("data",)), 2e-3, 0)]
    text = str(found)
    assert "runner-up whole: 1.00 ms slower, 4.00 KiB more per device; 3 other tensors move along" in text
    assert "it wins   with links below 12.5 GB/s (now 45 GB/s)" in text
    assert "with memory_bytes below 3.00 GiB (now no budget), where what is chosen no longer fits" in text
    assert "at a batch of 512 (now 64): 2.00 ms faster there" in text
    assert "with all else as planned" not in text


def test_where_nothing_is_searched_no_budget_lets_another_choice_win():
    text = str(small_plan(alternatives=FakeAlternatives(FLIPS), search_mode="", mode="data_parallel").explain("layers/1/w"))
    assert "faster    with links below 12.5 GB/s (now 45 GB/s)" in text
    assert "memory_bytes" not in text
    assert "it wins" not in text
    assert "data_parallel weighs no alternatives" in text
    nowhere = str(small_plan(alternatives=FakeAlternatives()).explain("layers/1/w"))
    assert "sharding_propagation weighs no alternatives" in nowhere
    assert "a batch 16 times as large or small\n" in nowhere


def test_the_first_that_something_flips_is_the_last_to_be_asked():
    (one,) = searched_plan(alternatives=FakeAlternatives(FLIPS)).explain("layers/1/w").tensors
    assert [len(row.flips) for row in one.alternatives] == [3, 0]


def test_what_is_faster_but_does_not_fit_says_which_budget_it_needs():
    class Tight(FakeAlternatives):
        def of_value(self, value):
            return [*super().of_value(value), self._row(WHOLE, None, -1e-3, 2**30, 0)]

        def flips(self, alternative):
            return (Flip("memory_bytes", False, 2.0 * 2**30, 2**30, -1e-3),) if alternative.delta_s < 0 else ()

    text = str(searched_plan(alternatives=Tight()).explain("layers/1/w"))
    assert "too large whole: 1.00 ms faster, 1.00 GiB more per device" in text
    assert "it wins   with memory_bytes above 2.00 GiB (now 1.00 GiB), where this fits" in text


def test_where_nothing_flips_the_choice_it_says_what_was_tried():
    assert "it wins   nowhere: not with links 64 times" in str(searched_plan(alternatives=FakeAlternatives()).explain("layers/1/w"))


@pytest.mark.parametrize("pattern", ["sub", "update", "model.py:30"])
def test_ops_have_runners_up_too(pattern):
    fake = FakeAlternatives()
    found = searched_plan(alternatives=fake).explain(pattern)
    assert fake.asked == [("op", 4)]
    (kind,) = found.op_kinds
    assert (kind.op.primitive, kind.num_runs) == ("sub", 2)
    assert "runner-up k=data, result whole: 1.00 ms slower, 4.00 KiB less per device each" in str(found)


def test_many_groups_are_told_with_first_order_prices_beyond_the_first_few():
    plan = searched_plan(alternatives=FakeAlternatives())
    inputs = tuple(plan.inputs[0]._replace(path=f"state/{name}") for name in "abcdefg")
    shapes = tuple(tensor._replace(shape=(32, 32 * (index + 1))) for index, tensor in enumerate(inputs))
    table = OpTable(plan.op_table.operations, plan.op_table.origins, plan.op_table.choices, (0,) * 7, plan.op_table.outputs)
    found = dataclasses.replace(plan, inputs=shapes, op_table=table).explain("state")
    assert [one.whole_step for one in found.tensors] == [True] * MAX_PRICED + [False] * (7 - MAX_PRICED)


def test_a_moment_is_not_the_writer_of_its_parameter():
    plan = small_plan()
    moment = plan.outputs[0]._replace(path="opt/mu/layers/1/w", role=Role.OPTIMIZER)
    outputs = (moment, plan.outputs[1])
    (one,) = dataclasses.replace(plan, outputs=outputs).explain("state/layers/1/w").tensors
    assert [use.primitive for use in one.uses if use.writes] == ["sub"]
    (other,) = dataclasses.replace(plan, outputs=(moment, plan.outputs[1]._replace(path="elsewhere"))).explain("state/layers/1/w").tensors
    assert [use for use in other.uses if use.writes] == []


class Given(FakeAlternatives):
    """Alternatives of a tensor that the test names: sharding and seconds more."""

    def __init__(self, *rows, flips=()):
        super().__init__(flips)
        self.rows = [self._row(sharding, None, delta_s, 0, 1) for sharding, delta_s in rows]
        self.flipped = []

    def of_value(self, value):
        return self.rows

    of_op = of_value

    def flips(self, alternative):
        self.flipped.append(alternative.sharding)
        return super().flips(alternative)


COLUMNS = ((), ("data",))


def test_what_a_plan_that_is_not_optimal_missed_is_called_better():
    text = str(searched_plan(alternatives=Given((WHOLE, -1e-3), (COLUMNS, 1e-3))).explain("layers/1/w"))
    assert "  better    whole: 1.00 ms faster, as much memory per device; 1 other tensor moves along" in text
    assert "  runner-up [-, data]: 1.00 ms slower" in text


@pytest.mark.parametrize("delta_s", [1.4e-20, -1.4e-20, 3e-10, -3e-10])
def test_differences_of_rounding_are_as_fast(delta_s):
    fake = Given((WHOLE, delta_s), flips=FLIPS)
    text = str(searched_plan(alternatives=fake).explain("layers/1/w"))
    assert "runner-up whole: as fast, as much memory per device" in text


def test_what_only_permutes_axes_is_told_and_not_asked_about():
    mesh = LogicalMesh.of({"data": 4, "model": 4})
    fake = Given((COLUMNS, 1e-3), ((("model",), ()), 1e-3), (WHOLE, 2e-3))
    text = str(searched_plan(alternatives=fake, logical_mesh=mesh).explain("layers/1/w"))
    assert fake.flipped == [COLUMNS, WHOLE]
    assert "[model, -], the axes in other places: 1.00 ms slower" in text
    assert "runner-up [-, data]: 1.00 ms slower" in text


@pytest.mark.parametrize(("delta_s", "is_outside"), [(-1e-4, True), (1e-4, False)])
def test_what_is_below_the_lower_bound_was_not_to_be_searched(delta_s, is_outside):
    plan = searched_plan(alternatives=Given((WHOLE, delta_s)), lower_bound_s=4e-4, gap=0.0)
    assert ("not in the space that was searched" in str(plan.explain("layers/1/w"))) is is_outside


def test_a_file_does_not_contradict_a_proven_optimum():
    inputs = tuple(tensor._replace(sharding=COLUMNS) if tensor.path == PATHS[1] else tensor for tensor in small_plan().inputs)

    def alternatives(**certificate):
        return small_plan(inputs=inputs, **certificate).explain(PATHS[1]).tensors[0].alternatives

    free = alternatives()
    assert any(row.extra_s < 0 for row in free)
    assert alternatives(lower_bound_s=small_plan().cost.total_s, gap=0.0) == tuple(row for row in free if row.extra_s >= 0)
    assert alternatives(lower_bound_s=1e-9, gap=4e5) == free


def test_first_order_prices_say_what_they_leave_out():
    text = str(small_plan().explain("layers/1/w"))
    assert "(each by itself, with all else as planned: what moves along is not counted)" in text


def test_ops_without_a_runner_up_say_why():
    pattern = "model.py"
    none = searched_plan(alternatives=Given()).explain(pattern)
    assert {kind.missing for kind in none.op_kinds} == {"none: no other split is free and divides"}
    assert "runner-up not known: the plan does not hold the step" in str(small_plan().explain(pattern))
    one = small_plan(logical_mesh=LogicalMesh.of({"data": 1})).explain(pattern)
    assert {kind.missing for kind in one.op_kinds} == {"there is one device"}
    assert "runner-up none: no other sharding is free" in str(searched_plan(alternatives=Given()).explain("batch"))


def test_only_the_heaviest_kinds_of_op_have_runners_up_and_the_others_say_so(monkeypatch):
    monkeypatch.setattr(sys.modules[explain_plan.__module__], "MAX_PRICED", 1)
    kinds = searched_plan(alternatives=FakeAlternatives()).explain("model.py").op_kinds
    assert sum(bool(kind.alternatives) for kind in kinds) == 1
    assert all(bool(kind.missing) != bool(kind.alternatives) for kind in kinds)
    assert any("ask for fewer" in kind.missing for kind in kinds)

"""Time against memory: which budgets are tried, what is on the front, and how it is shown."""

from __future__ import annotations

import dataclasses

import pytest

from spmdctx.errors import ContextError, InfeasibleError, StrategyError, UnsupportedError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.data import Cost
from tests.plan import small_plan
from tests.plan.show.test_page import read

MIB = 2**20


class Replanner:
    """A step that needs 64 MiB per device at its fastest, and at least 16 MiB, both divided by the devices."""

    def __init__(self):
        self.asked = []

    def __call__(self, *, memory_bytes, num_devices):
        self.asked.append((num_devices, memory_bytes))
        needed = 64 * MIB // num_devices
        limit = needed if memory_bytes is None else min(memory_bytes, needed)
        if limit < 16 * MIB // num_devices:
            raise InfeasibleError(f"No plan needs less than {16 // num_devices} MiB.")
        total_s = (1 + needed / limit) / num_devices
        mesh = LogicalMesh.of({"data": num_devices})
        return small_plan(logical_mesh=mesh, topology="cpu", cost=Cost(total_s, 0.0, total_s, limit), memory_limit_bytes=memory_bytes)


@pytest.fixture
def replan():
    return Replanner()


def test_budgets_go_down_from_the_fastest_plan_to_where_nothing_fits(replan):
    found = small_plan(replan=replan).pareto(num_devices=(8,))
    assert replan.asked == [(8, None), (8, 6 * MIB), (8, 4 * MIB), (8, 3 * MIB), (8, 2 * MIB), (8, 1 * MIB)]
    assert [point.memory_bytes for point in found.points] == [8 * MIB, 6 * MIB, 4 * MIB, 3 * MIB, 2 * MIB]
    assert [(one.num_devices, one.memory_limit_bytes) for one in found.unmet] == [(8, MIB)]
    assert found.front == found.points


def test_half_and_twice_the_devices_are_tried_too(replan):
    small_plan(replan=replan).pareto(memory_bytes=(64 * MIB,))
    assert replan.asked == [(4, None), (4, 64 * MIB), (8, None), (8, 64 * MIB), (16, None), (16, 64 * MIB)]


def test_smaller_budgets_are_not_tried_once_one_is_not_met(replan):
    small_plan(replan=replan).pareto(memory_bytes=(MIB, 8 * MIB, MIB // 2), num_devices=(8,))
    assert replan.asked == [(8, None), (8, 8 * MIB), (8, MIB)]


def test_plans_that_need_and_take_the_same_count_once(replan):
    found = small_plan(replan=replan).pareto(memory_bytes=(8 * MIB, 80 * MIB, 4 * MIB), num_devices=(8,))
    assert [(point.memory_limit_bytes, point.also_limit_bytes) for point in found.points] == [(None, (80 * MIB, 8 * MIB)), (4 * MIB, ())]
    assert [plan.cost.memory_bytes for plan in found.plans] == [8 * MIB, 4 * MIB]
    assert "none, 80.0 MiB, 8.00 MiB" in str(found)


def test_a_point_that_another_beats_is_off_the_front():
    def replan(*, memory_bytes, num_devices):
        total_s = 1.0 if num_devices == 4 else 2.0
        return small_plan(logical_mesh=LogicalMesh.of({"data": num_devices}), cost=Cost(total_s, 0.0, total_s, 10))

    found = small_plan(replan=replan).pareto(memory_bytes=(100,), num_devices=(4, 8))
    assert [point.num_devices for point in found.points] == [4, 8]
    assert [point.num_devices for point in found.front] == [4]
    assert found.points[1].device_s == 16.0
    assert "beaten by another" in str(found)


def test_strategies_that_do_not_fit_a_device_count_are_told(replan):
    def refuse(*, memory_bytes, num_devices):
        if num_devices == 2:
            raise StrategyError("The batch splits into 4 blocks.")
        return replan(memory_bytes=memory_bytes, num_devices=num_devices)

    found = small_plan(replan=refuse).pareto(memory_bytes=(64 * MIB,), num_devices=(2, 4))
    assert [point.num_devices for point in found.points] == [4]
    assert "The batch splits into 4 blocks." in str(found)


def test_the_table_names_mesh_budget_memory_and_time(replan):
    text = str(small_plan(replan=replan).pareto(memory_bytes=(4 * MIB,), num_devices=(8,)))
    for words in ("data 8", "4.00 MiB", "375 ms", "device-seconds"):
        assert words in text


def test_the_page_is_well_formed_and_shows_every_point(replan):
    page = small_plan(replan=replan).pareto(num_devices=(4, 8))._repr_html_()
    checker = read(page)
    assert checker.seen.count("circle") == 10
    assert page.count("dot filled") == 10
    assert "No plan needs less than 2 MiB." in "".join(checker.words)


def test_a_page_of_nothing_but_unmet_budgets_is_well_formed():
    def refuse(*, memory_bytes, num_devices):
        raise InfeasibleError("Nothing fits.")

    found = small_plan(replan=refuse).pareto(num_devices=(8,))
    assert found.points == found.front == ()
    assert "Nothing fits." in "".join(read(found._repr_html_()).words)


def test_a_plan_from_a_file_says_that_it_cannot(tmp_path):
    small_plan().save(tmp_path / "plan.json")
    plan = type(small_plan()).load(tmp_path / "plan.json")
    with pytest.raises(UnsupportedError, match="plan the step again"):
        plan.pareto()
    with pytest.raises(UnsupportedError, match="plan the step again"):
        plan.certify()


def test_a_certificate_comes_from_the_certifier_once():
    certified = small_plan(lower_bound_s=1e-4, gap=3.0)
    assert small_plan(certifier=lambda: certified).certify() is certified
    assert certified.certify() is certified


def test_what_a_plan_can_be_asked_is_neither_compared_nor_saved(tmp_path, replan):
    asked = small_plan(replan=replan, certifier=small_plan, memory_profile=(1, 2))
    assert asked == small_plan()
    asked.save(tmp_path / "asked.json")
    small_plan().save(tmp_path / "plain.json")
    assert (tmp_path / "asked.json").read_bytes() == (tmp_path / "plain.json").read_bytes()
    assert dataclasses.replace(asked, notes=()).replan is replan


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "it does not hold the step"),
        ({"mode": "semi_auto_parallel"}, "nothing was searched"),
        ({"logical_mesh": LogicalMesh.of({"data": 1})}, "nothing was searched for it.*on 1 device$"),
    ],
)
def test_what_cannot_be_certified_says_why(changes, why):
    with pytest.raises(UnsupportedError, match=f"(?sm)This plan cannot be certified: {why}"):
        small_plan(**changes).certify()


def test_a_plan_without_a_certificate_names_what_computes_it():
    assert "optimum   no lower bound computed; plan.certify() computes one" in str(small_plan(certifier=small_plan))


def test_an_interrupt_keeps_what_was_found_and_a_note_says_what_was_not_planned(replan):
    def interrupted(*, memory_bytes, num_devices):
        if num_devices == 16 and memory_bytes is not None:
            raise KeyboardInterrupt
        return replan(memory_bytes=memory_bytes, num_devices=num_devices)

    found = small_plan(replan=interrupted).pareto(num_devices=(8, 16, 32))
    assert {point.num_devices for point in found.points} == {8, 16}
    (note,) = found.notes
    assert "16, 32 devices" in note
    assert note in str(found).replace("\n", " ")
    assert note in found._repr_html_()


def test_an_interrupt_before_the_first_plan_leaves_no_points():
    def interrupted(*, memory_bytes, num_devices):
        raise KeyboardInterrupt

    found = small_plan(replan=interrupted).pareto()
    assert not found.points
    assert found.notes


def test_progress_gets_each_point_and_each_budget_that_is_not_met(replan):
    told = []
    found = small_plan(replan=replan).pareto(num_devices=(8,), progress=told.append)
    assert told == [*found.points, *found.unmet]


def test_nothing_is_written_where_nobody_looks(replan, capsys):
    small_plan(replan=replan).pareto(num_devices=(8,))
    assert capsys.readouterr() == ("", "")


def test_a_faster_plan_under_a_smaller_budget_serves_the_larger_one_too():
    def replan(*, memory_bytes, num_devices):
        needed, total_s = {None: (100, 1.0), 80: (60, 3.0), 50: (40, 2.0)}[memory_bytes]
        return small_plan(logical_mesh=LogicalMesh.of({"data": num_devices}), cost=Cost(total_s, 0.0, total_s, needed))

    found = small_plan(replan=replan).pareto(memory_bytes=(80, 50), num_devices=(8,))
    assert [(point.memory_bytes, point.memory_limit_bytes, point.also_limit_bytes) for point in found.points] == [
        (100, None, ()),
        (40, 50, (80,)),
    ]
    assert len(found.plans) == 2


def test_a_plan_over_its_budget_does_not_meet_it(replan):
    def careless(*, memory_bytes, num_devices):
        return replan(memory_bytes=None, num_devices=num_devices)

    found = dataclasses.replace(small_plan(), replan=careless).pareto([16 * MIB], [1])
    assert [point.memory_limit_bytes for point in found.points] == [None]
    assert [(one.memory_limit_bytes, one.reason) for one in found.unmet] == [(16 * MIB, "The predicted peak is over the budget.")]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory_bytes": 100}, TypeError, "memory_bytes must be a list"),
        ({"num_devices": [0]}, ContextError, "num_devices must hold ints of at least 1"),
        ({"num_devices": [True]}, TypeError, "num_devices must hold ints"),
        ({"progress": 3}, TypeError, "progress must be a function"),
    ],
)
def test_what_pareto_cannot_use_is_refused(replan, options, error, words):
    with pytest.raises(error, match=words):
        dataclasses.replace(small_plan(), replan=replan).pareto(**options)
    assert not replan.asked

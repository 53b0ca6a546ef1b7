"""The schedules of a search within a budget: which attempt is made when."""

from types import SimpleNamespace

import pytest

from spmdctx.cost.memory.lives import Peak
from spmdctx.machine.presets import PRESETS
from spmdctx.search.dynamic import effort, run
from spmdctx.search.dynamic.effort import ANY, HASTY, PROVEN, QUICK, SOFT, THOROUGH, Standing
from spmdctx.search.dynamic.results import DynamicOptions

INFINITE = float("inf")
SHORT = effort.QUICK_PLAN.attempts[0].effort
NO_PLAN = Standing(INFINITE, is_begun=True)
"""An attempt found no plan, and proved nothing."""


def due(schedule, standing):
    """The efforts of the attempts that are made as things stand."""
    return [attempt.effort for attempt in (*schedule.attempts, *schedule.later) if attempt.when(standing)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (effort.ANY_PLAN, ANY),
        (effort.HASTY_PLAN, HASTY),
        (effort.PROVEN_PLAN, PROVEN),
        (effort.SOFT_PLAN, SOFT),
        (effort.THOROUGH_PLAN, HASTY._replace(mixes=True)),
        (effort.LARGE_PLAN, HASTY._replace(mixes=True)),
        (effort.QUICK_PLAN, SHORT),
        (effort.QUICK_PLAN_OR_NONE, SHORT),
        (effort.PART_PLAN_OR_NONE, SHORT),
    ],
)
def test_a_mesh_is_first_searched_by_the_first_effort_alone(schedule, expected):
    assert due(schedule, Standing(INFINITE)) == [expected]


@pytest.mark.parametrize(
    ("schedule", "tolerance"), [(effort.THOROUGH_PLAN, 0.0), (effort.LARGE_PLAN, 0.0), (effort.QUICK_PLAN, QUICK.tolerance)]
)
def test_where_another_mesh_has_a_plan_the_first_attempt_is_as_exact_as_the_last(schedule, tolerance):
    (first,) = due(schedule, Standing(2.0))
    assert first.tolerance == tolerance
    assert first.only_stored


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (effort.THOROUGH_PLAN, [THOROUGH]),
        (effort.LARGE_PLAN, [THOROUGH]),
        (effort.QUICK_PLAN, [QUICK]),
        (effort.QUICK_PLAN_OR_NONE, []),
        (effort.PART_PLAN_OR_NONE, []),
    ],
)
def test_only_a_large_program_is_given_up_after_a_short_attempt_without_a_plan(schedule, expected):
    assert due(schedule, NO_PLAN) == expected
    assert due(schedule, NO_PLAN._replace(is_settled=True)) == []


@pytest.mark.parametrize("schedule", [effort.THOROUGH_PLAN, effort.LARGE_PLAN, effort.QUICK_PLAN, effort.QUICK_PLAN_OR_NONE])
def test_a_plan_is_improved_if_no_mesh_has_one_near_enough_to_the_bound(schedule):
    found = Standing(INFINITE, cost_s=1.0, is_begun=True)
    near, far = 1 / (1 + schedule.enough), 0.9
    assert due(schedule, found._replace(lower_bound_s=far)) == [schedule.later[-1].effort]
    assert due(schedule, found._replace(lower_bound_s=near)) == []
    assert due(schedule, found._replace(lower_bound_s=far, known_s=far)) == []


@pytest.mark.parametrize(
    ("schedule", "last", "other", "last_of_other", "shorts"),
    [
        (effort.LARGE_PLAN, THOROUGH, effort.MIDDLE_PLAN, THOROUGH, (0.004, 0.006)),
        (effort.PART_PLAN, effort.PART, effort.QUICK_PLAN, QUICK, (0.015, 0.03)),
        (effort.PART_PLAN_OR_NONE, effort.PART, effort.QUICK_PLAN_OR_NONE, QUICK, (0.015, 0.03)),
    ],
)
def test_large_programs_and_parts_are_not_improved_by_their_last_percents(schedule, last, other, last_of_other, shorts):
    found = Standing(INFINITE, cost_s=1.0, is_begun=True)
    for short, is_worth_it in zip(shorts, (False, True), strict=True):
        standing = found._replace(lower_bound_s=1 - short)
        assert due(schedule, standing) == [last] * is_worth_it
        assert due(other, standing) == [last_of_other]


@pytest.mark.parametrize(("short", "is_worth_it"), [(0.004, False), (0.006, True)])
def test_no_mesh_without_a_plan_is_searched_again_if_it_can_hardly_beat_another(short, is_worth_it):
    beside = NO_PLAN._replace(known_s=1.0, lower_bound_s=1 - short)
    assert due(effort.LARGE_PLAN, beside) == [THOROUGH] * is_worth_it
    assert due(effort.THOROUGH_PLAN, beside) == [THOROUGH]


def test_any_plan_is_looked_for_where_no_limit_led_to_a_proven_one():
    assert due(effort.PROVEN_PLAN, NO_PLAN) == []
    assert due(effort.PROVEN_PLAN, NO_PLAN._replace(has_run_out=True)) == [ANY]


@pytest.mark.parametrize(
    ("num_ops", "options", "expected"),
    [
        (100, {}, effort.PROVEN_PLAN),
        (100, {"is_soft": True}, effort.SOFT_PLAN),
        (100, {"is_soft": True, "wants_any": True}, effort.ANY_PLAN),
        (101, {}, effort.MIDDLE_PLAN),
        (501, {}, effort.LARGE_PLAN),
        (4999, {}, effort.LARGE_PLAN),
        (5000, {}, effort.LARGEST_PLAN),
        (101, {"wants_any": True}, effort.SHORT_HASTY_PLAN),
        (4999, {"wants_any": True}, effort.SHORT_HASTY_PLAN),
        (5000, {"wants_any": True}, effort.HASTY_PLAN),
        (4999, {"is_soft": True}, effort.QUICK_PLAN),
        (5000, {"is_soft": True}, effort.QUICK_PLAN_OR_NONE),
        (4999, {"is_soft": True, "is_of_a_part": True}, effort.PART_PLAN),
        (5000, {"is_soft": True, "is_of_a_part": True}, effort.PART_PLAN_OR_NONE),
        (5000, {"is_of_a_part": True}, effort.LARGEST_PLAN),
        (101, {"small_program": 101}, effort.PROVEN_PLAN),
        (101, {"schedule": effort.ANY_PLAN}, effort.ANY_PLAN),
    ],
)
def test_a_budget_is_worth_what_the_size_of_the_program_and_its_origin_say(num_ops, options, expected):
    step = SimpleNamespace(graph=SimpleNamespace(ops=range(num_ops)))
    assert DynamicOptions(**options).schedule_of(step) is expected


def test_a_short_attempt_is_a_hasty_one_that_leaves_poor_plans_for_later():
    assert SHORT._replace(leaves=INFINITE, proof=INFINITE) == HASTY._replace(rounds=2, mixes=True)
    assert 0 < SHORT.leaves < INFINITE
    assert SHORT.proof < effort.QUICK.proof < INFINITE
    assert all(attempt.effort.leaves == INFINITE for attempt in effort.QUICK_PLAN.later)


def run_on(mesh, own, proof=INFINITE):
    """One attempt on a mesh within 1 GiB."""
    formulation = SimpleNamespace(step=SimpleNamespace(graph=None), limits=SimpleNamespace(tolerance=0.0), topology=PRESETS["tpu-v5p"])
    around = SimpleNamespace(
        formulation=formulation,
        options=SimpleNamespace(is_small=lambda step: False),
        schedule=effort.THOROUGH_PLAN._replace(proof=proof),
        memory_bytes=1 << 30,
        spread=0.0,
        left=lambda additions: additions,
    )
    return run.Run(around, SimpleNamespace(lower_bound_s=1.0, **mesh), own, INFINITE)


@pytest.mark.parametrize(("own", "of_all", "expected"), [(3e8, INFINITE, 3e8), (INFINITE, 4e8, 2e8), (3e8, 4e8, 2e8)])
def test_a_plan_is_proven_within_the_proof_of_its_effort_and_half_of_what_is_left(own, of_all, expected):
    attempt = run_on({}, THOROUGH._replace(proof=own), of_all)
    before = attempt.allowance.most
    attempt.lift()
    assert (before, attempt.allowance.most) == (THOROUGH.hopeless, expected)


@pytest.mark.parametrize(
    ("peak_gib", "own", "has_others", "cost_s", "goes_on"),
    [
        (1, SHORT, False, 2.0, True),
        (2, SHORT, False, 2.0, False),
        (1, SHORT, True, 2.0, False),
        (1, SHORT, True, 1 + SHORT.leaves / 2, True),
        (1, HASTY, True, 2.0, True),
    ],
)
def test_a_search_goes_on_if_its_best_choice_fits_and_no_mesh_comes_first(peak_gib, own, has_others, cost_s, goes_on, monkeypatch):
    attempt = run_on({"tables": SimpleNamespace(choices=[0])}, own)
    attempt._mesh.has_others, attempt._mesh.problem = has_others, SimpleNamespace(costs=[[9.0, cost_s]], edges=())
    peak = Peak(0, peak_gib << 30)
    monkeypatch.setattr(attempt, "_planned", lambda solution: (None, peak, ()))
    attempt.allowance.spent = own.hopeless
    assert attempt.allowance.is_spent()
    attempt.allowance.extend((1,))
    assert attempt.allowance.is_spent() != goes_on


def test_an_attempt_whose_proofs_are_limited_asks_for_no_more():
    assert run_on({}, HASTY._replace(limits_proofs=True)).allowance.extend is None

"""Programs that are alike are planned once, and what compares plans works less than what makes them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from spmdctx.errors import InfeasibleError
from spmdctx.ir.graph import Role
from spmdctx.pipeline.search.reduced import Chosen, reduced_once
from spmdctx.pipeline.stages.alike import AlikePlanner
from spmdctx.pipeline.stages.captured import Operand, Outcome, captured_program
from spmdctx.search.dynamic.effort import QUICK_PLAN, ROUGH_PLAN
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.step.planning.planner import plan_program
from tests.step.pipelined import small

NARROW, WIDE = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
LOW = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)


def program(fn=lambda x, w: jnp.tanh(x @ w), name="w", weight=WIDE, role=Role.PARAMETER):
    operands = [Operand("x", Role.BATCH), Operand(name, role)]
    return captured_program("task", jax.make_jaxpr(fn)(NARROW, weight), None, operands, [Outcome("y")])


def settings():
    shapes = jax.eval_shape(lambda: (*small.state_of(2, 16, tied=False), small.batch_of(8, 16)))
    return small.parallel(2, device_num=4)._entry_of(shapes, {}).environment.settings


def counted():
    seen = []

    def planner(captured, own, *, is_rough=False, **how):
        seen.append((captured.inputs[1].path, is_rough))
        return plan_program(captured, own, is_rough=is_rough, **how)

    return AlikePlanner(planner), seen


def test_programs_that_differ_in_names_alone_share_a_plan():
    planner, seen = counted()
    first, other = (planner(program(name=name), settings()) for name in ("a", "b"))
    assert seen == [("a", False)]
    assert [own.plan.inputs[1].path for own in (first, other)] == ["a", "b"]
    assert other.assignment is first.assignment
    # A plan is lowered for the program that it names, whose fingerprint counts names.
    assert other.plan.fingerprint == other.program.graph.fingerprint != first.plan.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        partial(program, lambda x, w: jnp.sin(x @ w)),
        partial(program, lambda x, w: jnp.tanh(x @ w.T)),
        partial(program, weight=LOW),
        partial(program, role=Role.OPTIMIZER),
        partial(program, lambda x, w: jnp.tanh(jnp.tanh(x @ w))),
    ],
    ids=["equation", "operand", "type", "role", "more"],
)
def test_programs_that_compute_or_take_something_else_do_not(other):
    planner, seen = counted()
    planner(program(), settings())
    planner(other(), settings())
    assert len(seen) == 2


def test_a_plan_that_is_within_a_room_is_not_made_again():
    planner, seen = counted()
    free = planner(program(), settings())
    taken = free.plan.safe_memory_bytes
    assert planner(program(name="a"), replace(settings(), memory_bytes=taken)).assignment is free.assignment
    assert len(seen) == 1
    with pytest.raises(InfeasibleError) as caught:
        planner(program(), replace(settings(), memory_bytes=1))
    assert len(seen) == 2
    with pytest.raises(InfeasibleError) as again:
        planner(program(name="b"), replace(settings(), memory_bytes=1))
    assert again.value is caught.value
    assert len(seen) == 2
    # No user gave that budget, so none is searched that is enough.
    assert "need:" not in str(caught.value)
    # What was planned for a room says nothing of larger ones, and of smaller ones if it is within them.
    planner, seen = counted()
    for room in (taken, None, taken):
        planner(program(), replace(settings(), memory_bytes=room))
    assert len(seen) == 2
    planner, seen = counted()
    for room in (taken + 2, taken, taken + 1):
        planner(program(), replace(settings(), memory_bytes=room))
    assert len(seen) == 1


def test_searches_within_several_rooms_share_what_no_room_changes(monkeypatch):
    made, budgets = [], Searcher.budgets
    monkeypatch.setattr(Searcher, "budgets", lambda self, request: made.append(request) or budgets(self, request))
    planner, seen = counted()
    own = settings()
    taken = planner(program(), own).plan.safe_memory_bytes
    for less in (1, 2):
        with pytest.raises(InfeasibleError):
            planner(program(), replace(own, memory_bytes=taken // 1000 - less))
    # Errors name numbers of devices, which are searched.
    assert (len(seen), sum(request.num_devices == own.num_devices for request in made)) == (3, 1)


def test_given_splits_are_kept_in_any_room():
    planner, seen = counted()
    first = planner(program(), settings())
    whole = replace(first.assignment, ops=tuple(replace(op, axes=((),) * len(op.axes)) for op in first.assignment.ops))
    rooms = [planner(program(), replace(settings(), mesh=first.mesh, memory_bytes=room), given=whole) for room in (None, 1)]
    assert [own.assignment.ops for own in rooms] == [whole.ops] * 2
    assert len(seen) == 2
    assert first.assignment.ops != whole.ops


def test_rough_plans_are_not_taken_for_others():
    planner, seen = counted()
    planner.roughly(program(), settings())
    planner(program(), settings())
    planner.roughly(program(), settings())
    planner(program(), settings())
    assert seen == [("w", True), ("w", False)]


def test_a_rough_search_makes_the_short_attempts_of_a_whole_one():
    class Step:
        graph = type("Graph", (), {"ops": range(1000)})

    soft = DynamicOptions(memory_bytes=1, is_soft=True)
    rough = DynamicOptions(memory_bytes=1, is_soft=True, is_rough=True)
    assert soft.schedule_of(Step) == QUICK_PLAN
    assert rough.schedule_of(Step) == ROUGH_PLAN
    assert (ROUGH_PLAN.attempts, ROUGH_PLAN.later) == (QUICK_PLAN.attempts, ())
    # The user's own budget is worth the whole work.
    assert DynamicOptions(memory_bytes=1, is_rough=True).schedule_of(Step) == DynamicOptions(memory_bytes=1).schedule_of(Step)


@pytest.mark.parametrize(
    ("rough_peak", "calls"), [(9, [(True, False), (False, True)]), (7, [(True, False), (False, True), (False, False)])]
)
def test_a_rough_plan_decides_whether_gradients_in_turns_are_planned(monkeypatch, rough_peak, calls):
    class Found:
        def __init__(self, peak):
            self.peak, self.reductions, self.notes, self.total_s = peak, {0: None}, [], 1.0

    seen = []

    def plan(may_wait, like):
        seen.append((may_wait, like is not None))
        return Chosen(None, None, Found(8 if may_wait else rough_peak))

    monkeypatch.setattr("spmdctx.pipeline.search.reduced._peak", lambda found: found.peak)
    monkeypatch.setattr("spmdctx.pipeline.search.reduced._may_fit", lambda found, room: True)

    def fit(own):
        raise InfeasibleError("too large")

    chosen = reduced_once(plan(True, None), plan, fit, 6, is_binding=False)
    assert seen == calls
    assert chosen.found.peak == min(8, rough_peak)

"""Schedules through the public step: those that the matrix leaves out, long runs, and what their plans say."""

import jax
import numpy as np
import pytest

import spmdctx
from spmdctx.errors import ContextError
from tests.pipeline.schedule.theory import in_flight_of
from tests.step.pipelined import models

pytestmark = pytest.mark.usefixtures("quick_compiler")


def stepped(kind, layers, **options):
    case = models.case("pytree", kind, layers)
    return case, spmdctx.parallel(case.step, parallel_mode="auto_parallel", grad_accumulation_step=4, pipeline_stages=2, **options)


@pytest.mark.parametrize(
    ("config", "segments", "name", "rounds", "steps"),
    [
        ({"pipeline_scheduler": "zero_bubble_h1"}, {}, "zero_bubble_h1", 1, 10),
        ({"pipeline_scheduler": "gpipe", "pipeline_interleave": True}, {}, "interleaved gpipe", 2, 2),
        ({"pipeline_interleave": True}, {"pipeline_segments": 3}, "interleaved 1f1b", 3, 2),
        ({"pipeline_interleave": True}, {"pipeline_segments": 1}, "1f1b", 1, 2),
    ],
)
def test_some_steps_have_one_device_s_numbers(config, segments, name, rounds, steps):
    with jax.enable_x64(True):
        case, step = stepped("tied", 6, pipeline_config=config, **segments)
        got = want = case.state
        alone = jax.jit(case.step)
        for _ in range(steps):
            (got, loss), (want, wanted) = step(got, case.batch), alone(want, case.batch)
        for one, other in zip(jax.tree.leaves((got[:2], loss)), jax.tree.leaves((want[:2], wanted)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9, rtol=1e-9)
        plan, counts = step.plan(got, case.batch), step._entry_of((got, case.batch), {}).program.jitted.counts
    assert plan.simulation.schedule.name == name
    assert tuple(counts.in_flight_of_stage[stage] for stage in range(2)) == in_flight_of(name, 2, 4, rounds)
    assert plan.simulation.in_flight == in_flight_of(name, 2, 4, rounds)


@pytest.mark.parametrize(("kind", "noted"), [("remat", "remat2"), ("scanned", "scan"), ("untied", None)])
def test_a_note_names_the_chunks_whose_backward_pass_stays_whole(kind, noted):
    case, step = stepped(kind, 4, pipeline_config={"pipeline_scheduler": "zero_bubble_v"})
    notes = [note for note in step.plan(case.state, case.batch).notes if "leaves these equations" in note]
    assert len(notes) == (noted is not None)
    assert noted is None or f"{noted} in chunk" in notes[0]
    case, step = stepped(kind, 4)
    assert not any("leaves these equations" in note for note in step.plan(case.state, case.batch).notes)


def test_micro_batches_that_fill_no_round_are_refused_with_the_remedy():
    case = models.case("pytree", "untied", 4)
    options = {"pipeline_stages": 2, "pipeline_config": {"pipeline_interleave": True}}
    batch = jax.tree.map(lambda leaf: leaf[:30], case.batch)
    step = spmdctx.parallel(case.step, parallel_mode="auto_parallel", grad_accumulation_step=3, **options)
    with pytest.raises(ContextError, match=r"(?s)groups of one for each stage.*pipeline_interleave=False"):
        step.plan(case.state, batch)


def test_the_order_of_a_v_follows_from_planned_seconds():
    case, step = stepped("untied", 4, pipeline_config={"pipeline_scheduler": "zero_bubble_v"})
    plan = step.plan(case.state, case.batch)
    spans, schedule = plan.simulation.spans, plan.simulation.schedule
    assert schedule.stage_of == (0, 1, 1, 0)
    for tasks in schedule.stages:
        ends = [spans[task].end for task in tasks]
        assert ends == sorted(ends)
    assert max(plan.simulation.in_flight) <= 4

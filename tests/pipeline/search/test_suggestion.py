"""Estimates of other schedules against their plans: what is suggested is faster."""

from dataclasses import replace

import jax
import pytest

from spmdctx.machine.presets import topology
from spmdctx.pipeline.search.plan import PipelinePlanner
from spmdctx.pipeline.search.schedules import PLAIN, shown
from spmdctx.pipeline.search.suggestion import estimates, suggested
from spmdctx.step.planning.planner import plan_program
from tests.step.pipelined import small

SLOW = replace(topology("h100"), devices_per_host=1, network_bytes_per_s=3e8)


@pytest.mark.parametrize(("machine", "width", "rows"), [(SLOW, 64, 64), (topology("tpu-v5p"), 1024, 4096), (topology("h100"), 1024, 4096)])
def test_what_is_suggested_is_faster_by_its_plan(machine, width, rows):
    shapes = jax.eval_shape(lambda: (*small.state_of(6, width, tied=False), small.batch_of(rows, width)))
    entry = small.parallel(2, device_num=4, topology=machine)._entry_of(shapes, {})
    settings = entry.environment.settings
    planner = PipelinePlanner(entry._step, settings, plan_program)

    def seconds(scheduler):
        return planner.plan(settings, scheduler.num_chunks(2), lambda costs, num_micro: scheduler.schedule(2, num_micro, costs)).total_s

    plain, found = entry.pipeline, estimates(entry.pipeline, machine)
    assert {shown(own) for own in found} == {"gpipe", "zero_bubble_h1", "interleaved 1f1b", "zero_bubble_v"}
    assert seconds(PLAIN) == pytest.approx(plain.total_s)
    best = min(found, key=lambda own: found[own])
    assert bool(suggested(plain, machine)) == (found[best] <= 0.95 * plain.total_s)
    if suggested(plain, machine):
        assert seconds(best) < plain.total_s
    (gpipe,) = (own for own in found if shown(own) == "gpipe")
    assert found[gpipe] == pytest.approx(seconds(gpipe))


def test_other_schedules_give_no_estimates():
    shapes = jax.eval_shape(lambda: (*small.state_of(4, 16, tied=False), small.batch_of()))
    options = {"pipeline_config": {"pipeline_scheduler": "zero_bubble_h1"}}
    entry = small.parallel(2, device_num=4, topology=SLOW, **options)._entry_of(shapes, {})
    assert estimates(entry.pipeline, SLOW) == {}
    assert suggested(entry.pipeline, SLOW) == []

"""What a pipeline plans to hold on each stage, beside the arrays that are really alive there when its programs begin."""

import gc

import jax
import pytest

from spmdctx.pipeline.run import program as program_module
from spmdctx.pipeline.run.walk import Walk
from spmdctx.pipeline.schedule.tasks import cost_of
from spmdctx.pipeline.schedule.zero_bubble import zero_bubble_v
from spmdctx.pipeline.stages.whole import plan_pipeline
from spmdctx.step.pipelined import entry as entry_module
from tests.step.pipelined import small


def alive_on(device):
    """Bytes of all arrays on one device, each memory once."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


def two_chunks_each(schedule):
    """Plans two chunks for each stage, with a schedule of so many stages and micro-batches."""

    def plan(step, settings, count, _, *rest):
        return plan_pipeline(step, settings, 2 * count, lambda costs, micro: schedule(count, micro, costs), *rest)

    return plan


V = two_chunks_each(lambda stages, micro, costs: zero_bubble_v(stages, micro, cost_of(costs)))


@pytest.mark.parametrize(
    ("donated", "tied", "plan", "num_layers"), [((0, 1), False, plan_pipeline, 2), ((), True, V, 4)], ids=["1f1b", "v"]
)
def test_bytes_that_are_alive_are_those_of_the_plan(monkeypatch, donated, tied, plan, num_layers):
    stages = 2
    monkeypatch.setattr(entry_module, "plan_pipeline", plan)
    step = small.parallel(stages, donate_argnums=donated)
    params, state, batch = *small.state_of(num_layers, 64, tied=tied), small.batch_of(16, 64)
    params, state = step(params, state, batch)[:2]
    batch = step.shard_batch(batch)
    planned, devices = step.plan(params, state, batch), jax.devices()
    each = len(devices) // stages
    gc.collect()
    # Constants and what other tests have left lie there too.
    own = set(map(id, jax.tree.leaves((params, state, batch))))
    others = [array for array in jax.live_arrays() if id(array) not in own]
    base = [sum(s.data.nbytes for a in others for s in a.addressable_shards if s.device == devices[n * each]) for n in range(stages)]
    seen = [{} for _ in range(stages)]

    def note(stage, name):
        seen[stage][name] = max(seen[stage].get(name, 0), alive_on(devices[stage * each]) - base[stage])

    run, operands = Walk._run, program_module.PipelineProgram._operands

    def run_task(self, task, held):
        note(self._schedule.stage_of[task.chunk], f"{task.kind.name.lower()}{task.chunk}")
        run(self, task, held)

    def gather(one, values):
        note(one.program.program.stage, one.program.name)
        return operands(one, values)

    monkeypatch.setattr(Walk, "_run", run_task)
    monkeypatch.setattr(program_module.PipelineProgram, "_operands", staticmethod(gather))
    del others
    shapes = jax.eval_shape(lambda *args: args, params, state, batch)
    result = step(params, state, batch)
    for stage, measured in zip(planned.stages, seen, strict=True):
        assert measured.keys() == stage.live_bytes.keys()
        for name, most in measured.items():
            assert most <= 1.05 * stage.live_bytes[name] + 512, name
            assert most >= 0.9 * stage.live_bytes[name] - 512, name
    del result
    # What was moved, and what was in flight, is what was planned, too.
    report = step.audit(*shapes)
    assert report.ok, report.faults
    assert not report.notes


def test_planned_peaks_are_near_the_compiled_ones():
    step = small.parallel(2, donate_argnums=(0, 1))
    report = step.audit(*small.state_of(2, 256, tied=False), small.batch_of(256, 256))
    for row in report.stages:
        assert row.planned_bytes == pytest.approx(row.compiled_bytes, rel=0.15)

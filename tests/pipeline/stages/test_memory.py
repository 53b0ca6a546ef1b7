"""What a pipeline plans to hold on each stage, beside the arrays that are really alive there when its programs begin."""

import gc

import jax
import pytest

from spmdctx.pipeline.run.tape import AfterRun, Tape, TaskRun
from tests.step.pipelined import small


def alive_on(device, arrays=None):
    """Bytes of arrays on one device, of all if none are given, each memory once."""
    found = {}
    for array in jax.live_arrays() if arrays is None else arrays:
        for shard in array.addressable_shards:
            if shard.device == device:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


@pytest.mark.parametrize(("stages", "donated", "tied"), [(2, (0, 1), True), (4, (), False)])
def test_bytes_that_are_alive_are_those_of_the_plan(monkeypatch, stages, donated, tied):
    step = small.parallel(stages, donate_argnums=donated)
    batch = small.batch_of(16, 64)
    params, state = step.init(lambda: small.state_of(4, 64, tied=tied), batch=batch)
    batch = step.shard_batch(batch)
    plan, devices = step.plan(params, state, batch), jax.devices()
    each = len(devices) // stages
    gc.collect()
    # Constants and what other tests have left lie there too.
    own = set(map(id, jax.tree.leaves((params, state, batch))))
    others = [array for array in jax.live_arrays() if id(array) not in own]
    base = [alive_on(device) - alive_on(device, jax.tree.leaves((params, state, batch))) for device in devices[::each]]
    seen = [{} for _ in range(stages)]

    def note(stage, name):
        seen[stage][name] = max(seen[stage].get(name, 0), alive_on(devices[stage * each]) - base[stage])

    run, home = Tape.run, {chunk: stage for stage, own in enumerate(plan.stages) for chunk in own.chunks}

    def watched(self, fn, inputs, outputs, event=None):
        if isinstance(event, TaskRun):
            watch(self, (home[event.chunk], f"{event.kind.name.lower()}{event.chunk}"), fn, inputs, outputs, event)
        elif isinstance(event, AfterRun):
            watch(self, (int(event.name.partition("_")[2]), event.name), fn, inputs, outputs, event)
        else:
            run(self, fn, inputs, outputs, event)

    def watch(self, name, fn, *rest):
        def noted(*arrays):
            note(*name)
            return fn(*arrays)

        run(self, noted, *rest)

    monkeypatch.setattr(Tape, "run", watched)
    result = step(params, state, batch)
    for stage, measured in zip(plan.stages, seen, strict=True):
        assert measured.keys() == stage.live_bytes.keys()
        for name, most in measured.items():
            assert most <= 1.05 * stage.live_bytes[name] + 512, name
            assert most >= 0.9 * stage.live_bytes[name] - 512, name
    # What other tests have left is alive to the end, so that it counts the same throughout.
    del others, result


@pytest.mark.parametrize("tied", [True, False])
def test_planned_peaks_are_near_the_compiled_ones(tied):
    step = small.parallel(2, donate_argnums=(0, 1))
    report = step.audit(*small.state_of(4, 256, tied=tied), small.batch_of(256, 256))
    for row in report.stages:
        assert row.planned_bytes == pytest.approx(row.compiled_bytes, rel=0.15)

"""What a pipeline plans to hold on each stage, beside the arrays that are really alive there when its programs begin."""

import gc

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.audit import peak_bytes
from spmdctx.pipeline.run.tape import AfterRun, Tape, TaskRun
from tests.audit.compile_only import need_tpu
from tests.step.pipelined import small


def alive_on(device, arrays=None):
    """Bytes of arrays on one device, of all if none are given, each memory once."""
    found = {}
    for array in jax.live_arrays() if arrays is None else arrays:
        for shard in array.addressable_shards:
            if shard.device == device:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


INTERLEAVED = {"pipeline_config": {"pipeline_interleave": True}}


@pytest.mark.parametrize(
    ("stages", "donated", "model", "options"),
    [
        (2, (0, 1), {"tied": True}, {}),
        (4, (), {"tied": False}, {}),
        (2, (0, 1), {"stacked": True}, {}),
        (4, (), {"stacked": True}, {}),
        (2, (0, 1), {"stacked": True}, INTERLEAVED),
        (2, (0, 1), {"stacked": True, "num_layers": 5}, {}),
    ],
    ids=["tied", "untied", "stacked", "stacked on 4", "stacked and interleaved", "stacked, undivided"],
)
def test_bytes_that_are_alive_are_those_of_the_plan(monkeypatch, stages, donated, model, options):
    step = small.parallel(stages, donate_argnums=donated, **options)
    batch = small.batch_of(16, 64)
    params, state = step.init(lambda: small.state_of(**{"num_layers": 4, "width": 64, **model}), batch=batch)
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
            watch(self, [(home[event.chunk], f"{event.kind.name.lower()}{event.chunk}")], fn, inputs, outputs, event)
        elif isinstance(event, AfterRun):
            place = event.name.partition("_")[2]
            watch(self, [(stage, event.name) for stage in range(stages) if place in ("all", str(stage))], fn, inputs, outputs, event)
        else:
            run(self, fn, inputs, outputs, event)

    def watch(self, names, fn, *rest):
        def noted(*arrays):
            for stage, name in names:
                note(stage, name)
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


def recomputed_step(params, batch):
    def loss(params, x):
        for layer in params:
            x = jax.checkpoint(lambda o, x: x + jnp.tanh(x @ o["a"]) @ o["b"])(layer, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    gradients = spmdctx.grad(loss)(params, batch)
    return jax.tree.map(lambda leaf, own: leaf - jnp.asarray(0.1, leaf.dtype) * own.astype(leaf.dtype), params, gradients)


def test_a_stage_that_communicates_nothing_puts_off_no_gradient():
    layer = {"a": jax.ShapeDtypeStruct((1024, 3072), "bfloat16"), "b": jax.ShapeDtypeStruct((3072, 1024), "bfloat16")}
    args = [dict(layer) for _ in range(6)], jax.ShapeDtypeStruct((65536, 1024), "bfloat16")
    options = {"pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    step = spmdctx.parallel(recomputed_step, devices=need_tpu("v5p:2x2x1"), parallel_mode="auto_parallel", **options)
    plan, lowered = step.plan(*args), step.lower(*args)
    assert any(name.startswith("reduce") for name in plan.stages[0].live_bytes)
    for stage in plan.stages:
        found = {name: lowered[name].compile() for name in stage.live_bytes}
        beside = {name: peak_bytes(own) - own.memory_analysis().argument_size_in_bytes for name, own in found.items()}
        assert stage.memory_bytes == pytest.approx(max(stage.live_bytes[name] + beside[name] for name in found), rel=0.15)

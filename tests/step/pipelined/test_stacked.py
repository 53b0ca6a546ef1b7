"""Scans over stacked layers: each stage keeps its share of them between steps, and only what it lacks crosses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.pipeline.programs.transfers import Moved
from tests.step.pipelined import models, small

LAYERS, STEPS = 4, 3
INTERLEAVED = {"pipeline_config": {"pipeline_interleave": True}}

pytestmark = pytest.mark.usefixtures("quick_compiler")


def stacked_in(state, count=LAYERS):
    leaves = jax.tree.leaves(nnx.state(state) if isinstance(state, tuple) and isinstance(state[0], nnx.Module) else state)
    return [leaf for leaf in leaves if leaf.ndim > 1 and leaf.shape[0] == count]


def layers_on_devices(leaves):
    return {shard.data.shape[0] for leaf in leaves for shard in leaf.addressable_shards}


def apart(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(1.0 * np.asarray(own) - np.asarray(wanted)).max()) for own, wanted in pairs)


def sent(plan):
    """Parameters and gradients that cross in a step."""
    return sum(one.count for one in plan.transfers if one.what in (Moved.WEIGHT, Moved.GRADIENT))


def compared(step, plain, state, batch):
    """Runs a pipeline and a plain step side by side; returns the last state and how far they are apart."""
    got, want, worst = state, jax.tree.map(jnp.copy, state), 0.0
    for _ in range(STEPS):
        *got, value = step(*got, batch)
        *want, wanted = plain(*want, batch)
        worst = max(worst, abs(float(value) - float(wanted)))
    return got, max(worst, apart(got, want))


@pytest.mark.parametrize(("flavour", "stages"), [("linen", 2), ("nnx", 4)])
def test_modules_have_one_device_s_numbers_and_a_share_of_the_state(monkeypatch, flavour, stages):
    monkeypatch.setattr(models, "SCANNED", LAYERS)
    with jax.enable_x64(True):
        case, other = (models.case(flavour, "scanned", 1) for _ in range(2))
        step = spmdctx.parallel(case.step, parallel_mode="auto_parallel", pipeline_stages=stages, grad_accumulation_step=4)
        plain = (nnx.jit if flavour == "nnx" else jax.jit)(other.step)
        state, wanted = case.state, other.state
        for _ in range(STEPS):
            got, want = step(state, case.batch), plain(wanted, other.batch)
            if flavour != "nnx":
                (state, got), (wanted, want) = got, want
            assert apart(got, want) <= 1e-9
        own = stacked_in(nnx.state(state) if flavour == "nnx" else state)
        plan, report = step.plan(state, case.batch), step.audit(state, case.batch)
    # A kernel, a bias and two moments of each.
    assert len(own) == 6
    assert layers_on_devices(own) == {LAYERS // stages}
    assert report.ok, report.faults
    assert (sent(plan) > 0) == any("stack layers" in note for note in plan.notes)


def plain_step(params, state, batch):
    value, gradient = jax.value_and_grad(small.loss)(params, batch)
    update, state = small.TX.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


@pytest.mark.parametrize(
    ("options", "layers", "share", "note"),
    [
        (INTERLEAVED, 8, 4, "Between steps each stage keeps an equal share of them"),
        ({}, 7, 7, "lie whole on stage 0, as their optimizer state does, since 7 layers do not divide by 2 stages"),
    ],
    ids=["interleaved", "undivided"],
)
def test_layers_that_stages_do_not_keep_cross_and_a_note_says_so(options, layers, share, note):
    with jax.enable_x64(True):
        step, state, batch = small.parallel(2, **options), small.state_of(layers, stacked=True, tied=False), small.batch_of()
        state, batch = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (state, batch))
        got, worst = compared(step, jax.jit(plain_step), state, batch)
        plan, report = step.plan(*got, batch), step.audit(*got, batch)
    assert worst <= 1e-9
    assert layers_on_devices(stacked_in(got, layers)) == {share}
    assert report.ok, report.faults
    assert sent(plan) > 0
    assert sum(note in one for one in plan.notes) == 1


def casting_step(params, state, batch):
    """The loss reads parameters that the step has cast before, and the step looks at what it has cast."""
    half = jax.tree.map(lambda leaf: (0.5 * leaf).astype(jnp.float32), params)
    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(small.loss, micro_size=small.MICRO))(half, batch)
    gradient = jax.tree.map(lambda own, cast: own.astype(jnp.float64) + 0.1 * cast, gradient, half)
    update, state = small.TX.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


def mixing_step(params, state, batch):
    """What follows the loss reads a stack beside a weight of one stage, and remembers gradients that it has not read."""
    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(small.loss, micro_size=small.MICRO))(params, batch)
    gradient["layers"] = gradient["layers"] + 0.1 * params["first"]
    update, _ = small.TX.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value


@pytest.mark.parametrize(
    ("fn", "share", "note"),
    [
        (casting_step, 4, "What the step computes before its loss has no plan: XLA splits it on stages 0, 1"),
        (mixing_step, 8, "Stages cannot share stacked parameters by layers here: What follows the loss combines arrays"),
    ],
    ids=["cast before the loss", "mixed after it"],
)
def test_steps_of_other_shapes_have_one_device_s_numbers(fn, share, note):
    with jax.enable_x64(True):
        step = spmdctx.parallel(fn, parallel_mode="auto_parallel", pipeline_stages=2)
        plain = spmdctx.parallel(fn, parallel_mode="stand_alone")
        state, batch = small.state_of(8, stacked=True, tied=False), small.batch_of()
        state = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), state)
        got, worst = compared(step, plain, state, batch)
        plan, report = step.plan(*got, batch), step.audit(*got, batch)
    assert worst <= (1e-5 if fn is casting_step else 1e-9)
    assert layers_on_devices(stacked_in(got, 8)) == {share}
    assert report.ok, report.faults
    assert any(note in one for one in plan.notes), plan.notes


def test_a_saved_plan_of_stacked_layers_runs_and_lowers(tmp_path):
    state, batch, path = small.state_of(8, stacked=True, tied=False), small.batch_of(), str(tmp_path / "plan.json")
    first = small.parallel(2, strategy_ckpt_save_file=path)
    want = first(*state, batch)
    step = small.parallel(2, strategy_ckpt_load_file=path)
    got = step(*state, batch)
    assert apart(got, want) == 0
    plan, lowered = step.plan(*state, batch), step.lower(*state, batch)
    assert plan == first.plan(*state, batch)
    assert plan.stages[0].after.keys() & plan.stages[1].after.keys() == {name for name in lowered if name.endswith("_all")} != set()
    stacked = next(leaf for leaf in plan.inputs if "layers" in leaf.path)
    assert stacked.sharding[0] == ("stage",)
    assert any(leaf.startswith("params/layers[0:") for leaf in plan.chunk_reasons[0].leaves)


def test_a_scan_that_no_stage_holds_whole_is_planned_within_memory():
    state = jax.eval_shape(lambda: small.state_of(16, 128, stacked=True, tied=False))
    whole = sum(leaf.size * 4 for leaf in stacked_in(state, 16))
    step = small.parallel(4, device_num=4, topology="cpu", memory_bytes=whole, donate_argnums=(0, 1))
    plan = step.plan(*state, jax.eval_shape(lambda: small.batch_of(16, 128)))
    # Each stage has a quarter of the parameters and moments, of the sums of gradients, and of the gradients.
    assert plan.memory_bytes <= whole
    assert max(stage.state_bytes for stage in plan.stages) <= 0.5 * whole

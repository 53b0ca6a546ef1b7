"""auto_pipeline: the number of stages is searched for, 1 is an answer, and budgets hold for stages."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.machine.presets import topology
from tests.pipeline import losses
from tests.step.pipelined import small


def step(params, batch):
    loss, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(losses.loss, micro_size=8))(params, batch)
    return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), loss


def planned(fn=step, times=8, layers=2, **options):
    params = jax.eval_shape(lambda key: losses.decoder(key, layers, tied=False, times=times), jax.random.key(0))
    batch = jax.eval_shape(lambda key: losses.batch(key, 64, 32), jax.random.key(1))
    run = spmdctx.parallel(fn, **{"parallel_mode": "auto_parallel", "device_num": 4, "topology": "tpu-v5p", **options})
    return run.plan(params, batch)


def test_inside_a_fast_network_the_answer_is_the_step_without_a_pipeline():
    plan = planned(pipeline_stages=2, auto_pipeline=True)
    assert plan.logical_mesh.num_devices == 4
    assert any(note.startswith("auto_pipeline chose 1 stage of at most 2") for note in plan.notes)
    alone = planned(pipeline_stages=1)
    assert plan.assignment == alone.assignment
    assert plan.cost == alone.cost


def test_where_one_stage_does_not_fit_a_pipeline_is_taken():
    slow = replace(topology("h100"), devices_per_host=2, network_bytes_per_s=1e9, memory_bytes=90 * 2**20)
    plan = planned(pipeline_stages=2, auto_pipeline=True, topology=slow, times=64)
    assert len(plan.stages) == 2
    assert any(note.startswith("auto_pipeline chose 2 stages of at most 2") for note in plan.notes)
    assert any(note.startswith("Proven under the cost model: these chunks run 8 micro-batches in no less than") for note in plan.notes)
    assert any(note.startswith("Proven under the cost model: on no number of stages up to 2") for note in plan.notes)


def test_where_nothing_fits_more_chunks_are_not_planned_and_a_note_says_so():
    small_machine = replace(topology("h100"), devices_per_host=2, network_bytes_per_s=1e9, memory_bytes=20 * 2**20)
    plan = planned(pipeline_stages=2, auto_pipeline=True, topology=small_machine, times=64)
    assert plan.memory_bytes > small_machine.memory_bytes
    (note,) = [note for note in plan.notes if note.startswith("Not planned")]
    assert "2 stages by interleaved 1f1b in 3 chunks or more, since nothing fits, and more chunks on a stage take no less memory" in note


def test_a_step_that_cannot_be_cut_takes_one_stage_and_says_why():
    def plain(params, batch):
        return jax.value_and_grad(losses.loss)(params, batch)

    plan = planned(plain, pipeline_stages=2, auto_pipeline=True)
    assert plan.logical_mesh.num_devices == 4
    assert any("2 stages cannot be planned" in note for note in plan.notes)


def test_a_stage_over_its_budget_is_named():
    with pytest.raises(InfeasibleError, match=r"Stage [01] of 2 needs") as caught:
        planned(pipeline_stages=2, memory_bytes=100_000)
    assert "in flight" in str(caught.value)
    assert planned(pipeline_stages=2, memory_bytes=10**9).memory_bytes <= 10**9


def test_hops_over_a_slow_network_lengthen_the_schedule():
    def makespan(bandwidth):
        slow = replace(topology("h100"), devices_per_host=2, network_bytes_per_s=bandwidth)
        return planned(pipeline_stages=2, topology=slow).simulation.makespan_s

    assert makespan(1e8) > makespan(1e11) * 1.01


def test_a_loss_of_one_equation_has_no_two_stages():
    def tiny(params, batch):
        return spmdctx.value_and_grad(lambda own, x: jnp.sum(own * x))(params, batch)

    run = spmdctx.parallel(
        tiny,
        parallel_mode="auto_parallel",
        device_num=4,
        topology="tpu-v5p",
        pipeline_stages=4,
        auto_pipeline=True,
        grad_accumulation_step=4,
    )
    plan = run.plan(jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32))
    assert plan.logical_mesh.num_devices == 4
    assert any("cannot be planned" in note for note in plan.notes)


SLOW = replace(topology("h100"), devices_per_host=1, network_bytes_per_s=3e8, memory_bytes=300_000)


def chosen(**options):
    """A small step of plain layers, which does not fit onto one stage."""
    params, state = small.state_of(4, 64, tied=False)
    run = small.parallel(4, device_num=4, topology=SLOW, auto_pipeline=True, **options)
    return run, (params, state, small.batch_of(64, 64))


def test_schedules_are_searched_too_and_what_is_chosen_computes_the_same():
    run, args = chosen()
    plan = run.plan(*args)
    (note,) = [note for note in plan.notes if note.startswith("auto_pipeline chose 4 stages of at most 4, by ")]
    name = plan.simulation.schedule.name
    assert f"by {name}." in note
    for other in ("1f1b", "zero_bubble_h1", "interleaved 1f1b", "zero_bubble_v"):
        assert f"{other} " in note
    assert name != "1f1b"
    assert plan.memory_bytes <= SLOW.memory_bytes
    want = jax.tree.leaves(jax.jit(small.step)(*args))
    for own, other in zip(jax.tree.leaves(run(*args)), want, strict=True):
        assert jnp.allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"pipeline_config": {"pipeline_scheduler": "1f1b"}}, {"pipeline_config": {"pipeline_interleave": True}}]
)
def test_a_schedule_that_is_set_is_kept(options):
    run, args = chosen(**options)
    plan = run.plan(*args)
    want = "interleaved 1f1b" if "pipeline_interleave" in options["pipeline_config"] else "1f1b"
    assert plan.simulation.schedule.name == want
    (note,) = [note for note in plan.notes if note.startswith("auto_pipeline chose 4 stages")]
    assert "zero_bubble" not in note
    assert not any(note.startswith("Not planned") for note in plan.notes)


def planned_checkpointed(num_layers, width, rows, micro_size, machine, **options):
    """The plan of a step of checkpointed layers on four devices."""

    def loss(params, x):
        for weight in params:
            x = x + jax.checkpoint(lambda weight, x: jnp.tanh(jnp.tanh(x @ weight) @ weight.T))(weight, x)
        return jnp.mean(x**2)

    def step_of(params, batch):
        return spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=micro_size))(params, batch)

    run = spmdctx.parallel(step_of, parallel_mode="auto_parallel", device_num=4, topology=machine, **options)
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * num_layers
    return run.plan(params, jax.ShapeDtypeStruct((rows, width), jnp.float32))


def test_checkpointed_layers_leave_no_use_for_zero_bubble():
    machine = replace(SLOW, memory_bytes=10**9, kernel_s=0.0)
    notes = planned_checkpointed(4, 64, 384, 6, machine, pipeline_stages=4, auto_pipeline=True).notes
    (note,) = [note for note in notes if note.startswith("Not planned")]
    assert "4 stages by zero_bubble_h1, since backward passes that a stage waits for give" in note
    assert "4 stages by interleaved 1f1b, since 6 micro-batches are no multiple of 4" in note


def test_without_auto_pipeline_a_faster_schedule_is_suggested_as_an_estimate():
    params, state = small.state_of(4, 64, tied=False)
    args = params, state, small.batch_of(64, 64)

    def suggestions(**options):
        plan = small.parallel(4, device_num=4, topology=SLOW, **options).plan(*args)
        return plan, [note for note in plan.notes if note.startswith("By an estimate, which is no plan")]

    plan, (note,) = suggestions()
    assert plan.simulation.schedule.name == "1f1b"
    assert "4 stages by zero_bubble_h1 would take about" in note
    other, none = suggestions(pipeline_config={"pipeline_scheduler": "zero_bubble_h1"})
    assert not none
    assert other.step_s < 0.95 * plan.step_s
    assert not suggestions(parallel_mode="semi_auto_parallel")[1]


def test_more_chunks_are_chosen_where_they_are_faster():
    """Checkpointed layers, whose activations alone do not fit onto one stage, and links that cost next to nothing."""
    machine = replace(topology("h100"), memory_bytes=1_210_000_000)
    layers = functools.partial(planned_checkpointed, 32, 2048, 16384, 8, machine)
    plan = layers(pipeline_stages=4, auto_pipeline=True)
    schedule = plan.simulation.schedule
    rounds = schedule.num_chunks // schedule.num_stages
    assert rounds > 2
    (note,) = [note for note in plan.notes if note.startswith("auto_pipeline chose")]
    assert f"by interleaved 1f1b in {rounds} chunks." in note
    config = {"pipeline_config": {"pipeline_interleave": True}, "pipeline_stages": schedule.num_stages}
    two, same = (layers(**config, pipeline_segments=own) for own in (2, rounds))
    assert plan.cost.total_s == pytest.approx(same.cost.total_s)
    assert plan.cost.total_s < 0.99 * two.cost.total_s


def test_stages_that_do_not_fit_a_device_are_planned_within_its_memory():
    layers = functools.partial(planned_checkpointed, 4, 2048, 1024, 4, pipeline_stages=2)
    free = layers(machine=topology("h100"))
    machine = replace(topology("h100"), memory_bytes=int(0.9 * free.memory_bytes))
    found = layers(machine=machine)
    assert found.memory_bytes <= machine.memory_bytes < free.memory_bytes
    assert not [note for note in found.notes if re.match(r"Stage \d of 2 needs", note)]
    assert found.step_s == layers(machine=machine, memory_bytes=machine.memory_bytes).step_s
    # Where nothing fits, memory is left aside.
    over = layers(machine=replace(machine, memory_bytes=1_000_000))
    assert over.step_s == pytest.approx(free.step_s, rel=0.05)
    (note,) = [note for note in over.notes if re.match(r"Stage \d of 2 needs", note)]
    assert "which is over the 977 KiB that a program may use of a h100. More stages or devices" in note

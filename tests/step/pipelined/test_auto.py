"""auto_pipeline: the number of stages is searched for, 1 is an answer, and budgets hold for stages."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.machine.presets import topology
from tests.pipeline import losses


def step(params, batch):
    loss, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(losses.loss, micro_size=8))(params, batch)
    return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), loss


def planned(fn=step, times=8, **options):
    params = jax.eval_shape(lambda key: losses.decoder(key, 4, tied=False, times=times), jax.random.key(0))
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
    slow = replace(topology("h100"), devices_per_host=2, network_bytes_per_s=1e9, memory_bytes=300 * 2**20)
    plan = planned(pipeline_stages=2, auto_pipeline=True, topology=slow, times=64)
    assert len(plan.stages) == 2
    assert any(note.startswith("auto_pipeline chose 2 stages of at most 2") for note in plan.notes)
    assert any(note.startswith("No cut into 2 stages runs 8 micro-batches in less than") for note in plan.notes)


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

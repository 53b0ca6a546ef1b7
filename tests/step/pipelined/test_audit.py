"""Audits of pipelines: all agrees where nothing is wrong, and each planted fault is found and named."""

import json
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.ir.mesh import replicated
from spmdctx.ir.sharding import OpSharding
from spmdctx.lowering.compile import jit_program
from spmdctx.pipeline.run import compiled as compiled_module
from spmdctx.pipeline.run import program as program_module
from spmdctx.pipeline.run.walk import Walk
from tests.step.pipelined import small
from tests.step.pipelined.test_entry import Model


def arguments(**options):
    return *small.state_of(**options), small.batch_of()


@pytest.mark.parametrize(("stages", "tied"), [(2, True), (4, False)])
def test_a_pipeline_agrees_with_its_plan_before_and_after_a_call(stages, tied):
    args, step = arguments(num_layers=4, tied=tied), small.parallel(stages)
    before = step.audit(*args)
    assert before.ok
    assert "No call has run" in str(before)
    step(*args)
    report = step.audit(*args)
    assert report.ok
    assert not report.notes
    assert all(row.done_count == row.planned_count > 0 and row.done_bytes == row.planned_bytes for row in report.transfers)
    assert any(str(row.what) == "gradients of shared inputs" for row in report.transfers) is tied
    assert [row.in_flight for row in report.stages] == [stages - stage for stage in range(stages)]
    assert {one.runs for one in report.programs} == {1, small.MICRO}
    assert {row.program for row in report.rows} <= {one.name for one in report.programs}
    assert all(f"stage {stage}: in flight" in str(report) for stage in range(stages))
    assert json.loads(report.to_json())["ok"] is True
    assert "backward1" in report._repr_html_()


def test_state_of_objects_and_what_comes_before_the_loss_are_audited():
    def step(model, optimizer, x, y):
        scaled = x * jnp.mean(y)
        loss, gradient = spmdctx.value_and_grad(lambda model, x: jnp.mean((model(x) - y) ** 2))(model, scaled)
        optimizer.update(model, gradient)
        return loss

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    parallel = spmdctx.parallel(step, parallel_mode="auto_parallel", grad_accumulation_step=4, pipeline_stages=2)
    args = (model, optimizer, jnp.ones((32, 16)), jnp.ones((32, 4)))
    parallel(*args)
    report = parallel.audit(*args)
    assert not report.faults
    assert [note for note in report.notes if "before" in note]


def test_a_dropped_transfer_is_found(monkeypatch):
    run = Walk.run

    def fewer(self, held, counts=None):
        run(self, held, counts)
        self.counts.moves.subtract(Counter({(0, 1): 1}))

    args, step = arguments(), small.parallel()
    monkeypatch.setattr(Walk, "run", fewer)
    step(*args)
    report = step.audit(*args)
    assert not report.ok
    assert report.faults == ("activations from stage 0 to 1: 4 planned, 3 done.",)


def test_a_transfer_that_is_not_planned_is_found(monkeypatch):
    keep = program_module._Values.keep

    def elsewhere(self, stage, var, value):
        keep(self, 1 - stage if value.shape == () else stage, var, value)

    args, step = arguments(), small.parallel()
    monkeypatch.setattr(program_module._Values, "keep", elsewhere)
    step(*args)
    assert [fault for fault in step.audit(*args).faults if fault.startswith("values after the loss")]


def test_a_program_that_ran_too_often_and_too_much_in_flight_are_found(monkeypatch):
    run = Walk.run

    def more(self, held, counts=None):
        run(self, held, counts)
        self.counts.runs["B", 1] += 1
        self.counts.in_flight_on[0] += 1

    monkeypatch.setattr(Walk, "run", more)
    report = small.parallel().audit(*arguments())
    assert not report.ok
    assert report.faults == ("backward1 on stage 1 differs from its plan.", "stage 0 has 3 micro-batches in flight, and not 2.")


def test_a_program_lowered_differently_is_found(monkeypatch):
    def whole(program, assignment, mesh, devices, directives, options):
        if options.name == "pipeline_backward1":
            assignment = replace(assignment, values=tuple(replicated(len(value)) for value in assignment.values))
            assignment = replace(assignment, ops=tuple(OpSharding(((),) * len(op.axes)) for op in assignment.ops))
        return jit_program(program, assignment, mesh, devices, directives, options)

    monkeypatch.setattr(compiled_module, "jit_program", whole)
    # Here the batch is split, so that gradients are reduced.
    report = small.parallel(parallel_mode="semi_auto_parallel").audit(*arguments())
    assert not report.ok
    (found,) = (one for one in report.programs if not one.ok)
    assert found.name == "backward1"
    assert "backward1: lies elsewhere than planned" in str(report)
    assert found.report.missing
    assert [row for row in report.rows if row.program == "backward0" and row.collective.found_count]

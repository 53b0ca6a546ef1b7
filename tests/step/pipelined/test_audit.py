"""Audits of pipelines: all agrees where nothing is wrong, and each planted fault is found and named."""

import json
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.ir.mesh import replicated
from spmdctx.ir.sharding import OpSharding
from spmdctx.lowering.compile import jit_program
from spmdctx.pipeline.audit.data import EdgeRow
from spmdctx.pipeline.run import compiled as compiled_module
from spmdctx.pipeline.run import walk as walk_module
from spmdctx.pipeline.run.grounds import Values
from spmdctx.pipeline.run.tape import HandedOn, Program
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
    move, left = walk_module.move, [HandedOn(0, 1, 1, 0)]

    def fewer(tape, spots, targets, event=None):
        if left and event is not None and event[:3] == left[0][:3]:
            event = left.pop()._replace(num_arrays=0)
        return move(tape, spots, targets, event)

    args, step = arguments(num_layers=4, tied=False), small.parallel()
    monkeypatch.setattr(walk_module, "move", fewer)
    step(*args)
    report = step.audit(*args)
    assert not report.ok
    assert report.faults == ("activations from stage 0 to 1: 4 planned, 3 done.",)


def test_a_transfer_that_is_not_planned_is_found(monkeypatch):
    keep = Values.keep

    def elsewhere(self, var, stages, spot, **more):
        is_scalar = len(stages) == 1 and spot.aval.shape == ()
        keep(self, var, (1 - stages[0],) if is_scalar else stages, spot, **more)

    args, step = arguments(), small.parallel()
    monkeypatch.setattr(Values, "keep", elsewhere)
    step(*args)
    assert [fault for fault in step.audit(*args).faults if fault.startswith("values after the loss")]


def test_a_program_that_ran_too_often_and_too_much_in_flight_are_found(monkeypatch):
    count = Program.dry_counts

    def more(self):
        counts = count(self)
        counts.runs["B", 1] += 1
        counts.in_flight_of_stage[0] += 1
        return counts

    monkeypatch.setattr(Program, "dry_counts", more)
    report = small.parallel().audit(*arguments())
    assert not report.ok
    assert report.faults == ("backward1 on stage 1 differs from its plan.", "stage 0 has 3 micro-batches in flight, and not 2.")


def test_a_program_lowered_differently_is_found(monkeypatch):
    def whole(program, assignment, mesh, devices, directives, options):
        if options.name == "pipeline_reduce0_0":
            assignment = replace(assignment, values=tuple(replicated(len(value)) for value in assignment.values))
            assignment = replace(assignment, ops=tuple(OpSharding(((),) * len(op.axes)) for op in assignment.ops))
        return jit_program(program, assignment, mesh, devices, directives, options)

    monkeypatch.setattr(compiled_module, "jit_program", whole)
    # Here the batch is split, so that gradients are reduced.
    report = small.parallel(parallel_mode="semi_auto_parallel").audit(*arguments())
    assert not report.ok
    (found,) = (one for one in report.programs if not one.ok)
    assert found.name == "reduce0_0"
    assert "reduce0_0: lies elsewhere than planned" in str(report)
    assert found.report.missing
    assert [row for row in report.rows if row.program != "reduce0_0" and row.collective.found_count]


def test_programs_around_the_tasks_communicate_nothing():
    step = small.parallel(parallel_mode="semi_auto_parallel")
    report, stages = step.audit(*arguments()), step.plan(*arguments()).stages
    # A stage begins with the batch, or with sums of gradients.
    begins = {f"begin{number}" for number, stage in enumerate(stages) if number == 0 or stage.num_parameters}
    assert {row.program for row in report.edges} == {*begins, "end_0", "end_1"}
    assert not any(row.num_collectives for row in report.edges)
    faulty = replace(report, edges=(*report.edges[1:], EdgeRow("begin0", 2)))
    assert not faulty.ok
    assert faulty.faults == ("begin0 has 2 collectives, and is to have none.",)

"""Assembles the plan of a pipeline from its planned programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import replicated
from spmdctx.pipeline.capture.around import SPREAD
from spmdctx.pipeline.data import StagedTensor, StagePlan, Transfer
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.schedule.bounds import bubble_of
from spmdctx.pipeline.schedule.tasks import Costs, Kind
from spmdctx.pipeline.stages.homes import before_of
from spmdctx.pipeline.stages.memory import StageMemory, memory_of
from spmdctx.pipeline.stages.notes import is_undivided, least_shared, undivided_batch
from spmdctx.pipeline.stages.transfers import transfers_of
from spmdctx.pipeline.stages.whole import PlannedPipeline, sharding_of, stages_of


def assembled(pipeline: PlannedPipeline, mode: str, topology: str, notes: Iterable[str] = ()) -> PipelinePlan:
    """Returns the plan that users see."""
    schedule = pipeline.schedule
    stages = tuple(_stage(pipeline, stage, memory) for stage, memory in enumerate(memory_of(pipeline)))
    rounds = schedule.num_chunks // schedule.num_stages
    mean = Costs(*(sum(own) / schedule.num_stages for own in zip(*(chunk.costs for chunk in pipeline.planned), strict=True)))
    return PipelinePlan(
        mode,
        pipeline.planned[0].joint.planned.plan.search_mode,
        topology,
        pipeline.mesh,
        pipeline.simulation,
        bubble_of(schedule.name, schedule.num_stages, schedule.num_micro, mean, rounds),
        tuple(_inputs(pipeline)),
        tuple(_outputs(pipeline)),
        stages,
        tuple(Transfer(*route, *amount) for route, amount in transfers_of(pipeline).items()),
        tuple(chunk.joint.planned.plan for chunk in pipeline.planned),
        tuple(pipeline.cut.places),
        pipeline.cut.chunk_reasons(_leaves(pipeline)),
        pipeline.cut.cut_reasons(),
        tuple(dict.fromkeys((*pipeline.step.captured.notes, *pipeline.notes, *notes, *_notes(pipeline)))),
        (pipeline.bounds.cuts_s or None) if pipeline.bounds is not None else None,
    )


def _notes(pipeline: PlannedPipeline) -> Iterator[str]:
    """Returns what the plans of all programs say, each once for each stage, and what has no plan."""
    if before := before_of(pipeline):
        own = sorted({stage for place in before for stage in pipeline.stages_with(place)})
        stages = f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        yield f"What the step computes before its loss has no plan: XLA splits it on {stages}, where it is read."
    by_stage: dict[int, list[str]] = {}
    for number, chunk in enumerate(pipeline.planned):
        for task in (*chunk.tasks.values(), *([pipeline.reductions[number]] if number in pipeline.reductions else [])):
            said = [note for note in task.planned.plan.notes if not is_undivided(note)]
            by_stage.setdefault(pipeline.stage_of_chunk(number), []).extend(said)
    for stage, notes in by_stage.items():
        yield from (f"Stage {stage}: {note}" for note in least_shared(notes))
    yield from undivided_batch(pipeline)
    for programs in pipeline.rounds:
        for one in programs:
            place = "All stages" if one.program.stage == SPREAD else f"Stage {one.program.stage}"
            yield from (f"{place}: {note}" for note in one.planned.plan.notes)


def _inputs(pipeline: PlannedPipeline) -> Iterator[StagedTensor]:
    for var, leaf in zip(pipeline.around.jaxpr.jaxpr.invars, pipeline.step.captured.inputs, strict=True):
        yield StagedTensor(leaf.path, leaf.role, leaf.shape, leaf.dtype, sharding_of(pipeline, var), stages_of(pipeline, var))


def _outputs(pipeline: PlannedPipeline) -> Iterator[StagedTensor]:
    captured = pipeline.step.captured
    for atom, leaf in zip(pipeline.around.jaxpr.jaxpr.outvars, captured.outputs, strict=True):
        role = Role.INTERMEDIATE if leaf.carried_from is None else captured.inputs[leaf.carried_from].role
        is_literal = hasattr(atom, "val")
        stage = 0 if is_literal else stages_of(pipeline, atom)
        dims = replicated(len(leaf.shape)) if is_literal else sharding_of(pipeline, atom)
        yield StagedTensor(leaf.path, role, leaf.shape, leaf.dtype, dims, stage)


def _leaves(pipeline: PlannedPipeline) -> list[tuple[str, ...]]:
    """Returns the paths of the parameters that each chunk reads."""
    loss = pipeline.step.loss
    return [tuple(loss.paths[leaf] for leaf in chunk.leaves if loss.operands[leaf].batch_dim is None) for chunk in pipeline.chunks]


def _stage(pipeline: PlannedPipeline, stage: int, memory: StageMemory) -> StagePlan:
    own = [number for number, at in enumerate(pipeline.schedule.stage_of) if at == stage]
    chunks = [pipeline.planned[number] for number in own]
    back = [sum(chunk.costs.of(kind) for kind in chunk.tasks if kind is not Kind.FORWARD) for chunk in chunks]
    after = [one for programs in pipeline.rounds for one in programs]
    reductions = [pipeline.reductions[number] for number in own if number in pipeline.reductions]
    return StagePlan(
        chunks=tuple(own),
        tasks={task.name: task.planned.plan for chunk in chunks for task in chunk.tasks.values()},
        after={
            **{one.name: one.planned.plan for one in reductions},
            **{one.name: one.planned.plan for one in after if stage in pipeline.stages_with(one.program.stage)},
        },
        num_equations=sum(len(pipeline.chunks[number].program.jaxpr.eqns) for number in own),
        num_parameters=sum(len(chunk.passes.weights) for chunk in chunks),
        forward_s=sum(chunk.costs.forward for chunk in chunks),
        backward_s=sum(back),
        in_flight=pipeline.simulation.in_flight[stage],
        state_bytes=memory.state_bytes,
        kept_bytes=memory.kept_bytes,
        live_bytes=memory.live_bytes,
        memory_bytes=memory.peak_bytes,
    )

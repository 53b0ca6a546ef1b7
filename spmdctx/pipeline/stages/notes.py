"""What a user would want to know of a planned pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spmdctx.context.state import AutoParallelContext
from spmdctx.errors import Sentence, StrategyError, listed
from spmdctx.ir.graph import Role
from spmdctx.machine.xla.collectives.barriers import NO_BUCKETS
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.cut.line import is_dear, num_bytes
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.pipeline.stages.memory import memory_of
from spmdctx.pipeline.stages.whole import PlannedPipeline, foreign_operands
from spmdctx.plan.data import WorkForm
from spmdctx.rules.control_flow import CONTROL_FLOW
from spmdctx.search.setup.modes import BatchForm
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import bytes_text, counted

_MOST_NAMED = 3
"""Arrays that a note names."""


def whole_backward(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on the chunks whose backward pass a zero-bubble schedule cannot part, or nothing.

    A checkpointed region or a loop is one equation, which gives the gradients of inputs and of weights together.
    """
    if not pipeline.schedule.splits_backward:
        return []
    found: dict[str, list[int]] = {}
    for number, chunk in enumerate(pipeline.planned):
        for eqn in chunk.tasks[Kind.INPUT].program.jaxpr.eqns:
            if eqn.primitive.name in CONTROL_FLOW and is_dear(eqn) and number not in found.setdefault(eqn.primitive.name, []):
                found[eqn.primitive.name].append(number)
    if not found:
        return []
    kinds = "; ".join(f"{name} in chunks {', '.join(map(str, numbers))}" for name, numbers in found.items())
    return [
        f"{pipeline.schedule.name} leaves these equations of the backward pass in one part, which gives the gradients of inputs and "
        f"weights together: {kinds}. So fewer gradients of weights are left to fill the time in which stages wait."
    ]


def over_memory(pipeline: PlannedPipeline, settings: Settings) -> list[str]:
    """Returns a note on the fullest stage, if it needs more than the budget or, without one, the memory of a device."""
    memories, machine = memory_of(pipeline), settings.topology
    stage = max(range(len(memories)), key=lambda own: memories[own].peak_bytes)
    peak = memories[stage].peak_bytes
    if peak <= (settings.memory_bytes or machine.memory_bytes):
        return []
    limit = f"the {bytes_text(machine.memory_bytes)} that a program may use of a {machine.device}"
    if settings.memory_bytes is not None:
        limit = f"memory_bytes={settings.memory_bytes}; only auto_parallel can meet a budget"
    return [
        f"Stage {stage} of {len(memories)} needs {bytes_text(peak)} per device, which is over {limit}. More stages or devices, "
        "checkpointed layers, or more micro-batches of fewer rows take less."
    ]


def is_undivided(note: str) -> bool:
    """Returns whether a note says that rows of a micro-batch do not divide over the devices of a stage."""
    return isinstance(note, Sentence) and note.form is BatchForm.UNDIVIDED


def least_shared(notes: Sequence[str]) -> list[str]:
    """Returns the notes of a stage's programs with one on work that devices repeat: that of the program which they share least."""
    repeated = [note for note in notes if isinstance(note, Sentence) and note.form is WorkForm.REPEATED]
    worst = min(repeated, key=lambda note: float(note.gaps["ways"]), default=None)
    return [note for note in notes if note is worst or not any(note is one for one in repeated)]


def undivided_batch(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on leaves of the user's batch whose micro-batches the devices of a stage do not share, else on what enters it."""
    leaves = {leaf.path: leaf.shape for leaf in pipeline.step.captured.inputs}
    count = pipeline.step.loss.num_micro
    found: dict[tuple[str, ...], list[str]] = {}
    entering: list[str] = []
    for number, chunk in enumerate(pipeline.planned):
        for note in (note for task in chunk.tasks.values() for note in task.planned.plan.notes):
            if isinstance(note, Sentence) and note.form is BatchForm.UNDIVIDED:
                path, *rest = (note.gaps[name] for name in ("path", "axes", "kept", "rows"))
                if path in leaves:
                    found.setdefault(tuple(rest), []).append(f"'{path}' {list(leaves[path])}")
                else:
                    entering.append(f"What enters stage {number} in each micro-batch does not divide over {rest[0]}: {rest[1]}.")
    names_of = {key: listed(list(dict.fromkeys(names))) for key, names in found.items()}
    return [
        f"The batch runs in {count} micro-batches, whose rows do not divide over {axes} of a stage: {kept}. "
        f"A batch of a multiple of {count * int(rows)} rows would, or fewer micro-batches. This holds for {names}."
        for (axes, kept, rows), names in names_of.items()
    ] or entering[:1]


@contextmanager
def explaining_shares(step: PipelinedStep, settings: Settings) -> Iterator[None]:
    """Adds to errors about strategies and batches what a stage has of the devices and of the batch, in the user's own numbers."""
    try:
        yield
    except StrategyError as error:
        count, devices, stages = step.loss.num_micro, settings.num_devices, settings.context.pipeline_stages
        rows = max((leaf.shape[0] for leaf in step.captured.inputs if leaf.role is Role.BATCH and leaf.shape), default=0)
        batch = f", and each of {count} micro-batches {rows // count} of the batch's {rows} rows" if rows else ""
        error.add_line(f"each of {stages} pipeline stages has {devices // stages} of {devices} devices{batch}")
        raise


def without_buckets(pipeline: PlannedPipeline, context: AutoParallelContext, *, keeps_barriers: bool) -> list[str]:
    """Returns why buckets of gradients by index have no effect in any stage, or nothing.

    Args:
        pipeline: the planned pipeline.
        context: what asks for buckets.
        keeps_barriers: `Compiler.keeps_barriers`.
    """
    if not context.fuses_by_index or pipeline.mesh.num_devices == 1:
        return []
    tasks = [task for chunk in pipeline.planned for task in (*chunk.tasks.values(), *pipeline.reductions.values())]
    if all(bucket is None for task in tasks for bucket in task.planned.directives.gradients.buckets):
        return ["all_reduce_fusion_config has no effect: no stage reduces a gradient."]
    return [] if keeps_barriers else [NO_BUCKETS]


def crossing_after(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on arrays that cross between stages after the loss, or nothing."""
    names = dict(zip(pipeline.around.jaxpr.jaxpr.invars, (leaf.path for leaf in pipeline.step.captured.inputs), strict=True))
    found: dict[tuple[Any, int], int] = {}
    for programs in pipeline.rounds:
        for one in programs:
            found |= {(var, one.program.stage): num_bytes(var) for var in foreign_operands(pipeline, one.program)}
    if not found:
        return []
    named = [names.get(var, f"a {var.aval.str_short()} that the step makes") for var, _ in found]
    shown = ", ".join(dict.fromkeys(named[:_MOST_NAMED])) + (", ..." if len(named) > _MOST_NAMED else "")
    return [
        f"What follows the loss combines arrays of several stages: {counted(len(found), 'array')}, {bytes_text(sum(found.values()))}, "
        f"cross in each step ({shown}), for which no seconds are planned. Arrays that are combined with others stay on one stage if the "
        "loss reads them together."
    ]


def selected_branches(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on conditionals after the loss of which all branches are computed, or nothing."""
    count = pipeline.around.num_selected
    if not count:
        return []
    return [
        f"All branches of {counted(count, 'conditional')} after the loss are computed, and their results selected, since a scalar of all "
        "arrays, such as a global norm, holds them together."
    ]

"""Makes the entry of a call: on a pipeline if the context has several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.context.options import PLANNED_MODES
from spmdctx.errors import UnsupportedError
from spmdctx.gradients.capture import capture_step
from spmdctx.gradients.scope import cells_met
from spmdctx.pipeline.capture.stage import is_marked, marks_met
from spmdctx.step.entry import Entry
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment


def entry_of(target: Target, call: Call, static: Static, around: Environment, notes: Sequence[str]) -> Entry:
    """Traces one call of a step, and returns its entry; modes whose devices all run the whole loss have no stages.

    Raises:
        ContextError: a pipeline with fewer micro-batches than stages.
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss that cannot be cut, or that no micro-batches can run; a strategy file.
    """
    settings = around.settings
    stages, mode = settings.context.pipeline_stages, settings.context.parallel_mode
    if stages == 1 or mode not in PLANNED_MODES:
        with marks_met(records=False) as marks, cells_met() as cells:
            captured = capture_step(target, call, static, settings)
        reason = "pipeline_stages is 1" if stages == 1 else f"parallel_mode {mode!r} has no stages"
        notes = (*notes, *_cell_notes(cells, settings.context.grad_accumulation_step, reason))
        if marks.stages or is_marked(call):
            sentence = f"Marks by pipeline_stage have no effect: {reason}."
            captured, notes = replace(captured, warnings=(*captured.warnings, sentence)), (*notes, sentence)
        return Entry(captured, around, notes)
    if settings.context.auto_pipeline and settings.context.parallel_mode == "auto_parallel":
        for name in ("strategy_ckpt_load_file", "strategy_ckpt_save_file"):
            if getattr(settings.context, name):
                raise UnsupportedError(
                    f"auto_pipeline chooses the number of stages, and has no use for {name} so far.",
                    fix=f"leave auto_pipeline out, with the pipeline_stages of the plan, or {name}",
                )
        from spmdctx.step.pipelined.auto import chosen_entry

        return chosen_entry(target, call, static, around, notes)
    from spmdctx.pipeline.capture.carrier import capture_pipelined
    from spmdctx.step.pipelined.entry import PipelinedEntry

    return PipelinedEntry(capture_pipelined(target, call, static, settings), around, notes)


def _cell_notes(cells: Sequence[int], micro_batches: int, reason: str) -> list[str]:
    """Returns a note for each PipelineCell that has no effect because its loss has no stages."""
    sizes = sorted({size for size in cells if size > 1} - {micro_batches})
    return [
        f"PipelineCell(micro_size={size}) has no effect: {reason}. grad_accumulation_step={size} cuts the batch without stages."
        for size in sizes
    ]

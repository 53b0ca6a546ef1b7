"""Makes the entry of a call: on a pipeline if the context has several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.gradients.capture import capture_step
from spmdctx.pipeline.capture.carrier import capture_pipelined
from spmdctx.pipeline.capture.stage import is_marked, marks_met
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.auto import chosen_entry
from spmdctx.step.pipelined.entry import PipelinedEntry
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment

_NO_EFFECT = "Marks by pipeline_stage have no effect: pipeline_stages is 1."


def entry_of(target: Target, call: Call, static: Static, around: Environment, notes: Sequence[str]) -> Entry:
    """Traces one call of a step, and returns its entry.

    Raises:
        ContextError: a pipeline with fewer micro-batches than stages.
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss that cannot be cut, or that no micro-batches can run.
    """
    settings = around.settings
    if settings.context.pipeline_stages == 1:
        with marks_met(records=False) as marks:
            captured = capture_step(target, call, static, settings)
        if marks.stages or is_marked(call):
            captured, notes = replace(captured, warnings=(*captured.warnings, _NO_EFFECT)), (*notes, _NO_EFFECT)
        return Entry(captured, around, notes)
    if settings.context.auto_pipeline and settings.context.parallel_mode == "auto_parallel":
        return chosen_entry(target, call, static, around, notes)
    return PipelinedEntry(capture_pipelined(target, call, static, settings), around, notes)

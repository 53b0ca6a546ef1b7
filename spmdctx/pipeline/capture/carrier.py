"""Traces a step so that each of its losses becomes one equation, which a pipeline runs in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.gradients.capture import capture_again, seen_losses
from spmdctx.gradients.loss import Loss, LossCall, Traced
from spmdctx.gradients.operands import SeenCall, operands_of
from spmdctx.gradients.options import GradientOptions, gradient_options
from spmdctx.gradients.parts import pieces_of, side_by_side, traced_for, traced_in_parts
from spmdctx.gradients.results import Fate, Row, state_notes, turn_notes
from spmdctx.gradients.scope import plainly
from spmdctx.pipeline.capture.loss import PipelinedLoss, pipelined_loss, without_passed
from spmdctx.pipeline.capture.marker import stand_in
from spmdctx.pipeline.capture.stage import marks_met
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.settings import Settings


@dataclass(frozen=True)
class PipelinedStep:
    """A captured step, in whose program one equation stands for the loss and its gradients."""

    captured: Captured
    loss: PipelinedLoss


def capture_pipelined(target: Target, call: Call, static: Static, settings: Settings) -> PipelinedStep:
    """Traces one call of a step whose loss runs through a pipeline.

    Raises:
        ContextError: there are fewer micro-batches than stages.
        StrategyError: the batch does not divide.
        UnsupportedError: the step has no call of `spmdctx.value_and_grad`, or several, or one that a pipeline cannot run.
    """
    plain = gradient_options(settings.context, settings.num_devices, settings.mesh)
    stages = settings.context.pipeline_stages

    def options_of(calls: Sequence[SeenCall]) -> GradientOptions:
        sizes = [seen.micro_size for seen in calls if seen.micro_size is not None]
        return plain._replace(micro_batches=sizes[0]) if sizes else plain

    captured, calls = seen_losses(target, call, static, settings, options_of)
    if len(calls) != 1:
        raise UnsupportedError(
            f"A pipeline needs one loss to cut, and {captured.name} has {len(calls)}.",
            got="; ".join(seen.where for seen in calls) or "no call of spmdctx.value_and_grad",
            fix="differentiate the loss by one call of spmdctx.value_and_grad",
        )
    options = options_of(calls)
    if options.micro_batches < stages:
        raise ContextError(
            f"A pipeline of {stages} stages needs at least as many micro-batches.",
            where=calls[0].where,
            got=f"{_asked(calls[0], options)}, and pipeline_stages={stages}",
            fix=_more(calls[0], stages),
        )
    carrier = _Pipelined(calls, options)
    again = capture_again(carrier, target, call, static, captured, settings.num_devices)
    (loss,) = carrier.losses
    notes = tuple(dict.fromkeys((*captured.notes, *again.notes, *carrier.notes, *_outvoted(plain, options))))
    seconds, draws_apart = captured.trace_s + again.trace_s, any(operand.is_key for operand in loss.operands)
    deviations = (*captured.deviations, *carrier.notes)
    again = replace(again, notes=notes, deviations=deviations, trace_s=seconds, is_rewritten=True, draws_apart=draws_apart)
    return PipelinedStep(again, loss)


def _asked(call: SeenCall, options: GradientOptions) -> str:
    """Returns the option that says how many micro-batches there are."""
    count = options.micro_batches
    return f"grad_accumulation_step={count}" if call.micro_size is None else f"PipelineCell(micro_size={count})"


def _more(call: SeenCall, stages: int) -> str:
    if call.micro_size is None:
        return f"wrap the loss in spmdctx.PipelineCell(loss, micro_size={4 * stages}), or set grad_accumulation_step"
    return "raise micro_size, or use fewer pipeline_stages"


def _outvoted(plain: GradientOptions, options: GradientOptions) -> list[str]:
    """Returns a note if PipelineCell and the context ask for different numbers of micro-batches."""
    asked, taken = plain.micro_batches, options.micro_batches
    if asked in (1, taken):
        return []
    return [f"grad_accumulation_step={asked} has no effect: PipelineCell asks for {taken} micro-batches."]


class _Pipelined:
    """Puts one equation in the place of each loss, and remembers what it stands for."""

    def __init__(self, calls: Sequence[SeenCall], options: GradientOptions) -> None:
        self._calls, self._options = iter(calls), options
        self.losses: list[PipelinedLoss] = []
        self.notes: list[str] = []

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen, options = next(self._calls), self._options
        if seen.is_manual or not seen.has_batch:
            raise UnsupportedError(
                "A pipeline cannot cut a loss that " + ("holds a shard_map" if seen.is_manual else "reads nothing of the batch") + ".",
                where=seen.where,
                fix="leave pipeline_stages out",
            )
        call = LossCall(loss, args, kwargs, 1)
        operands = operands_of(seen)
        with marks_met(records=True) as marks:
            smaller = options._replace(micro_batches=options.micro_batches * seen.num_parts)
            pieces = pieces_of(call, operands, smaller)
            forward: Traced = plainly(lambda: traced_for(seen, call, call.trace_forward, pieces))
            traced, rows = plainly(lambda: traced_in_parts(seen, call, call.trace, operands, options))
            self.notes += [
                *seen.fixed_notes(traced.jaxpr.jaxpr),
                *turn_notes(call, traced, rows, options.micro_batches),
                *state_notes(call, rows),
            ]
            if seen.num_parts > 1:
                by_path = {"value": Row("value", Fate.AVERAGED, ()), **{row.path: row for row in rows}}
                avals = pieces_of(call, operands, options)
                forward = side_by_side(call, forward, operands, by_path, avals, seen.num_parts)
        if any(isinstance(const, jax.core.Tracer) for const in forward.jaxpr.consts):
            raise UnsupportedError(
                "A pipeline cannot cut a loss that reads an array of the step by a way that cannot be followed.",
                where=seen.where,
                fix="pass it to the loss as an argument",
            )
        forward, passed = without_passed(forward, operands, rows)
        found = pipelined_loss(seen, call, (forward, traced), operands, rows, options.micro_batches)
        self.losses.append(replace(found, is_marked=bool(marks.stages)))
        results = stand_in(len(self.losses) - 1, call.values, seen.out_avals)
        leaves = [passed.get(made.path) for made in traced.results]
        return call.finish([own if leaf is None else call.values[leaf] for own, leaf in zip(results, leaves, strict=True)])

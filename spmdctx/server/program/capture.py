"""Traces a step so that its loss becomes one equation, which workers run for parts of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.capture import capture_again, seen_losses
from spmdctx.gradients.loss import Loss, LossCall, Traced
from spmdctx.gradients.operands import Operand, SeenCall, operands_of
from spmdctx.gradients.options import GradientOptions, gradient_options
from spmdctx.gradients.parts import pieces_of, traced_in_parts
from spmdctx.gradients.results import Fate, Row
from spmdctx.gradients.scope import plainly
from spmdctx.ir.mesh import replicated
from spmdctx.pipeline.capture.around import Around, around_of
from spmdctx.pipeline.capture.marker import stand_in
from spmdctx.pipeline.cut.line import is_array, needed, num_bytes, variables
from spmdctx.server.program.rows import Tables
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.settings import Settings


@dataclass(frozen=True)
class ServedLoss:
    """A loss as workers run it.

    Attributes:
        where: the source line of the call.
        part: the loss with its gradients over one part of the batch, of the call's leaves.
        paths: of the leaves.
        operands: how each leaf enters the loss.
        rows: how each result is joined from those of the parts.
        primal_of: for each result that is a gradient, the leaf to which it belongs.
        folded: the leaves that are keys, of which each part derives its own.
        num_parts: of the batch.
    """

    where: str
    part: jexc.ClosedJaxpr
    paths: tuple[str, ...]
    operands: tuple[Operand, ...]
    rows: tuple[Row, ...]
    primal_of: dict[int, int]
    folded: tuple[int, ...]
    num_parts: int

    @property
    def differs_by_parts(self) -> str:
        """Why parts give other numbers than the whole batch, empty if they do not."""
        if self.num_parts == 1:
            return ""
        body = self.part.jaxpr
        if any(body.invars[index] in variables(eqn.invars) for index in self.folded for eqn in body.eqns):
            return "each part of the batch draws random numbers of its own"
        if any(
            row.fate is Fate.AVERAGED and (row.carry is not None or aval.shape)
            for row, aval in zip(self.rows, self.part.out_avals, strict=True)
        ):
            return "each part of the batch has statistics of its own, and state takes their mean"
        return ""


@dataclass(frozen=True)
class Local:
    """State that stays with workers, and the program that renews it: each worker runs it on what servers have summed.

    Attributes:
        around: the step's program around its loss without this; after its results it gives what is taken.
        held: the inputs of the step that stay with workers, by number; scalars do not.
        given: the inputs of the step that the program reads and that are no state, by number.
        taken: the variables of `around` that it reads: sums over the parts, and scalars.
        jaxpr: the program; it takes what is held, given and taken, and gives the next values of what is held, and results.
        results: the results of the step that it makes, by number.
        like: for each of what is held or taken, by its place among the program's inputs, the parameter of its shape that it belongs to.
    """

    around: Around
    held: tuple[int, ...]
    given: tuple[int, ...]
    taken: tuple[Any, ...]
    jaxpr: jexc.ClosedJaxpr
    results: tuple[int, ...]
    like: Mapping[int, int]


@dataclass(frozen=True)
class ServedStep:
    """A captured step, in whose program one equation stands for the loss and its gradients.

    `tables` cross by rows, and `local` stays with workers.
    """

    captured: Captured
    loss: ServedLoss
    tables: Tables | None = None
    local: Local | None = None

    @property
    def around(self) -> Around:
        """The program around its loss, of what servers hold."""
        if self.local is not None:
            return self.local.around
        return self.tables.around if self.tables is not None else around_of(self.captured.jaxpr)

    @property
    def held_elsewhere(self) -> frozenset[int]:
        """The inputs that no server holds whole, by number: tables, which all hold by rows, and what stays with workers."""
        by_rows = frozenset[int]() if self.tables is None else self.tables.held
        return by_rows if self.local is None else by_rows.union(self.local.held)


def parameter_of(step: ServedStep, around: Around) -> dict[int, Any]:
    """Returns, for each result of the loss that is a gradient, the largest array among the inputs from which its leaf is made."""
    inputs = set(around.jaxpr.jaxpr.invars)
    found = {}
    for result, leaf in step.loss.primal_of.items():
        atom = around.loss.invars[leaf]
        read = [atom] if atom in inputs else variables(one for eqn in needed(around.before, [atom]) for one in eqn.invars)
        arrays = [var for var in read if is_array(var) and var in inputs]
        if arrays and is_array(around.loss.outvars[result]):
            found[result] = max(arrays, key=num_bytes)
    return found


def num_losses(target: Target, call: Call, static: Static, settings: Settings) -> int:
    """Returns how many losses of `spmdctx.value_and_grad` a step differentiates."""
    options = gradient_options(settings.context, settings.num_devices, settings.mesh)
    return len(seen_losses(target, call, static, settings, lambda _: options)[1])


def capture_served(target: Target, call: Call, static: Static, settings: Settings, num_parts: int) -> ServedStep:
    """Traces one call of a step whose loss workers run in parts.

    Raises:
        StrategyError: the batch does not divide into the parts.
        UnsupportedError: the step has several losses, or one that servers cannot have.
    """
    options = gradient_options(settings.context, settings.num_devices, settings.mesh)._replace(micro_batches=num_parts)
    captured, calls = seen_losses(target, call, static, settings, lambda _: options)
    if len(calls) != 1:
        raise UnsupportedError(
            f"A parameter server needs one loss, and {captured.name} has {len(calls)}.",
            got="; ".join(seen.where for seen in calls),
            fix="differentiate the loss by one call of spmdctx.value_and_grad",
        )
    carrier = _Carrier(calls, options)
    again = capture_again(carrier, target, call, static, captured, settings.num_devices)
    (loss,) = carrier.losses
    apart = [f"In {num_parts} parts, {loss.differs_by_parts}."] if loss.differs_by_parts else []
    notes = tuple(dict.fromkeys((*captured.notes, *again.notes, *apart, *calls[0].fixed_notes(loss.part.jaxpr))))
    return ServedStep(replace(again, notes=notes, trace_s=captured.trace_s + again.trace_s, is_rewritten=True), loss)


class _Carrier:
    """Puts one equation in the place of the loss, and remembers what it stands for."""

    def __init__(self, calls: Sequence[SeenCall], options: GradientOptions) -> None:
        self._calls, self._options = iter(calls), options
        self.losses: list[ServedLoss] = []

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen, options = next(self._calls), self._options
        if seen.is_manual or not seen.has_batch:
            raise UnsupportedError(
                "Workers cannot divide a loss that " + ("holds a shard_map" if seen.is_manual else "reads nothing of the batch") + ".",
                where=seen.where,
                fix="leave enable_ps out",
            )
        call = LossCall(loss, args, kwargs, 1)
        operands = operands_of(seen)
        traced, rows = plainly(lambda: _traced(seen, call, operands, options))
        if any(isinstance(const, jax.core.Tracer) for const in traced.jaxpr.consts):
            raise UnsupportedError(
                "Workers cannot run a loss that reads an array of the step by a way that cannot be followed.",
                where=seen.where,
                fix="pass it to the loss as an argument",
            )
        gradients = {index: call.primal(made) for index, made in enumerate(traced.results) if made.part == "gradients"}
        self.losses.append(
            ServedLoss(
                where=seen.where,
                part=traced.jaxpr,
                paths=tuple(call.paths),
                operands=tuple(operands),
                rows=tuple(rows),
                primal_of={index: leaf for index, leaf in gradients.items() if leaf is not None},
                folded=tuple(index for index, operand in enumerate(operands) if operand.is_key),
                num_parts=options.micro_batches,
            )
        )
        return call.finish(stand_in(0, call.values, seen.out_avals))


def _traced(seen: SeenCall, call: LossCall, operands: Sequence[Operand], options: GradientOptions) -> tuple[Traced, list[Row]]:
    """Traces a loss over one part of the batch; returns a row for each result, too: where there is one part, it gives whole results."""
    if options.micro_batches > 1 or seen.num_parts > 1:
        return traced_in_parts(seen, call, call.trace, operands, options)
    traced = call.trace(pieces_of(call, operands, options))
    types = traced.jaxpr.out_avals
    return traced, [Row(made.path, Fate.SAME, replicated(aval.ndim)) for made, aval in zip(traced.results, types, strict=True)]

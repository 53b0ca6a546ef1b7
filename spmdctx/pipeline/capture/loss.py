"""The loss of a pipelined step: its forward pass over one micro-batch, and how its results become those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.loss import LossCall, Traced
from spmdctx.gradients.operands import Operand, SeenCall
from spmdctx.gradients.results import Row
from spmdctx.trace.build.jaxprs.passed import passed_inputs


@dataclass(frozen=True)
class PipelinedLoss:
    """A loss as a pipeline runs it.

    Attributes:
        where: the source line of the call.
        forward: the forward pass over one micro-batch, of the call's leaves.
        whole: both passes over one micro-batch, as they are without a pipeline.
        value: the number of the loss among its results.
        paths: of the leaves.
        operands: how each leaf enters the loss.
        rows: how each result of the user's call is joined from those of micro-batches.
        types: the type of each result of the user's call.
        gradient_of: for each result that is a gradient, the leaf to which it belongs.
        made_by: for each other result, its number among those of the forward pass; results that are leaves have none.
        folded: the leaves that are keys, of which each micro-batch derives its own.
        carried: for each leaf that a micro-batch takes from the one before, the result of the forward pass that is its next value.
        num_micro: micro-batches.
        is_marked: True if parts of it are marked for stages.
    """

    where: str
    forward: jexc.ClosedJaxpr
    whole: jexc.ClosedJaxpr
    value: int
    paths: tuple[str, ...]
    operands: tuple[Operand, ...]
    rows: tuple[Row, ...]
    types: tuple[Any, ...]
    gradient_of: dict[int, int]
    made_by: dict[int, int]
    folded: tuple[int, ...]
    carried: dict[int, int]
    num_micro: int
    is_marked: bool = False

    @property
    def differentiated(self) -> frozenset[int]:
        """The leaves by which the loss is differentiated."""
        return frozenset(self.gradient_of.values())

    @property
    def is_parameter(self) -> list[bool]:
        """One flag per leaf: True where it is the same in all micro-batches."""
        return [operand.batch_dim is None and not operand.is_key for operand in self.operands]


def without_passed(traced: Traced, operands: Sequence[Operand], rows: Sequence[Row]) -> tuple[Traced, dict[str, int]]:
    """Returns a forward pass without those results that are leaves of the call, the same for all micro-batches, and these leaves by path.

    nnx gives every variable that a lifted transform has seen, also where nothing has changed it.
    """
    next_value = {row.carry: row.path for row in rows if row.carry is not None}
    passed = {}
    for made, leaf in zip(traced.results, passed_inputs(traced.jaxpr), strict=True):
        is_shared = leaf is not None and operands[leaf].batch_dim is None and next_value.get(leaf, made.path) == made.path
        if leaf is not None and is_shared and made.part != "value":
            passed[made.path] = leaf
    kept = [index for index, made in enumerate(traced.results) if made.path not in passed]
    body = traced.jaxpr.jaxpr
    info = body.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = body.replace(outvars=[body.outvars[index] for index in kept], debug_info=info)
    return Traced(jexc.ClosedJaxpr(jaxpr, traced.jaxpr.consts), [traced.results[index] for index in kept]), passed


def pipelined_loss(
    seen: SeenCall, call: LossCall, traces: tuple[Traced, Traced], operands: Sequence[Operand], rows: Sequence[Row], num_micro: int
) -> PipelinedLoss:
    """Puts together what two traces of a call over one micro-batch show: of the loss alone, and of the loss with its gradients.

    Results that the first one lacks are leaves of the call as they are.

    Raises:
        UnsupportedError: the loss is differentiated by its batch.
    """
    forward, traced = traces
    numbers = {made.path: number for number, made in enumerate(forward.results)}
    gradient_of, made_by = {}, {}
    for index, made in enumerate(traced.results):
        if made.part != "gradients":
            if made.path in numbers:
                made_by[index] = numbers[made.path]
            continue
        leaf = call.primal(made)
        if leaf is None or operands[leaf].batch_dim is not None:
            raise UnsupportedError(
                f"A pipeline cannot give the gradient '{made.path}', which belongs to the batch or to a constant.",
                where=seen.where,
                fix="differentiate by parameters alone, or leave pipeline_stages out",
            )
        gradient_of[index] = leaf
    return PipelinedLoss(
        where=seen.where,
        forward=forward.jaxpr,
        whole=traced.jaxpr,
        value=numbers["value"],
        paths=tuple(call.paths),
        operands=tuple(operands),
        rows=tuple(rows),
        types=tuple(seen.out_avals),
        gradient_of=gradient_of,
        made_by=made_by,
        folded=tuple(index for index, operand in enumerate(operands) if operand.is_key and not call.is_stateful_key(index)),
        carried={row.carry: made_by[index] for index, row in enumerate(rows) if row.carry is not None and index in made_by},
        num_micro=num_micro,
    )

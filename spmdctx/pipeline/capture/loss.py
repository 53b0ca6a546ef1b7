"""The loss of a pipelined step: its forward pass over one micro-batch, and how its results become those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.loss import LossCall, Made, Traced
from spmdctx.gradients.operands import Operand
from spmdctx.gradients.results import Row
from spmdctx.trace.build.jaxprs.passing import passed_on


@dataclass(frozen=True)
class PipelinedLoss:
    """A loss as a pipeline runs it.

    Attributes:
        where: the source line of the call.
        forward: the forward pass over one micro-batch, of the call's leaves.
        value: the number of the loss among its results.
        paths: of the leaves.
        operands: how each leaf enters the loss.
        rows: how each result of the user's call is joined from those of micro-batches.
        types: the type of each result of the user's call.
        gradient_of: for each result that is a gradient, the leaf to which it belongs.
        made_by: for each other result, its number among those of the forward pass.
        folded: the leaves that are keys, of which each micro-batch derives its own.
        carried: for each leaf that a micro-batch takes from the one before, the result of the forward pass that is its next value.
        num_micro: micro-batches.
        is_marked: True if parts of it are marked for stages.
    """

    where: str
    forward: jexc.ClosedJaxpr
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


class LossResult(NamedTuple):
    """A result of the user's call: what it is, how it is joined from those of micro-batches, and its type."""

    made: Made
    row: Row
    aval: Any


def unchanged(forward: Traced) -> dict[str, int]:
    """Returns the leaves of objects that a loss gives back as it took them, by the path of the result; they are no results of its own."""
    passed = passed_on(forward.jaxpr.jaxpr)
    return {made.path: leaf for made, leaf in zip(forward.results, passed, strict=True) if leaf is not None and leaf == made.source}


def pipelined_loss(
    where: str, call: LossCall, forward: Traced, results: Sequence[LossResult], operands: Sequence[Operand], num_micro: int
) -> PipelinedLoss:
    """Puts together what two traces of a call over one micro-batch show: of the loss alone, and of the loss with its gradients.

    Args:
        where: the source line of the call.
        call: the call.
        forward: the loss alone.
        results: what the loss with its gradients gives.
        operands: how each leaf enters the loss.
        num_micro: micro-batches.

    Raises:
        UnsupportedError: the loss is differentiated by its batch.
    """
    same = unchanged(forward)
    own = [place for place, made in enumerate(forward.results) if made.path not in same]
    numbers = {forward.results[place].path: number for number, place in enumerate(own)}
    gradient_of, made_by = {}, {}
    for index, (made, _, _) in enumerate(results):
        if made.part != "gradients":
            made_by[index] = numbers[made.path]
            continue
        leaf = call.primal(made)
        if leaf is None or operands[leaf].batch_dim is not None:
            raise UnsupportedError(
                f"A pipeline cannot give the gradient '{made.path}', which belongs to the batch or to a constant.",
                where=where,
                fix="differentiate by parameters alone, or leave pipeline_stages out",
            )
        gradient_of[index] = leaf
    body = forward.jaxpr.jaxpr
    outvars, info = [body.outvars[place] for place in own], body.debug_info._replace(result_paths=None)
    return PipelinedLoss(
        where=where,
        forward=jexc.ClosedJaxpr(body.replace(outvars=outvars, debug_info=info), forward.jaxpr.consts),
        value=numbers["value"],
        paths=tuple(call.paths),
        operands=tuple(operands),
        rows=tuple(one.row for one in results),
        types=tuple(one.aval for one in results),
        gradient_of=gradient_of,
        made_by=made_by,
        folded=tuple(index for index, operand in enumerate(operands) if operand.is_key and not call.is_stateful_key(index)),
        carried={one.row.carry: made_by[index] for index, one in enumerate(results) if one.row.carry is not None and index in made_by},
        num_micro=num_micro,
    )

"""The operands and results of a pipeline's programs, by what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.pipeline.schedule.tasks import Kind


class Holds(StrEnum):
    """What an array of a chunk holds."""

    LEAF = "leaf"
    """An input of the loss: a parameter, or a part of the batch."""
    SUM = "sum"
    """The sum of a parameter's gradients so far."""
    TOTAL = "total"
    """Such a sum when it is complete, if micro-batches have left it unreduced."""
    ENTERING = "entering"
    """What chunks before hand over."""
    LEAVING = "leaving"
    """What is handed to the next chunk."""
    KEPT = "kept"
    """What the forward pass leaves for the backward pass."""
    LINK = "link"
    """What the gradients of inputs leave for those of weights."""
    RESULT = "result"
    """A result of the loss, of one micro-batch."""
    OF_ENTERING = "cotangent of entering"
    OF_LEAVING = "cotangent of leaving"


class Slot(NamedTuple):
    """One array of a chunk; `number` counts those that hold the same, leaves and results as the loss numbers them."""

    holds: Holds
    number: int


@dataclass(frozen=True, eq=False)
class TaskProgram:
    """The flat program of one kind of task of a chunk; `built` keeps what was built from it, by the names and roles of its operands."""

    kind: Kind
    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    built: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def avals(self) -> dict[Slot, Any]:
        """The type of each operand and result."""
        body = self.jaxpr.jaxpr
        return {
            **{slot: var.aval for slot, var in zip(self.inputs, body.invars, strict=True)},
            **{slot: var.aval for slot, var in zip(self.outputs, body.outvars, strict=True)},
        }


def slots(holds: Holds, numbers: Any) -> list[Slot]:
    """Returns slots that hold the same."""
    return [Slot(holds, number) for number in numbers]

"""One collective of a plan, and one way to write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spmdctx.ir.sharding import AxisNames

LOSS_REDUCTION = "joined by value_and_grad"
"""The cause of collectives that join what devices computed by losses of their own."""

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """One planned or compiled collective.

    `payload_bytes` is per device and per execution: the operand of an all_reduce, reduce_scatter, all_to_all or
    collective_permute, the result of an all_gather. `time_s` is one execution's; `repeats` counts executions in a step.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    time_s: float
    repeats: int
    cause: str
    source: str = ""


class Way(NamedTuple):
    """One way to write a planned kind: the compiled kind, its payload over the planned one's, and its dtype if that tells."""

    planned: str
    compiled: str
    ratio: float
    dtypes: tuple[str, ...]
    name: str


AS_PLANNED = "as planned"
"""The name of the way in which nothing differs."""

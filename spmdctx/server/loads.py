"""What each server holds, and what passes between it and workers in a step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut
from spmdctx.server.program.spec import raw_type


class ServerLoad(NamedTuple):
    """One server in a step.

    Attributes:
        arrays: that it holds.
        num_bytes: of these.
        pushed_bytes: that all workers together send it.
        pulled_bytes: that it sends to each worker.
        exchanged_bytes: that it sends to other servers by way of the scheduler.
    """

    arrays: tuple[str, ...]
    num_bytes: int
    pushed_bytes: int
    pulled_bytes: int
    exchanged_bytes: int


def server_loads(step: ServedStep, cut: Cut) -> tuple[ServerLoad, ...]:
    """Returns the load of each server."""
    return tuple(_load(step, cut, number) for number in range(len(cut.servers)))


def _load(step: ServedStep, cut: Cut, number: int) -> ServerLoad:
    part, captured = cut.servers[number], step.captured
    results, inputs = step.loss.part.out_avals, captured.in_avals
    made = {slot: aval for own in part.rounds if own is not None for slot, aval in zip(own.outputs, own.jaxpr.out_avals, strict=True)}
    made |= {f"in/{one}": inputs[one] for one in part.held}
    sent = [made[slot] for own in part.posts for slot in own]
    pulled = [one for one in cut.pulled if cut.home.get(one, 0) == number]
    return ServerLoad(
        arrays=tuple(captured.inputs[one].path for one in part.held),
        num_bytes=_bytes([inputs[one] for one in part.held]),
        pushed_bytes=step.loss.num_parts * _bytes([results[one] for one in part.joined]) + _bytes([inputs[one] for one in part.given]),
        pulled_bytes=_bytes([inputs[one] for one in pulled]),
        exchanged_bytes=_bytes(sent),
    )


def _bytes(avals: list[Any]) -> int:
    structs = [raw_type(aval) for aval in avals]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in structs)

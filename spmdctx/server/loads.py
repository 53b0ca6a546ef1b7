"""What each server holds, and what passes between it and workers in a step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut
from spmdctx.server.program.rows import Table
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


class LocalLoad(NamedTuple):
    """What each worker holds: the arrays that stay with workers, and their bytes on all of its devices together, if none repeats them."""

    arrays: tuple[str, ...] = ()
    num_bytes: int = 0


def local_load(step: ServedStep) -> LocalLoad:
    """Returns what each worker holds."""
    held = () if step.local is None else step.local.held
    inputs = step.captured.inputs
    return LocalLoad(tuple(inputs[one].path for one in held), _bytes([step.captured.in_avals[one] for one in held]))


def server_loads(step: ServedStep, cut: Cut) -> tuple[ServerLoad, ...]:
    """Returns the load of each server."""
    return tuple(_load(step, cut, number) for number in range(len(cut.servers)))


def _load(step: ServedStep, cut: Cut, number: int) -> ServerLoad:
    part, captured = cut.servers[number], step.captured
    results, inputs = step.loss.part.out_avals, captured.in_avals
    made = {slot: aval for own in part.rounds if own is not None for slot, aval in zip(own.outputs, own.jaxpr.out_avals, strict=True)}
    made |= {f"in/{one}": inputs[one] for one in part.held} | {f"loss/{one}": results[one] for one in part.joined}
    sent = [made[slot] for own in part.posts for slot in own]
    rows = _rows(step, cut)
    pulled = [one for one in cut.pulled if cut.home.get(one, 0) == number]
    return ServerLoad(
        arrays=tuple(captured.inputs[one].path for one in (*part.held, *(one for own in cut.rows.tables for one in own.table.held))),
        num_bytes=_bytes([inputs[one] for one in part.held]) + rows.num_bytes,
        pushed_bytes=step.loss.num_parts * (_bytes([results[one] for one in part.joined]) + rows.pushed_bytes)
        + _bytes([inputs[one] for one in part.given]),
        pulled_bytes=_bytes([inputs[one] for one in pulled]) + rows.pulled_bytes + _bytes([made[slot] for slot in part.kept]),
        exchanged_bytes=_bytes(sent),
    )


class _RowBytes(NamedTuple):
    """The bytes of all tables on one server, and of the rows of one part at most, if servers have equally many of them."""

    num_bytes: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0


def _rows(step: ServedStep, cut: Cut) -> _RowBytes:
    found, count = _RowBytes(), len(cut.servers)
    for own in cut.rows.tables:
        table = own.table
        ids = -(-table.num_ids // count)
        held, (first,), gradient = ([_bytes([aval]) // table.num_rows for aval in avals] for avals in _avals(step, cut, table))
        found = _RowBytes(
            found.num_bytes + -(-table.num_rows // count) * sum(held),
            found.pushed_bytes + ids * (gradient[0] + _ID_BYTES),
            found.pulled_bytes + ids * first,
        )
    return found


def _avals(step: ServedStep, cut: Cut, table: Table) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the types of what a table holds, of itself, and of its gradient."""
    inputs = step.captured.in_avals
    return [inputs[one] for one in table.held], [inputs[table.number]], [cut.around.loss.outvars[table.result].aval]


_ID_BYTES = 4


def _bytes(avals: list[Any]) -> int:
    structs = [raw_type(aval) for aval in avals]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in structs)

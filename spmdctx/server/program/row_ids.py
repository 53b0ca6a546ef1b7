"""Finds the rows of tables that a part of the batch reads, and what each server has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import cut_step
from spmdctx.server.program.rows import Rows, Table
from spmdctx.server.program.worker import WorkerProgram, ids_program

Array = np.ndarray[Any, Any]


class PartRows(NamedTuple):
    """The rows that a part reads: for each table the ids, rising, and for each read the place of each of its ids among these."""

    ids: list[Array]
    places: list[Array]


class RowReader:
    """Finds the rows that parts of a step read.

    Args:
        step: with its tables.
    """

    def __init__(self, step: ServedStep) -> None:
        self._num_parts = step.loss.num_parts
        self._tables = () if step.tables is None else step.tables.tables
        program = ids_program(step, cut_step(step, 1))
        self._program = program
        self._run = None if program is None else jax.jit(jexc.jaxpr_as_fun(program.jaxpr))

    def rows(self, values: Mapping[int, Any], part: int) -> PartRows:
        """Returns the rows of a part, whose inputs are given by number."""
        if self._program is None or self._run is None:
            return PartRows([], [])
        made = [np.asarray(one) for one in self._run(*given_to(self._program, values, part, self._num_parts), np.uint32(part))]
        found = PartRows([], [])
        for table in self._tables:
            own, made = made[: len(table.reads)], made[len(table.reads) :]
            # Ids outside of the table get a place behind its rows, if they are not clipped.
            ids = [np.clip(one, 0, table.num_rows - 1) if read.clips else one for read, one in zip(table.reads, own, strict=True)]
            inside = [(one >= 0) & (one < table.num_rows) for one in ids]
            unique = np.unique(np.concatenate([one[good] for one, good in zip(ids, inside, strict=True)]))
            found.ids.append(unique)
            for one, good in zip(ids, inside, strict=True):
                found.places.append(np.where(good, np.searchsorted(unique, one), table.num_ids).astype(np.int32))
        return found

    def gathered(self, rows: PartRows, pieces: Sequence[Mapping[int, Array]]) -> dict[int, Array]:
        """Returns the operands that are rows of tables, by the input's number, of those that each server has sent, by the table's."""
        found = {}
        for number, (table, ids) in enumerate(zip(self._tables, rows.ids, strict=True)):
            own = [piece.get(number) for piece in pieces]
            some = next(one for one in own if one is not None)
            whole = np.zeros((table.num_ids, *some.shape[1:]), some.dtype)
            for server, values in enumerate(own):
                if values is not None:
                    whole[: len(ids)][ids % len(pieces) == server] = values
            found[table.number] = whole
        return found

    def pushed(self, rows: PartRows, made: Mapping[str, Any], server: int, num_servers: int) -> dict[str, Rows]:
        """Returns the gradients of rows that a server gets, by slot."""
        found = {}
        for number, places in places_on(rows, server, num_servers).items():
            slot = f"loss/{self._tables[number].result}"
            ids = rows.ids[number]
            found[slot] = Rows(places, made[slot][: len(ids)][ids % num_servers == server])
        return found

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of the step."""
        return self._tables


def places_on(rows: PartRows, server: int, num_servers: int) -> dict[int, Array]:
    """Returns, by the number of the table, which of a server's rows a part reads; row i is row i // n of server i modulo n."""
    return {
        number: (ids[ids % num_servers == server] // num_servers).astype(np.int32 if len(ids) == 0 or ids[-1] < 2**31 else np.int64)
        for number, ids in enumerate(rows.ids)
    }


def given_to(program: WorkerProgram, values: Mapping[int, Any], part: int, num_parts: int) -> list[Any]:
    """Returns the inputs of a program, those of the batch cut for a part."""
    given = []
    for number in program.inputs:
        value, dim = values[number], program.batch_dims.get(number)
        given.append(value if dim is None else value[(*[slice(None)] * dim, slice(part, None, num_parts))])
    return given


def interleaved(pieces: Sequence[Array]) -> Array:
    """Returns a whole array of the rows that each server has."""
    whole = np.empty((sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype)
    for server, piece in enumerate(pieces):
        whole[server :: len(pieces)] = piece
    return whole

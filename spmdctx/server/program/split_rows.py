"""Divides what follows the loss for tables: each server sums over rows of its own, and renews them by a program apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.pipeline.capture.around import Around
from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.row_step import RowStep, row_step
from spmdctx.server.program.rows import Table
from spmdctx.trace.build.jaxprs.equations import renamed, written


class TableCut(NamedTuple):
    """A table, and what renews its rows."""

    table: Table
    step: RowStep


@dataclass
class SplitRows:
    """A step's program around its loss in which no equation reads a whole table.

    Attributes:
        around: the program; after its results it gives the scalars that renew rows.
        tables: the tables.
        server_of: the server of each variable that has rows of a table.
        slot_of: for those that are inputs or results of the loss, the slot.
        table_of: for all of them, the number of the table.
    """

    around: Around
    tables: tuple[TableCut, ...] = ()
    server_of: dict[Any, int] = field(default_factory=dict)
    slot_of: dict[Any, str] = field(default_factory=dict)
    table_of: dict[Any, int] = field(default_factory=dict)


def split_rows(step: ServedStep, around: Around, num_servers: int) -> SplitRows:
    """Returns a program without its tables' equations, but for sums, which become sums of those of all servers."""
    if step.tables is None or not step.tables.tables:
        return SplitRows(around)
    found = SplitRows(around, tuple(TableCut(table, row_step(step, around, table)) for table in step.tables.tables))
    writer = _Writer(found, num_servers)
    after: list[Any] = []
    for eqn in around.after:
        near = {*variables(eqn.invars), *eqn.outvars}
        index = next((at for at, own in enumerate(found.tables) if not near.isdisjoint(own.table.after)), None)
        if index is None:
            after.append(eqn)
        elif eqn.outvars[0] not in found.tables[index].table.after:
            after += writer.summed(eqn, index)
    body = around.jaxpr.jaxpr
    outvars = list(body.outvars)
    for number, leaf in enumerate(step.captured.outputs):
        if leaf.carried_from in step.tables.held:
            outvars[number] = body.invars[leaf.carried_from]
    outvars += dict.fromkeys(var for own in found.tables for var in own.step.scalars)
    info = body.debug_info._replace(result_paths=None)
    whole = body.replace(eqns=[*around.before, around.loss, *after], outvars=outvars, debug_info=info)
    found.around = replace(around, jaxpr=jexc.ClosedJaxpr(whole, around.jaxpr.consts), after=tuple(after))
    return found


class _Writer:
    def __init__(self, found: SplitRows, num_servers: int) -> None:
        self._found, self._count = found, num_servers
        self._names: dict[tuple[int, int], dict[Any, Any]] = {}

    def summed(self, eqn: Any, index: int) -> list[Any]:
        """Returns the equations of a sum over all rows: on each server the sum over its own, and the sum of these."""
        found: list[Any] = []
        partial = []
        for server in range(self._count):
            eqns, names = self._copies(index, server, variables(eqn.invars))
            own = jexc.Var(eqn.outvars[0].aval) if self._count > 1 else eqn.outvars[0]
            found += [*eqns, eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars], outvars=[own])]
            partial.append(own)
        if self._count > 1:
            eqns, (total,) = written(_sum, partial, eqn.source_info)
            eqns[-1] = eqns[-1].replace(outvars=[eqn.outvars[0] if var is total else var for var in eqns[-1].outvars])
            found += eqns
        return found

    def _copies(self, index: int, server: int, wanted: Sequence[Any]) -> tuple[list[Any], Mapping[Any, Any]]:
        """Returns the equations that make some variables on a server, those that are not there yet, and the names of all."""
        around, table = self._found.around, self._found.tables[index].table
        names = self._names.setdefault((index, server), {})
        eqns = []
        for eqn in needed([eqn for eqn in around.after if not table.after.isdisjoint(eqn.outvars)], wanted):
            if all(var in names for var in eqn.outvars):
                continue
            for var in (*variables(eqn.invars), *eqn.outvars):
                self._name(var, index, server)
            eqns.append(eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars], outvars=[names[var] for var in eqn.outvars]))
        for var in wanted:
            self._name(var, index, server)
        return eqns, names

    def _name(self, var: Any, index: int, server: int) -> None:
        found, table = self._found, self._found.tables[index].table
        names = self._names[index, server]
        if var not in table.after or var in names:
            return
        names[var] = own = jexc.Var(var.aval)
        found.server_of[own], found.table_of[own] = server, index
        inputs, results = found.around.jaxpr.jaxpr.invars, found.around.loss.outvars
        if var in inputs:
            found.slot_of[own] = f"in/{inputs.index(var)}"
        elif var in results:
            found.slot_of[own] = f"loss/{results.index(var)}"


def _sum(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total

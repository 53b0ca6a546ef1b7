"""Finds the tables of a step: parameters of which the loss reads rows by ids, and which the optimizer renews row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.pipeline.capture.around import around_of
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import is_array, needed, variables
from spmdctx.rules.elementwise import ELEMENTWISE
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.row_step import is_still, vanishes
from spmdctx.server.program.rows import GATHER, SCATTER, IdsRead, Table, Tables, ids_of, unshared
from spmdctx.trace.build.origins import source_line
from spmdctx.wording import counted


def with_tables(step: ServedStep, asked: Iterable[int] = (), barred: Iterable[int] = ()) -> ServedStep:
    """Returns a step with the tables that it has; notes say why other arrays that it reads by ids are none.

    Args:
        step: as it was captured.
        asked: inputs that are to be tables even if a step reads as many rows as they have.
        barred: inputs that are to be none.

    Raises:
        UnsupportedError: one of these can be none.
    """
    return replace(step, tables=_Finder(step, frozenset(asked), frozenset(barred)).tables())


LEAST_ROWS = 1024
"""Tables have at least so many rows, so that no server is without any."""


def table_notes(step: ServedStep) -> tuple[str, ...]:
    """Returns what a plan says of the tables of a step, and of other arrays that it reads by ids."""
    if step.tables is None:
        return ()
    inputs = step.captured.inputs
    found = []
    for table in step.tables.tables:
        path, state = inputs[table.number].path, len(table.held) - 1
        text = f"'{path}' and {counted(state, 'array')} of its optimizer cross" if state else f"'{path}' crosses"
        text += f" by rows: a part reads at most {table.num_ids} of {table.num_rows}."
        late = "" if table.is_still else " Rows that no step reads change as well: servers do that when they are next read or saved."
        found.append(text + late)
    return (*found, *step.tables.notes)


class _Fault(Exception):
    """An array is no table; says why."""


class _Finder:
    def __init__(self, step: ServedStep, asked: frozenset[int], barred: frozenset[int]) -> None:
        self._step, self._asked, self._barred = step, asked, barred
        around = around_of(step.captured.jaxpr)
        body = around.jaxpr.jaxpr
        after, outvars = unshared(around.after, body.outvars)
        whole = body.replace(eqns=[*around.before, around.loss, *after], outvars=outvars)
        self._around = replace(around, jaxpr=jexc.ClosedJaxpr(whole, around.jaxpr.consts), after=tuple(after))
        part = inlined(step.loss.part)
        eqns, outvars = unshared(part.jaxpr.eqns, part.jaxpr.outvars)
        self._part = jexc.ClosedJaxpr(part.jaxpr.replace(eqns=eqns, outvars=outvars), part.consts)
        self._carried = {leaf.carried_from: index for index, leaf in enumerate(step.captured.outputs) if leaf.carried_from is not None}
        self._inputs = {var: number for number, var in enumerate(body.invars)}

    def tables(self) -> Tables | None:
        found: list[Table] = []
        notes: list[str] = []
        for result, leaf in sorted(self._step.loss.primal_of.items()):
            atom = self._around.loss.invars[leaf]
            is_barred = not isinstance(atom, jexc.Literal) and self._inputs.get(atom) in self._barred
            if is_barred or not _is_read_by_ids(self._part.jaxpr.eqns, self._part.jaxpr.invars[leaf]):
                continue
            try:
                found.append(self._table(result, leaf))
            except _Fault as fault:
                notes.append(f"'{self._step.loss.paths[leaf]}' is read by ids, and crosses whole: {fault}.")
        shared = {number for table in found for number in table.held if sum(number in other.held for other in found) > 1}
        found = [table for table in found if shared.isdisjoint(table.held)]
        return Tables(self._around, self._part, tuple(found), tuple(notes)) if found or notes else None

    def _table(self, result: int, leaf: int) -> Table:
        around, loss = self._around, self._around.loss
        atom = loss.invars[leaf]
        number = None if isinstance(atom, jexc.Literal) else self._inputs.get(atom)
        if number is None or number not in self._carried:
            raise _Fault("it is no state of the step")
        if sum(one is atom for one in loss.invars) > 1 or any(atom in eqn.invars for eqn in around.before):
            raise _Fault("the step reads it in another place, too")
        num_rows = atom.aval.shape[0]
        if num_rows < LEAST_ROWS:
            raise _Fault(f"it has {num_rows} rows, fewer than {LEAST_ROWS}")
        in_part, reads = self._in_part(result, leaf)
        num_ids = sum(math.prod(read.var.aval.shape[:-1]) for read in reads)
        if num_ids * self._step.loss.num_parts >= num_rows and number not in self._asked:
            raise _Fault(f"a step reads up to {num_ids * self._step.loss.num_parts} rows of its {num_rows}")
        after = self._after(atom, loss.outvars[result])
        held = (number, *sorted(own for var in after if (own := self._inputs.get(var)) is not None and own != number))
        table = Table(number, leaf, result, num_rows, min(num_ids, num_rows), reads, held, in_part, after)
        self._check_state(table)
        return replace(table, is_still=is_still(self._step, around, table))

    def _in_part(self, result: int, leaf: int) -> tuple[frozenset[Any], tuple[IdsRead, ...]]:
        """Returns the variables of a part that have the rows of a leaf, and the ids by which it is read."""
        body = self._part.jaxpr
        first, last = body.invars[leaf], body.outvars[result]
        if isinstance(last, jexc.Literal):
            raise _Fault("its gradient is constant")
        rows = _spread({first, last}, body.eqns, _parted)
        reads: dict[IdsRead, None] = {}
        for eqn in body.eqns:
            if _touches(eqn, rows):
                ids = _checked_in_part(eqn, rows, body.invars)
                reads |= {} if ids is None else {ids: None}
        if sum(atom in rows for atom in variables(body.outvars)) > 1:
            raise _Fault("the loss gives rows of it back")
        if any(var in rows for index, var in enumerate(body.invars) if index != leaf):
            raise _Fault("the loss combines it with another argument")
        made = needed(body.eqns, [read.var for read in reads])
        read = {var for eqn in made for var in variables(eqn.invars)} | {one.var for one in reads}
        others = {body.invars[own] for own in self._step.loss.primal_of.values()}
        if not read.isdisjoint(others):
            raise _Fault("its ids depend on parameters")
        return frozenset(rows), tuple(reads)

    def _after(self, atom: Any, gradient: Any) -> frozenset[Any]:
        """Returns the variables after the loss that have a table's rows."""
        body = self._around.jaxpr.jaxpr
        eqns = self._around.after
        rows = {atom, gradient}
        size = 0
        while size != len(rows):
            size = len(rows)
            rows = _spread(rows, eqns, lambda _: ())
            for var in [var for var in rows if self._inputs.get(var) in self._carried]:
                following = body.outvars[self._carried[self._inputs[var]]]
                rows |= set() if isinstance(following, jexc.Literal) else {following}
        zero = vanishes(eqns, gradient)
        for eqn in eqns:
            if _touches(eqn, rows):
                _check_after(eqn, rows, zero)
        return frozenset(rows)

    def _check_state(self, table: Table) -> None:
        body, around = self._around.jaxpr.jaxpr, self._around
        inputs = self._step.captured.inputs
        for var in table.after:
            number = self._inputs.get(var)
            if number is not None and number not in self._carried:
                raise _Fault(f"its update reads {inputs[number].path}, which is no state")
            if var in body.constvars:
                raise _Fault("its update reads a constant array")
            if number not in (None, table.number) and any(var in eqn.invars for eqn in (*around.before, around.loss)):
                raise _Fault(f"the loss reads {inputs[number].path} of its update")
            if number is None and var is not around.loss.outvars[table.result] and not any(var in eqn.outvars for eqn in around.after):
                raise _Fault("its update reads an array that is made before the loss")
        own = {self._carried[number] for number in table.held}
        for index, out in enumerate(body.outvars):
            if not isinstance(out, jexc.Literal) and out in table.after and index not in own:
                raise _Fault(f"the step gives its rows back as {self._step.captured.outputs[index].path}")
        for index in own:
            if isinstance(body.outvars[index], jexc.Literal) or body.outvars[index] not in table.after:
                raise _Fault("its next value does not depend on it")


def _is_read_by_ids(eqns: Sequence[Any], leaf: Any) -> bool:
    """Returns whether a gather reads a leaf, or what is made of it element by element."""
    own = {leaf}
    for eqn in eqns:
        if own.isdisjoint(variables(eqn.invars)):
            continue
        if eqn.primitive.name == GATHER:
            return True
        own.update(eqn.outvars if eqn.primitive.name in ELEMENTWISE and eqn.outvars[0].aval.shape == leaf.aval.shape else ())
    return False


def _spread(rows: set[Any], eqns: Sequence[Any], ends: Any) -> set[Any]:
    """Adds all arrays that some rows meet in equations that keep rows apart."""
    rows, size = set(rows), 0
    while size != len(rows):
        size = len(rows)
        for eqn in (*eqns, *reversed(eqns)):
            if not _touches(eqn, rows):
                continue
            arrays = [var for var in (*variables(eqn.invars), *eqn.outvars) if is_array(var)]
            if eqn.primitive.name in (GATHER, SCATTER):
                arrays = [var for var in _parted(eqn) if is_array(var)]
            elif eqn.primitive.name not in _KEEP_ROWS or (eqn.primitive.name in _ROW_REDUCTIONS and 0 in eqn.params["axes"]):
                continue
            rows.update(arrays)
    return rows


def _parted(eqn: Any) -> list[Any]:
    """Returns what has rows of a gather or a scatter."""
    return variables(eqn.invars[:1]) + (list(eqn.outvars) if eqn.primitive.name == SCATTER else [])


_ROW_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_KEEP_ROWS = frozenset({*ELEMENTWISE, *_ROW_REDUCTIONS, "broadcast_in_dim", "reshape", "squeeze", "transpose", "optimization_barrier"})


def _touches(eqn: Any, rows: set[Any]) -> bool:
    return any(var in rows for var in (*variables(eqn.invars), *eqn.outvars))


def _fault_of(eqn: Any, what: str) -> _Fault:
    where = source_line(eqn.source_info)
    return _Fault(f"{what} ({eqn.primitive.name}{f' at {where}' if where else ''})")


def _checked_in_part(eqn: Any, rows: set[Any], leaves: Sequence[Any]) -> IdsRead | None:
    """Checks an equation of a part; returns the ids of a gather or scatter.

    Raises:
        _Fault: it does more than to take rows.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in (GATHER, SCATTER):
        numbers = params["dimension_numbers"]
        is_gather = name == GATHER
        dims = (numbers.collapsed_slice_dims, numbers.start_index_map) if is_gather else None
        dims = dims or (numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims)
        first = eqn.invars[0]
        is_whole = not is_gather or params["slice_sizes"] == (1, *first.aval.shape[1:])
        is_whole = is_whole and dims == ((0,), (0,)) and not numbers.operand_batching_dims and params["mode"] in _ID_MODES
        others = [var for var in variables(eqn.invars[1:]) if var in rows]
        if not is_whole or others or first not in rows or isinstance(eqn.invars[1], jexc.Literal) or (is_gather and eqn.outvars[0] in rows):
            raise _fault_of(eqn, "the loss reads more of it than rows")
        return ids_of(eqn)
    if name in _ROW_REDUCTIONS or not _keeps(eqn, rows):
        raise _fault_of(eqn, "the loss reads more of it than rows")
    return None


_ID_MODES = (jax.lax.GatherScatterMode.FILL_OR_DROP, jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _check_after(eqn: Any, rows: set[Any], zero: set[Any]) -> None:
    """Checks an equation after the loss.

    Raises:
        _Fault: it mixes rows.
    """
    if eqn.primitive.name == "reduce_sum" and 0 in eqn.params["axes"]:
        if is_array(eqn.outvars[0]) or eqn.invars[0] not in zero:
            raise _fault_of(eqn, "what follows the loss sums more of it than its gradient")
    elif not _keeps(eqn, rows):
        raise _fault_of(eqn, "what follows the loss mixes its rows")


def _keeps(eqn: Any, rows: set[Any]) -> bool:
    """Returns whether row by row an equation makes rows of rows, and of scalars."""
    name, params = eqn.primitive.name, eqn.params
    operands, results = variables(eqn.invars), eqn.outvars
    if name not in _KEEP_ROWS or eqn.effects or not all(var in rows for var in (*operands, *results) if is_array(var)):
        return False
    count = next(var.aval.shape[0] for var in (*operands, *results) if var in rows)
    if not all(var.aval.shape[:1] == (count,) for var in (*operands, *results) if is_array(var)):
        return False
    if name in _ROW_REDUCTIONS:
        return 0 not in params["axes"]
    if name == "broadcast_in_dim":
        return not operands or not is_array(operands[0]) or tuple(params["broadcast_dimensions"])[:1] == (0,)
    if name == "transpose":
        return bool(params["permutation"][0] == 0)
    return name != "squeeze" or 0 not in params["dimensions"]

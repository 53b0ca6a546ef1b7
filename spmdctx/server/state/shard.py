"""One server's arrays and programs: parts of gradients come in, and when all are there the arrays are renewed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx.server.program.rows import Rows
from spmdctx.server.program.spec import Join, ServerSpec
from spmdctx.server.state.table import RowTable, Touched

Values = dict[str, Any]
Exchange = Callable[[int, Values, tuple[str, ...]], Mapping[str, Any]]
"""Sends values to other servers, by the number of the exchange, and returns those that are awaited."""


class Shard:
    """The state of one server at one version.

    Args:
        spec: what it does.
        values: the arrays that it holds, by slot; of tables its own rows.
        version: updates done.
        former: one whose compiled programs serve if they are the same.
    """

    def __init__(self, spec: ServerSpec, values: Mapping[str, Any], version: int, former: Shard | None = None) -> None:
        self.spec, self.version = spec, version
        self.tables = [RowTable(own, {slot: values[slot] for slot in own.held}, version) for own in spec.tables]
        self.values: Values = {slot: jnp.asarray(values[slot]) for slot in spec.held}
        self.results: dict[int, Any] = {}
        self._run: list[Any] = []
        if former is not None and former.spec.rounds == spec.rounds:
            self._run = former._run
        else:
            self._run = [None if own is None else jax.jit(jax.export.deserialize(bytearray(own.blob)).call) for own in spec.rounds]
        self._waiting: dict[int, Values] = {}
        self._sums: Values = {}
        self._given: Values = {}
        self._rows: dict[str, list[Rows]] = {}
        self._next = 0
        self._read: set[str] = set()
        self._before: Values = {}
        self._kept: dict[int, Values] = {}
        self._lock = threading.Lock()

    def add(self, step: int, part: int, values: Mapping[str, Any]) -> bool:
        """Takes the values of one part of a step; returns whether all parts are there.

        The same part a second time changes nothing, nor does one of another step than the next. Parts are added in their order, so that
        a sum does not depend on who is the first.
        """
        with self._lock:
            if step != self.version:
                return False
            if part >= self._next and part not in self._waiting:
                self._waiting[part] = dict(values)
                while self._next in self._waiting:
                    self._take(self._waiting.pop(self._next))
                    self._next += 1
            return self._next == self.spec.num_parts

    def _take(self, values: Values) -> None:
        for table in self.spec.tables:
            self._rows.setdefault(table.gradient, []).append(values[table.gradient])
        for slot, join in self.spec.joins.items():
            if join.kind == "stack":
                self._sums.setdefault(slot, []).append(values[slot])
            elif join.kind == "mean":
                own = jnp.asarray(values[slot], join.sum_dtype)
                self._sums[slot] = own if slot not in self._sums else _added(self._sums[slot], own)
            else:
                self._sums[slot] = values[slot]
        if self._next == 0:
            self._given = {slot: values[slot] for slot in self.spec.given}

    def renew(self, exchange: Exchange) -> None:
        """Runs the programs on the whole results, and takes over the next values; the version is one more then."""
        spec = self.spec
        held: Values = {**self.values, **self._given, **{slot: _whole(join, self._sums[slot], spec) for slot, join in spec.joins.items()}}
        touched = self._touched(self._rows, held)
        for number, (program, own) in enumerate(zip((*self._run, None), (*spec.rounds, None), strict=True)):
            if spec.posts[number] or spec.awaits[number]:
                held.update(exchange(number, {slot: np.asarray(held[slot]) for slot in spec.posts[number]}, spec.awaits[number]))
            if program is not None and own is not None:
                held.update(zip(own.outputs, program(*(held[slot] for slot in own.inputs)), strict=True))
        self._take_over(held, touched)

    def _touched(self, rows: Mapping[str, list[Rows]], held: Values) -> list[Touched]:
        """Returns, for each table, the rows that are renewed; `held` takes them."""
        found = []
        for table in self.tables:
            gradient = table.spec.gradient
            own = table.touched(rows[gradient], len(rows[gradient]))
            held.update(zip(table.spec.held, own.held, strict=True))
            held[gradient] = own.gradient
            found.append(own)
        return found

    def _take_over(self, held: Values, touched: Sequence[Touched]) -> None:
        spec = self.spec
        renewed = {slot: held[after] if isinstance(after, str) else after for slot, after in spec.renewed.items()}
        renewed = {slot: jnp.asarray(value) for slot, value in renewed.items()}
        jax.block_until_ready(list(renewed.values()))
        for table, own in zip(self.tables, touched, strict=True):
            table.renew(own, held)
        with self._lock:
            self._before = {slot: self.values[slot] for slot in self._read}
            if spec.kept:
                self._kept[self.version] = {slot: held[slot] for slot in spec.kept}
            self.values = renewed
            self.results = {number: np.asarray(held[slot]) for number, slot in spec.results.items()}
            self._waiting, self._sums, self._given, self._rows, self._next = {}, {}, {}, {}, 0
            self.version += 1

    def update(self, values: Mapping[str, Any]) -> None:
        """Renews the arrays by the values of one part alone, among them those that servers would else send each other."""
        spec = self.spec
        held = {**self.values, **values}
        touched = self._touched({table.gradient: [values[table.gradient]] for table in spec.tables}, held)
        for program, own in zip(self._run, spec.rounds, strict=True):
            if program is not None and own is not None:
                made = zip(own.outputs, program(*(held[slot] for slot in own.inputs)), strict=True)
                # All servers go on with what the worker says, so that what they compute alike stays alike.
                held.update({slot: value for slot, value in made if slot not in values})
        self._take_over(held, touched)

    def assign(self, version: int, values: Mapping[str, Any]) -> None:
        """Takes over arrays in place of those of a version, of tables this server's rows; later ones stay as they are."""
        with self._lock:
            if version != self.version:
                return
            for table in self.tables:
                table.assign(version, {slot: value for slot, value in values.items() if slot in table.spec.held})
            own = {slot: jnp.asarray(value) for slot, value in values.items() if slot in self.spec.held}
            self.values = {**self.values, **own}

    def pull(self, slots: Sequence[str], version: int | None = None) -> tuple[int, list[np.ndarray[Any, Any]]] | None:
        """Returns the version and arrays as they are now, or those of a version: the present one or the one before, else None.

        Another server may be one version behind, and a worker may still need what belongs to that one.
        """
        with self._lock:
            self._read.update(slots if version is not None else ())
            if version is None or version == self.version:
                found, values = self.version, self.values
            elif version == self.version - 1 and self._before.keys() >= set(slots):
                found, values = version, self._before
            else:
                return None
            own = [values[slot] if slot in values else self._of_tables(slot) for slot in slots]
        return found, [np.asarray(value) for value in own]

    def pull_rows(self, places: Mapping[int, np.ndarray[Any, Any]], version: int | None = None) -> dict[int, np.ndarray[Any, Any]] | None:
        """Returns rows of tables by the number of the table, as they are now or in a version; None if this is there no more."""
        found = {}
        for number, own in places.items():
            rows = self.tables[number].pull(own, version)
            if rows is None:
                return None
            found[number] = rows
        return found

    def kept(self, first: int, last: int) -> list[dict[str, np.ndarray[Any, Any]]] | None:
        """Returns what workers take of the steps from one up to another; None if one of these is there no more."""
        with self._lock:
            found = [self._kept.get(step) if self.spec.kept else {} for step in range(first, last)]
        if any(own is None for own in found):
            return None
        return [{slot: np.asarray(value) for slot, value in own.items()} for own in found if own is not None]

    def forget(self, version: int) -> None:
        """Drops what is kept of the steps before a version, which is saved."""
        with self._lock:
            self._kept = {step: own for step, own in self._kept.items() if step >= version}

    def _of_tables(self, slot: str) -> np.ndarray[Any, Any]:
        return next(table.read(slot) for table in self.tables if slot in table.spec.held)

    def saved(self) -> Values:
        """Returns the arrays as they are now, by slot; those of tables change with the next update."""
        found = dict(self.values)
        for table in self.tables:
            found.update(table.arrays())
        return found


@jax.jit
def _added(total: Any, own: Any) -> Any:
    return total + own


def _whole(join: Join, found: Any, spec: ServerSpec) -> Any:
    if join.kind == "mean":
        return (found / spec.num_parts).astype(join.dtype)
    if join.kind == "stack":
        stacked = np.stack([np.asarray(one) for one in found], join.dim + 1)
        return stacked.reshape((*stacked.shape[: join.dim], -1, *stacked.shape[join.dim + 2 :]))
    return found

"""The pool of interned arrays: equal costs get one number, so that repeated structure is computed once."""

from __future__ import annotations

from math import prod

import numpy as np

from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.search.solver.problem.allowance import CALL, Allowance
from spmdctx.search.solver.problem.groups import Groups, content_hash, grouped
from spmdctx.search.solver.problem.join import least

MAX_COMPARED = 1 << 16
"""Entries up to which results are compared with known ones."""
_PLAIN = 64
"""Entries up to which an array is its own key."""
_SMALL = 1 << 14
"""Additions up to which a minimum is taken at once."""
_WIDE = 1 << 18
"""Additions from which a minimum is taken by groups."""


class Pool:
    """Arrays by number. Operations on them are memoised by the numbers of their operands.

    `arrays[i]` is the array of number i; no array changes after it is added. All work on them is charged to the allowance.
    """

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.allowance = Allowance() if allowance is None else allowance
        self.arrays: list[FloatArray] = []
        self._objects: dict[int, int] = {}
        self._held: list[FloatArray] = []
        self._contents: dict[tuple[tuple[int, ...], bytes | int], int] = {}
        self._groups: dict[int, Groups | None] = {}
        self._transposed: dict[int, int] = {}
        self._totals: dict[tuple[int, int], int] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._selected: dict[tuple[int, int, int], int] = {}
        self._finite: dict[int, BoolArray | None] = {}
        self._supports: dict[int, BoolArray | None] = {}
        self._worst: dict[int, FloatArray] = {}
        self._worst_lines: dict[int, FloatArray] = {}
        self._parts: dict[int, tuple[int, int] | None] = {}
        self._best: dict[tuple[int, ...], tuple[int, float]] = {}
        self._choices: dict[bytes, int] = {}
        self.choices: list[IntArray] = []

    def new(self, array: FloatArray) -> int:
        """Adds an array without comparing it to the others."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def intern(self, array: FloatArray) -> int:
        """Returns the number of an array, the same for equal contents."""
        data = np.ascontiguousarray(array)
        self.allowance.charge(data.size + CALL)
        if data.size <= _PLAIN:
            return self._known((data.shape, data.tobytes()), data)
        value = content_hash(data)
        # Another array may have the same hash.
        while not _same(self.arrays[self._known((data.shape, value), data)], data):
            value += 1
        return self._contents[data.shape, value]

    def _known(self, key: tuple[tuple[int, ...], bytes | int], data: FloatArray) -> int:
        """Returns the number of a key, a new one if no array has the key."""
        number = self._contents.get(key)
        if number is None:
            number = self._contents[key] = self.new(data)
        return number

    def intern_object(self, array: FloatArray) -> int:
        """Interns like `intern`, but looks at the contents of one object only once."""
        number = self._objects.get(id(array))
        if number is None:
            number = self._objects[id(array)] = self.intern(np.asarray(array, dtype=np.float64))
            # If an object dies, another array may get its address.
            self._held.append(array)
        return number

    def transposed(self, number: int) -> int:
        """Returns the number of the transposed table."""
        found = self._transposed.get(number)
        if found is None:
            found = self.new(np.ascontiguousarray(self.arrays[number].T))
            self._transposed[number], self._transposed[found] = found, number
        return found

    def groups(self, number: int) -> Groups | None:
        """Returns the equal rows and columns of a table; None if there are few."""
        if number not in self._groups:
            other = self._transposed.get(number, -1)
            if other in self._groups:
                known = self._groups[other]
                self._groups[number] = None if known is None else known.transposed()
            else:
                self._groups[number] = grouped(self.arrays[number])
        return self._groups[number]

    def total(self, first: int, second: int) -> int:
        """Returns the number of the sum of two arrays of one shape."""
        key = (first, second) if first <= second else (second, first)
        found = self._totals.get(key)
        if found is None:
            found = self._totals[key] = self.new(self.arrays[first] + self.arrays[second])
        return found

    def row(self, number: int, state: int) -> int:
        """Returns the number of one row of a table."""
        found = self._rows.get((number, state))
        if found is None:
            found = self._rows[number, state] = self.intern(self.arrays[number][state])
        return found

    def lowered(self, array: FloatArray) -> tuple[int, float]:
        """Returns the number of an array less its least entry, and that entry.

        Results that differ by a constant are then one array.
        """
        lowest = float(array.min())
        if not np.isfinite(lowest):
            return self.new(array), 0.0
        array = array - lowest
        return (self.intern(array) if array.size <= MAX_COMPARED else self.new(array)), lowest

    def best(self, unary: int, tables: tuple[int, ...]) -> tuple[int, float]:
        """Returns the minimum over x of `unary[x] + tables[0][x, i] + tables[1][x, j]`, for one or two tables, as `lowered`."""
        key = (unary, *tables)
        found = self._best.get(key)
        if found is None:
            found = self._best[key] = self.lowered(self._least(self.arrays[unary], [self.arrays[table] for table in tables], tables))
        return found

    def _least(self, costs: FloatArray, arrays: list[FloatArray], tables: tuple[int, ...]) -> FloatArray:
        """Forms the minimum for `best`; equal columns of a table are formed once."""
        self.allowance.charge(CALL + costs.size * prod(array.shape[1] for array in arrays))
        groups = [None] * len(tables) if costs.size * prod(array.shape[1] for array in arrays) < _WIDE else [*map(self.groups, tables)]
        for place, own in enumerate(groups):
            if own is not None:
                arrays[place] = arrays[place].take(own.columns.firsts(), axis=1)
        found = _least_of_small(costs, arrays)
        if found is None:
            found = least([((-1,), costs), *(((-1, place), array) for place, array in enumerate(arrays))], len(tables))
        for place, own in enumerate(groups):
            if own is not None:
                found = found.take(own.columns.of, axis=place)
        return found

    def choice(self, states: IntArray) -> int:
        """Returns the number of a list of states."""
        key = states.tobytes()
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = len(self.choices)
            self.choices.append(states)
        return found

    def selected(self, number: int, left: int, right: int) -> int:
        """Returns the number of a table reduced to the rows `left` and columns `right` (numbers of choices; -1 keeps all)."""
        key = (number, left, right)
        found = self._selected.get(key)
        if found is None:
            array = self.arrays[number]
            if left >= 0:
                array = array.take(self.choices[left], axis=0)
            if right >= 0:
                array = array.take(self.choices[right], axis=1)
            found = self._selected[key] = self.intern(array)
        return found

    def finite(self, number: int) -> BoolArray | None:
        """Finds the finite entries of costs; returns None if all are."""
        if number not in self._finite:
            finite: BoolArray = np.isfinite(self.arrays[number])
            self._finite[number] = None if finite.all() else finite
        return self._finite[number]

    def support(self, number: int) -> BoolArray | None:
        """Finds the rows of a table that have a finite entry; returns None if all have."""
        if number not in self._supports:
            finite: BoolArray = np.any(np.isfinite(self.arrays[number]), axis=1)
            self._supports[number] = None if finite.all() else finite
        return self._supports[number]

    def worst(self, number: int) -> FloatArray:
        """Returns `D[a, b]`: the most that row a of a table can cost beyond row b. Rows must have a finite entry."""
        found = self._worst.get(number)
        if found is None:
            found = self._worst[number] = self._worst_of(self.arrays[number])
        return found

    def lines(self, number: int) -> tuple[FloatArray, IntArray]:
        """Returns a table without most of its equal rows and columns, and the row there of each of its rows."""
        groups = self.groups(number)
        if groups is None:
            return self.arrays[number], np.arange(len(self.arrays[number]))
        return groups.small, groups.rows.of

    def worst_of_lines(self, number: int) -> FloatArray:
        """Returns `worst` for the rows of `lines`."""
        groups = self.groups(number)
        if groups is None:
            return self.worst(number)
        found = self._worst_lines.get(number)
        if found is None:
            found = self._worst_lines[number] = self._worst_of(groups.small)
        return found

    def _worst_of(self, table: FloatArray) -> FloatArray:
        self.allowance.charge(len(table) * (table.size + CALL))
        # If b is forbidden, a is never worse; if both are, their difference is no number, and the other columns decide.
        lower = np.where(np.isinf(table), -np.inf, -table).T.copy()
        found, sums = np.empty((len(table), len(table))), np.empty_like(lower)
        with np.errstate(invalid="ignore"):
            for state, row in enumerate(table):
                np.add(row[:, None], lower, out=sums)
                (np.maximum if np.isfinite(row).all() else np.fmax).reduce(sums, axis=0, out=found[state])
        return found

    def parts(self, number: int) -> tuple[int, int] | None:
        """Returns the numbers of both if a table is exactly `rows[i] + columns[j]`, else None."""
        if number not in self._parts:
            table = self.arrays[number]
            with np.errstate(invalid="ignore"):
                rows, columns = table[:, 0], table[0] - table[0, 0]
                split = bool(((rows[:, None] + columns) == table).all())
            self._parts[number] = (self.intern(rows), self.intern(columns)) if split else None
        return self._parts[number]


def _least_of_small(costs: FloatArray, arrays: list[FloatArray]) -> FloatArray | None:
    """Returns the minimum that `least` forms of one or two tables, in the same order; None if they are not small."""
    if costs.size * prod([array.shape[1] for array in arrays]) > _SMALL:
        return None
    if len(arrays) == 1:
        found: FloatArray = np.minimum.reduce(costs[:, None] + arrays[0], axis=0)
        return found
    first, second = arrays
    if first.size <= second.size:
        found = np.minimum.reduce((costs[:, None] + first)[:, :, None] + second[:, None, :], axis=0)
    else:
        found = np.minimum.reduce((costs[:, None] + second)[:, None, :] + first[:, :, None], axis=0)
    return found


def _same(first: FloatArray, second: FloatArray) -> bool:
    """Returns whether two arrays of one shape are equal to the last bit."""
    return first is second or np.array_equal(first.view(np.uint64), second.view(np.uint64))

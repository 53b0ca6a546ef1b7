"""Sums of tables over few variables each, minimised over all values of all variables.

    least(v) = min over x_v of  sum of the tables that hold v   — a new table over the other variables in them

Variables are taken out one after the other by this rule, which holds for any tables; then their values are found in reverse.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.errors import UnsupportedError
from spmdctx.ir.arrays import FloatArray

Variable = Hashable

LARGEST = 1 << 24
"""Entries of the largest table; more would take too long."""

MOST_CHOICES = 1 << 13
"""Partial choices that are looked at in the order of their cost."""


class Table(NamedTuple):
    """Seconds for every combination of values of its variables."""

    variables: tuple[Variable, ...]
    seconds: FloatArray


class _Taken(NamedTuple):
    """A variable that was taken out: the sum of its tables, the variable last."""

    variable: Variable
    others: tuple[Variable, ...]
    seconds: FloatArray


class Elimination:
    """Variables and tables. Add all of them first, then ask."""

    def __init__(self) -> None:
        self._sizes: dict[Variable, int] = {}
        self._tables: list[Table] = []

    def add_variable(self, variable: Variable, size: int) -> None:
        """A variable with the values 0 to `size` - 1."""
        self._sizes[variable] = size

    def add_table(self, variables: Sequence[Variable], seconds: FloatArray) -> None:
        """A table with one dimension per variable; a variable may be in it twice."""
        distinct = tuple(dict.fromkeys(variables))
        if len(distinct) < len(variables):
            letters = {variable: chr(ord("a") + number) for number, variable in enumerate(distinct)}
            seconds = np.einsum("".join(letters[one] for one in variables) + "->" + "".join(letters.values()), seconds)
        self._tables.append(Table(distinct, seconds))

    def least(self) -> tuple[float, dict[Variable, int]]:
        """The least sum, and values that give it; infinite where there are none.

        Raises:
            UnsupportedError: a table would be too large.
        """
        least_s, taken = self._take_out()
        values: dict[Variable, int] = {}
        for one in reversed(taken):
            values[one.variable] = int(_row(one, values).argmin())
        return least_s, values

    def in_order(
        self, first: Sequence[Variable], may_do: Callable[[Mapping[Variable, int]], bool]
    ) -> Iterator[tuple[float, dict[Variable, int]]]:
        """The choices of finite sum, the cheapest first.

        Args:
            first: the variables whose values are chosen before all others.
            may_do: whether a choice of values of some variables is worth to be completed.

        Raises:
            UnsupportedError: too many were asked for.
        """
        least_s, taken = self._take_out(frozenset(first))
        if not math.isfinite(least_s):
            return
        order = taken[::-1]
        queue: list[tuple[float, int, tuple[int, ...]]] = [(least_s, 0, ())]
        looked_at = 0
        while queue:
            cost_s, depth, chosen = heapq.heappop(queue)
            values = {one.variable: value for one, value in zip(order, chosen, strict=False)}
            if not may_do(values):
                continue
            if -depth == len(order):
                yield cost_s, values
                continue
            looked_at += 1
            if looked_at > MOST_CHOICES:
                raise UnsupportedError(f"More than {MOST_CHOICES} choices do not fit the memory.", fix="use dynamic_programming")
            row = _row(order[-depth], values)
            for value, more_s in enumerate((row - row.min()).tolist()):
                if math.isfinite(more_s):
                    heapq.heappush(queue, (cost_s + more_s, depth - 1, (*chosen, value)))

    def _take_out(self, last: frozenset[Variable] = frozenset()) -> tuple[float, list[_Taken]]:
        """The least sum, and the variables in the order in which they were taken out, those of `last` after all others."""
        holding: dict[Variable, list[Table]] = {variable: [] for variable in self._sizes}
        for table in self._tables:
            for variable in table.variables:
                holding[variable].append(table)
        left = {variable: self._entries(variable, tables) for variable, tables in holding.items()}
        taken: list[_Taken] = []
        constant = 0.0
        while left:
            variable = min(left, key=lambda one: (one in last, left[one]))
            if left.pop(variable) > LARGEST:
                raise UnsupportedError(
                    f"The graph is too large to try everything: {self._entries(variable, holding[variable])} combinations at once.",
                    need=f"at most {LARGEST}",
                    fix="use dynamic_programming",
                )
            tables = holding.pop(variable)
            others = tuple(dict.fromkeys(one for table in tables for one in table.variables if one != variable))
            total = np.zeros([*(self._sizes[one] for one in others), self._sizes[variable]])
            for table in tables:
                total = total + _spread(table, (*others, variable))
            taken.append(_Taken(variable, others, total))
            least = Table(others, total.min(axis=-1))
            constant += 0.0 if others else float(least.seconds)
            for one in others:
                holding[one] = [*(table for table in holding[one] if variable not in table.variables), least]
                left[one] = self._entries(one, holding[one])
        return constant, taken

    def _entries(self, variable: Variable, tables: Sequence[Table]) -> int:
        """Entries of the sum of all tables that hold a variable."""
        return math.prod(self._sizes[one] for one in {variable, *(one for table in tables for one in table.variables)})


def _spread(table: Table, variables: tuple[Variable, ...]) -> FloatArray:
    """The table with its dimensions in the order of `variables`, of size 1 where it does not have one."""
    order = sorted(range(len(table.variables)), key=lambda dim: variables.index(table.variables[dim]))
    seconds = table.seconds.transpose(order)
    sizes = iter(seconds.shape)
    return seconds.reshape([next(sizes) if one in table.variables else 1 for one in variables])


def _row(taken: _Taken, values: Mapping[Variable, int]) -> FloatArray:
    """Seconds per value of a variable, given those of the variables taken out later."""
    row: FloatArray = taken.seconds[tuple(values[one] for one in taken.others)]
    return row

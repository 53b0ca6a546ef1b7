"""Sequences of a plan's rows that are made when they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Generic, TypeVar, overload

Row = TypeVar("Row")


class Rows(Sequence[Row], Generic[Row]):
    """A sequence that makes its rows one by one."""

    __slots__ = ()

    @abstractmethod
    def row(self, index: int) -> Row:
        """Returns the row at a place."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple([self.row(place) for place in range(*index.indices(len(self)))])
        return self.row(index)


class LazyRows(Rows[Row]):
    """Rows equal to the tuple of what `find` finds.

    `find` is called once, when the first row is read, because it walks through the whole program.
    """

    def __init__(self, find: Callable[[], Iterable[Row]]) -> None:
        self._find = find

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        return tuple(self._find())

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Returns the row at a place."""
        return self._rows[index]

    def __eq__(self, other: object) -> bool:
        return self._rows == tuple(other) if isinstance(other, (LazyRows, tuple)) else NotImplemented

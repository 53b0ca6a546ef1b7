"""Rows of a plan that take a walk through the whole program: found when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Generic, TypeVar, overload

Row = TypeVar("Row")


class LateRows(Sequence[Row], Generic[Row]):
    """A sequence that is equal to the tuple of what `find` finds, which is called once."""

    def __init__(self, find: Callable[[], Iterable[Row]]) -> None:
        self._find = find

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        return tuple(self._find())

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self._rows[index]

    def __eq__(self, other: object) -> bool:
        return self._rows == tuple(other) if isinstance(other, (LateRows, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal by content, which is found late

"""Checks of data that a file holds: small functions, made for a form and put together; each refuses what has another form.

Messages cut the values that they show, and a check takes no more time than reading did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmdctx.errors import shown

Form = Callable[[Any], object]
"""Takes a value; raises ValueError if it has another form."""

_MOST = 1 << 63
"""No count, size or number of bytes is larger."""
_MOST_NUMBER = 1e30


def check_at(place: str, check: Form, value: Any) -> None:
    """Checks a part, and names it in the error."""
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def text(value: Any) -> None:
    """Accepts a string."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")


def integer(low: int, high: int = _MOST) -> Form:
    """Makes a check that accepts an int from `low` to `high`."""

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{shown(value)} is no whole number from {low} to {high}")

    return check


def anything(value: Any) -> None:
    """Accepts any value."""


def number(value: Any) -> None:
    """Accepts a finite number of no more than 1e30."""
    if type(value) not in (int, float) or not -_MOST_NUMBER <= value <= _MOST_NUMBER:
        raise ValueError(f"{shown(value)} is no number from -1e30 to 1e30")


def list_of(check: Form) -> Form:
    """Makes a check that accepts a list whose parts pass one check."""

    def whole(value: Any) -> None:
        if not isinstance(value, list):
            raise ValueError(f"{shown(value)} is no list")
        for part in value:
            check(part)

    return whole


def row_of(*checks: Form) -> Form:
    """Makes a check that accepts a list of so many parts, each of which passes its own check."""

    def row(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"{shown(value)} is no row of {len(checks)} parts")
        for check, part in zip(checks, value, strict=True):
            check(part)

    return row


def parts_of(**checks: Form) -> Form:
    """Makes a check that accepts a mapping of just these names, whose values pass the check of their name."""

    def parts(value: Any) -> None:
        if not isinstance(value, dict) or set(value) != set(checks):
            got = shown(sorted(value)) if isinstance(value, dict) else shown(value)
            raise ValueError(f"{got}, and not the parts {', '.join(checks)}")
        for name, check in checks.items():
            check_at(name, check, value[name])

    return parts


def or_none(check: Form) -> Form:
    """Makes a check that accepts None too."""
    return lambda value: None if value is None else check(value)


def among(known: Sequence[object]) -> Form:
    """Makes a check that accepts one of these values."""

    def check(value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in known):
            raise ValueError(f"{shown(value)} is none of {', '.join(map(str, known))}")

    return check


def number_of(rows: Sequence[Any]) -> Form:
    """Makes a check that accepts the number of a row that is there."""
    return integer(0, len(rows) - 1)


def as_long_as(other: Sequence[Any]) -> Form:
    """Makes a check that accepts a list of as many parts."""

    def check(value: Sequence[Any]) -> None:
        if len(value) != len(other):
            raise ValueError(f"{len(value)} entries, and not {len(other)}")

    return check

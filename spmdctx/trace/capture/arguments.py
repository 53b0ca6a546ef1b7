"""The arguments of a call: which are static, donated or batch, by position or by name, and the name of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdctx.errors import ContextError, message, shown

Positions = int | Sequence[int] | None
Names = str | Sequence[str] | None
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Selection:
    """Arguments chosen by position or by name; each holds for both ways of passing them."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def holds(self, argument: int | str) -> bool:
        """Returns whether the argument at a position, or of a keyword, is chosen."""
        return argument in self.positions or argument in self.names

    def shifted(self, count: int) -> Selection:
        """Returns the same selection for a call with `count` further arguments in front."""
        return Selection(frozenset(position + count for position in self.positions), self.names)


NOTHING = Selection()


@dataclass(frozen=True)
class Parameters:
    """The positional parameters of a function; `rest` names its `*args`, `keywords` those by name only, None with `**kwargs`."""

    names: tuple[str, ...]
    rest: str | None
    keywords: tuple[str, ...] | None = None

    def name(self, argument: int | str) -> str:
        """Returns the name in paths of the argument at a position, or of a keyword."""
        if isinstance(argument, str):
            return argument
        if argument < len(self.names):
            return self.names[argument]
        return f"{self.rest or 'args'}/{argument - len(self.names)}"

    def select(self, what: str, positions: Positions, names: Names) -> Selection:
        """Returns the arguments that `what`_argnums and `what`_argnames choose.

        Raises:
            ContextError: the function does not have a position or name.
            TypeError: a position is not an int, or a name is not a str.
        """
        numbers = _as_tuple(f"{what}_argnums", positions, int)
        words = _as_tuple(f"{what}_argnames", names, str)
        count = len(self.names)
        if self.rest is None and any(not -count <= number < count for number in numbers):
            raise ContextError(
                f"{what}_argnums is out of range.", got=str(positions), need=f"positions of {', '.join(self.names) or 'no arguments'}"
            )
        known = None if self.keywords is None else (*self.names, *self.keywords)
        if known is not None and not set(words) <= set(known):
            raise ContextError(f"{what}_argnames names no argument.", got=shown(names), need=f"names among {', '.join(known) or 'none'}")
        chosen = {number % count if number < 0 else number for number in numbers}
        chosen |= {self.names.index(word) for word in words if word in self.names}
        return Selection(frozenset(chosen), frozenset(words) | {self.names[number] for number in chosen if number < count})


def _as_tuple(option: str, value: Any, kind: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    entries = (value,) if isinstance(value, kind) else value
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not all(type(entry) is kind for entry in entries):
        raise TypeError(message(f"{option} must be {kind.__name__} or a sequence of {kind.__name__}.", got=repr(value)))
    return tuple(entries)


def parameters_of(fn: Callable[..., Any]) -> Parameters:
    """Returns the names of the positional parameters; a function without a signature (a builtin) has none."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return Parameters((), "args")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = next((parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_POSITIONAL), None)
    by_name = tuple(parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return Parameters(tuple(parameter.name for parameter in parameters if parameter.kind in positional), rest, None if is_open else by_name)


@dataclass(frozen=True)
class Static:
    """The static arguments of one call, hashable, and how to put them back among the others."""

    positional: tuple[tuple[int, Hashable], ...] = ()
    keyword: tuple[tuple[str, Hashable], ...] = ()

    def join(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Returns the call that the user wrote, from its dynamic arguments."""
        whole = list(args)
        for position, value in self.positional:
            whole.insert(position, value)
        return tuple(whole), {**kwargs, **dict(self.keyword)}

    def position(self, index: int) -> int:
        """Returns the position in the user's call of the dynamic argument at `index`."""
        for position, _ in self.positional:
            if position <= index:
                index += 1
        return index


NO_STATIC = Static()


def split_static(static: Selection, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Static]:
    """Splits a call into its dynamic arguments and its static ones.

    Raises:
        TypeError: a static argument is not hashable.
    """
    if not static:
        return (args, kwargs), NO_STATIC
    fixed = Static(
        tuple((index, value) for index, value in enumerate(args) if index in static.positions),
        tuple(sorted((name, value) for name, value in kwargs.items() if name in static.names)),
    )
    for argument, value in (*fixed.positional, *fixed.keyword):
        try:
            hash(value)
        except TypeError:
            raise TypeError(message(f"Static argument {argument!r} is not hashable.", got=type(value).__name__)) from None
    dynamic = tuple(value for index, value in enumerate(args) if index not in static.positions)
    return (dynamic, {name: value for name, value in kwargs.items() if name not in static.names}), fixed

"""The exception tree, the one layout of every message, and sentences that are values.

    Exception
    ├── SpmdctxError
    │   ├── ContextError (ValueError)         an option, or options that contradict each other
    │   ├── StrategyError (ValueError)        a strategy that does not fit its tensor, op or mesh
    │   ├── UnsupportedError (NotImplementedError)   a feature that is not supported, named
    │   ├── CommunicationError (RuntimeError) communication before init, or that cannot be established
    │   ├── InfeasibleError (RuntimeError)    no plan satisfies a constraint, which is named
    │   ├── DonationError (RuntimeError)      an array that a step has reused, passed again
    │   ├── CheckpointError (ValueError)      a checkpoint that is missing, damaged, or holds another state
    │   ├── FileError (OSError)               a file that cannot be written: a full disk, no such folder, something that is no file
    │   └── PlanError (ValueError)
    │       ├── PlanFormatError               a file that is not a plan, or a plan of another version
    │       └── PlanMismatchError             a plan for another program, mesh or context
    └── ContextWarning (UserWarning)          an option that has no effect where it is set

Values of a wrong type raise the built-in `TypeError`, with a message laid out in the same way.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from string import Formatter
from typing import Self

SAVED = 75
"""Exit code of a process that has saved after SIGTERM, and can be started again: the temporary failure of BSD's sysexits."""
PEER_LOST = 76
"""Exit code of a process that ends because another process did: the protocol error of BSD's sysexits."""
TIMED_OUT = 124
"""Exit code of a job that took too long, like that of coreutils' timeout."""


class Sentence(str):
    """A sentence for people that is a value for the program: a form, and what fills the form's gaps.

    It prints, compares and is saved as the string. Programs read `form` and `gaps`, and never the words.

    Attributes:
        form: a member of an enum whose values are format strings with named gaps.
        gaps: the text in each gap.
    """

    form: Enum
    gaps: Mapping[str, str]

    def __new__(cls, form: Enum, **gaps: object) -> Self:
        """Fills the gaps of a form."""
        texts = {name: str(gap) for name, gap in gaps.items()}
        self = super().__new__(cls, form.value.format(**texts))
        self.form, self.gaps = form, texts
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Enum], dict[str, str]]:
        """Pickles the form and the gaps."""
        return (self.form,), dict(self.gaps)


def read_gaps(text: str, form: Enum, patterns: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the text in each gap of a sentence that a file keeps as a string, or None if the sentence has another form.

    Args:
        text: the sentence.
        form: the form, whose value is a format string.
        patterns: a regular expression for each gap that is not just any text.
    """
    found = _pattern(form.value, tuple(sorted(patterns.items()))).fullmatch(text)
    return None if found is None else found.groupdict()


@lru_cache
def _pattern(form: str, patterns: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    known = dict(patterns)
    parts = [(words, gap and f"(?P<{gap}>{known.get(gap, '.*?')})") for words, gap, _, _ in Formatter().parse(form)]
    return re.compile("".join(re.escape(words) + (gap or "") for words, gap in parts))


class Message(str):
    """The text of an error as `message` lays it out."""


def message(summary: str, *, where: str = "", got: str = "", need: str = "", fix: str = "") -> Message:
    """Lays out an error: a sentence, then a line for each of where, got, need and fix that is given."""
    rows = [summary]
    for label, text in (("where", where), ("got", got), ("need", need), ("fix", fix)):
        if text:
            rows.append(f"  {label + ':':<6} {text}")
    return Message("\n".join(rows))


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 160, 160
_MOST_SHOWN = 400


def shown(value: object) -> str:
    """Returns a value's `repr` for a message, cut where the value is large; time and text stay small whatever the value holds."""
    if isinstance(value, int) and value.bit_length() > _MOST_SHOWN:
        return f"a number of about {round(value.bit_length() * 0.30103)} digits"
    return repr(value) if _is_small(value, [_MOST_SHOWN]) else _SHORT.repr(value)


def _is_small(value: object, left: list[int]) -> bool:
    """Returns whether a value has no more parts than are left."""
    left[0] -= len(value) // 8 + 1 if isinstance(value, str | bytes) else 1
    if left[0] < 0 or (isinstance(value, int) and value.bit_length() > _MOST_SHOWN):
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple | set | frozenset) else ()
    return all(_is_small(part, left) for part in parts)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Joins the first names, and says how many more there are."""
    more = len(names) - most
    return ", ".join([*names[:most], *([f"and {more} more"] if more > 0 else [])])


@contextmanager
def naming_file(option: str, path: object, what: str) -> Iterator[None]:
    """Names the option whose file fails inside.

    Raises:
        OSError: the file system refuses; of the kind that it raised.
    """
    try:
        yield
    except OSError as error:
        raise type(error)(message(f"{option}: {what}.", where=str(path), got=error.strerror or str(error))) from None


def is_laid_out(error: BaseException) -> bool:
    """Returns whether the package raised an error about what the user gave, so that its message says all."""
    return isinstance(error, SpmdctxError) or (bool(error.args) and isinstance(error.args[0], Message))


class SpmdctxError(Exception):
    """The root of the package's errors; `summary` is the first sentence, and labelled lines follow."""

    def __init__(self, summary: str, *, where: str = "", got: str = "", need: str = "", fix: str = "") -> None:
        super().__init__(message(summary, where=where, got=got, need=need, fix=fix))
        self.summary = summary

    def add_line(self, text: str) -> None:
        """Adds a last line to the message: what its numbers are, for a user who gave others."""
        self.args = (Message(f"{self.args[0]}\n  note:  {text}"), *self.args[1:])


class ContextError(SpmdctxError, ValueError):
    """A bad option value, or options that contradict each other or the devices."""


class StrategyError(SpmdctxError, ValueError):
    """A strategy, layout or batch that does not fit its tensor, its op or the mesh."""


class UnsupportedError(SpmdctxError, NotImplementedError):
    """A feature that is not supported; the message names it."""


class CommunicationError(SpmdctxError, RuntimeError):
    """Communication that was not started, or that cannot be established."""


class InfeasibleError(SpmdctxError, RuntimeError):
    """No plan satisfies a constraint; the message names the binding one."""


class DonationError(SpmdctxError, RuntimeError):
    """An array passed to a step after it was donated to one that reused its memory, or deleted; the message names the leaf."""


class CheckpointError(SpmdctxError, ValueError):
    """A checkpoint that is missing, damaged, or holds another state than requested; the message names the file or the leaf."""


class FileError(SpmdctxError, OSError):
    """A file that cannot be written; the message names it, and the file that was there before is as it was."""

    def __str__(self) -> str:
        return str(self.args[0])  # OSError shows its number and file instead


class PlanError(SpmdctxError, ValueError):
    """A plan that cannot be used."""


class PlanFormatError(PlanError):
    """A file that is not a plan, is damaged, or has another format version."""


class PlanMismatchError(PlanError):
    """A plan that was made for another program, mesh or context."""


class ContextWarning(UserWarning):
    """An option without effect, or a step that runs otherwise than its user may expect: on one device, or with gradients summed."""

"""The exception tree and the one layout of every message.

    Exception
    ├── SpmdctxError
    │   ├── ContextError (ValueError)         an option, or options that contradict each other
    │   ├── StrategyError (ValueError)        a strategy that does not fit its tensor, op or mesh
    │   ├── UnsupportedError (NotImplementedError)   what the program does not do, by name
    │   ├── CommunicationError (RuntimeError) communication before init, or that does not come about
    │   ├── InfeasibleError (RuntimeError)    no plan satisfies a constraint, which is named
    │   ├── CheckpointError (ValueError)      a checkpoint that is missing, damaged, or holds another state
    │   └── PlanError (ValueError)
    │       ├── PlanFormatError               a file that is no plan, or a plan of another version
    │       └── PlanMismatchError             a plan for another program, mesh or context
    └── ContextWarning (UserWarning)          an option that has no effect where it is set

Values of a wrong type raise the built-in `TypeError`, laid out by `message` too.
"""

from __future__ import annotations


def message(summary: str, *, where: str = "", got: str = "", need: str = "", fix: str = "") -> str:
    """Lays out one error: a sentence, then the known ones of where, got, need and fix, a line each."""
    rows = [summary]
    for label, text in (("where", where), ("got", got), ("need", need), ("fix", fix)):
        if text:
            rows.append(f"  {label + ':':<6} {text}")
    return "\n".join(rows)


class SpmdctxError(Exception):
    """Root of the package's errors; `summary` is the first sentence, the rest are labelled lines."""

    def __init__(self, summary: str, *, where: str = "", got: str = "", need: str = "", fix: str = "") -> None:
        super().__init__(message(summary, where=where, got=got, need=need, fix=fix))
        self.summary = summary


class ContextError(SpmdctxError, ValueError):
    """A bad option value, or options that contradict each other or the devices."""


class StrategyError(SpmdctxError, ValueError):
    """A strategy, layout or batch that does not fit its tensor, its op or the mesh."""


class UnsupportedError(SpmdctxError, NotImplementedError):
    """Something the program does not support, named."""


class CommunicationError(SpmdctxError, RuntimeError):
    """Communication that was not started, or that does not come about."""


class InfeasibleError(SpmdctxError, RuntimeError):
    """No plan satisfies a constraint; the message names the binding one."""


class CheckpointError(SpmdctxError, ValueError):
    """A checkpoint that is missing, damaged, or holds another state than is asked for; the file or the leaf is named."""


class PlanError(SpmdctxError, ValueError):
    """A plan that cannot be used."""


class PlanFormatError(PlanError):
    """A file that is no plan, is damaged, or has another format version."""


class PlanMismatchError(PlanError):
    """A plan that was made for another program, mesh or context."""


class ContextWarning(UserWarning):
    """An option that the mode ignores, or whose effect is not built yet."""

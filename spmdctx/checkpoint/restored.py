"""What restoring gives back, and whether the caller took it: a state that nobody takes is a training that starts afresh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

from spmdctx.errors import CheckpointError, listed, message
from spmdctx.plan.plan import Plan
from spmdctx.wording.user_warnings import warn_user


class _Fields(NamedTuple):
    step: int
    state: Any
    data: Any = None
    plan: Plan | None = None


_STATE = _Fields._fields.index("state")


class Pending:
    """The leaves of a restored state that the caller has to take, since they are not in objects that were changed in place."""

    def __init__(self, step: int, paths: Sequence[str], where: str) -> None:
        self._step, self._paths, self._where = step, tuple(paths), where
        self._is_told = False

    @property
    def _text(self) -> tuple[str, dict[str, str]]:
        return (
            "The restored state was not taken, so these leaves are not those of the checkpoint.",
            {
                "where": f"step {self._step} of {self._where}",
                "got": listed(self._paths),
                "need": "only nnx objects change in place; all else comes back as new leaves",
                "fix": "restored = checkpoints.restore(state); state, start = restored.state, restored.step",
            },
        )

    def take(self) -> None:
        """Notes that the caller has read the state."""
        self._paths = ()

    def warn(self) -> None:
        """Warns if the state was not taken and no error has said so."""
        if self._paths and not self._is_told:
            summary, lines = self._text
            warn_user(message(summary, **lines), RuntimeWarning)

    def check(self) -> None:
        """Refuses to go on if the state was not taken.

        Raises:
            CheckpointError: the state was not taken.
        """
        if self._paths:
            self._is_told = True
            summary, lines = self._text
            raise CheckpointError(summary, **lines)


class Restored(_Fields):
    """The contents of a restored checkpoint, as a named tuple.

    Attributes:
        step: how many steps were done; 0 if there is no checkpoint.
        state: the state; nnx objects in it are the caller's own. All else in it is new, and has to be taken from here.
        data: the data position as it was given.
        plan: the plan that was saved with the state.
    """

    _pending: Pending | None = None

    def waiting(self, pending: Pending) -> Restored:
        """Notes the leaves that the caller has to take; returns itself."""
        self._pending = pending
        return self

    @property
    def state(self) -> Any:
        """The state."""
        self._take()
        return super().__getitem__(_STATE)

    def __iter__(self) -> Iterator[Any]:
        self._take()
        return super().__iter__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice) or range(len(self))[place] == _STATE:
            self._take()
        return found

    def __del__(self) -> None:
        if self._pending is not None:
            self._pending.warn()

    def _take(self) -> None:
        if self._pending is not None:
            self._pending.take()

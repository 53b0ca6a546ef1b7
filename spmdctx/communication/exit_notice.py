"""What `sys.exit` says: of an exit that nobody catches, others are told before Python's own clean-up, which would wait for them."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import NoReturn


class ExitHook:
    """Stands in for `sys.exit` until it is removed.

    Args:
        told: called with the exit code, not 0, of an exit that ends the process.
    """

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told: Callable[[int], None] | None = told
        self._previous, self._own = sys.exit, self._exit
        sys.exit = self._own
        atexit.register(self.remove)

    def remove(self) -> None:
        """Puts `sys.exit` back; what was raised before tells nothing any more."""
        self._told = None
        if sys.exit is self._own:
            sys.exit = self._previous

    def ended(self, status: object) -> None:
        """Nobody caught an exit with this status."""
        if self._told is not None and status not in (None, 0):
            self._told(status if isinstance(status, int) else 1)

    def _exit(self, status: object = None, /) -> NoReturn:
        raise self._made(status)

    def _made(self, status: object) -> SystemExit:
        # Not in the frame that raises it: the two would hold each other.
        error = _Exit(status)
        error.hook = self
        return error


class _Exit(SystemExit):
    """An exit that is given up by the interpreter itself, with no frame left, where nobody caught it."""

    hook: ExitHook | None = None

    def __del__(self) -> None:
        if self.hook is not None and sys._getframe().f_back is None:
            self.hook.ended(self.code)

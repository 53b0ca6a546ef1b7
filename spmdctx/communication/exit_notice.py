"""Notice of `sys.exit`: tells other processes of an uncaught exit before Python's own clean-up, which would wait for them."""

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
        """Restores `sys.exit`; exits raised before no longer tell anything."""
        self._told = None
        if sys.exit is self._own:
            sys.exit = self._previous

    def ended(self, status: object) -> None:
        """Tells the others of an exit with this status that nobody caught."""
        if self._told is not None and status not in (None, 0):
            self._told(status if isinstance(status, int) else 1)

    def _exit(self, status: object = None, /) -> NoReturn:
        raise self._made(status)

    def _made(self, status: object) -> SystemExit:
        # Made outside the frame that raises it, since the two would hold each other.
        error = _Exit(status)
        error.hook = self
        return error


class _Exit(SystemExit):
    """An exit that notices when nobody caught it: the interpreter itself then drops it, with no frame left."""

    hook: ExitHook | None = None

    def __del__(self) -> None:
        if self.hook is not None and sys._getframe().f_back is None:
            self.hook.ended(self.code)

"""Makes a process of `spmdctx launch` end with its launcher, even if that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

LAUNCHER = "SPMDCTX_LAUNCHER"
"""The launcher's process id."""

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """Asks Linux to kill this process when the launcher that started it ends; elsewhere, and without a launcher, nothing."""
    if environ.get(LAUNCHER) != str(os.getppid()) or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if environ[LAUNCHER] != str(os.getppid()):  # it ended before it could be watched
        os.kill(os.getpid(), signal.SIGKILL)

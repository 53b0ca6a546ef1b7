"""How many files a process of a job may have open."""

from __future__ import annotations

import contextlib
import sys

_ENOUGH = 1 << 16


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one, up to 65,536.

    Whoever connects to a port that JAX opens takes a file of this process. Gloo ends its process when none is left, and other
    parts of a training need files for data and checkpoints.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

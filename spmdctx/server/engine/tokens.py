"""Whether a cluster of Ray asks for tokens: Ray takes none to a cluster whose address it is told, unless its environment says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

_MODE = "RAY_AUTH_MODE"
_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
_PROBE_S = 60.0


def use_tokens_of(address: str) -> None:
    """Has this process and its children take the token of this machine to a cluster that does not answer without one.

    `ray start` asks for a token where the machine has one, which each local cluster of Ray leaves there. The environment may say
    RAY_AUTH_MODE, token or disabled, in place of this look.
    """
    if _MODE not in os.environ and has_token(os.environ):
        os.environ[_MODE] = "disabled" if _answers(address) else "token"


def has_token(environ: Mapping[str, str]) -> bool:
    """Returns whether Ray finds a token."""
    path = environ.get("RAY_AUTH_TOKEN_PATH", os.path.join(os.path.expanduser("~"), ".ray", "auth_token"))
    return "RAY_AUTH_TOKEN" in environ or os.path.isfile(path)


def _answers(address: str) -> bool:
    """Returns whether a cluster answers a process that has no token; it is another one, since Ray tries for long and says so."""
    environ = {**os.environ, _MODE: "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    with suppress(subprocess.TimeoutExpired):
        run = subprocess.run([sys.executable, "-c", _PROBE, address], env=environ, capture_output=True, timeout=_PROBE_S, check=False)
        return run.returncode == 0
    return False

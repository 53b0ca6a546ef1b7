"""The key of a job: what its processes share and strangers do not, by which they prove that they belong to it."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spmdctx.communication.clusters import Cluster
from spmdctx.errors import ContextError

TOKEN = "SPMDCTX_TOKEN"
"""Set by `spmdctx launch`, or by the user to the same secret on every process."""

_SHORTEST = 16
_MPI_KEY = "OMPI_MCA_orte_precondition_transports"
"""128 random bits that Open MPI's mpirun makes for each job and hands to its processes alone."""
_MPI_KEY_FORM = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_KEY_BYTES = 64


@dataclass(frozen=True)
class Key:
    """The key; it is never printed.

    `source` says in words where it is from. `is_secret` is False where the launcher gives nothing that strangers could not know.
    """

    secret: bytes = field(repr=False)
    source: str
    is_secret: bool = True


def job_key(environ: Mapping[str, str], cluster: Cluster) -> Key:
    """Returns the key of a job, from the first that there is.

    1. `SPMDCTX_TOKEN`.
    2. The key that Open MPI's mpirun makes for each job.
    3. On one machine, a file that only the user can read; it is made when it is first needed. Jobs of Slurm add their numbers.
    4. Nothing secret: any process may join that reaches the address and knows this protocol.

    Raises:
        ContextError: `SPMDCTX_TOKEN` is shorter than 16 characters.
    """
    if token := environ.get(TOKEN):
        if len(token) < _SHORTEST:
            raise ContextError(
                f"{TOKEN} is too short to keep strangers out.", got=f"{len(token)} characters", need=f"at least {_SHORTEST}, random"
            )
        return Key(_digest(os.fsencode(token)), TOKEN)
    if cluster.source == "Open MPI" and _MPI_KEY_FORM.fullmatch(environ.get(_MPI_KEY, "")):
        return Key(_digest(os.fsencode(environ[_MPI_KEY])), "the key of mpirun's job")
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}" if cluster.source == "Slurm" else ""
    if is_loopback(cluster.address.rpartition(":")[0]):
        path = key_file(environ)
        own = None if path is None else _users_key(path)
        if own is not None:
            return Key(_digest(own + step.encode()), f"the user's key in {path}")
    return Key(_digest(step.encode()), "nothing secret", is_secret=False)


def key_file(environ: Mapping[str, str]) -> Path | None:
    """Returns where the user's key is kept, or None for a user without a home."""
    stated = environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(stated) if os.path.isabs(stated) else Path("~/.local/state").expanduser()
    except RuntimeError:
        return None
    return folder / "spmdctx" / "key"


def is_loopback(host: str) -> bool:
    """Returns whether only processes of the same machine can reach this host, as it is written."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(b"spmdctx job key\0" + text).digest()


def _users_key(path: Path) -> bytes | None:
    """Returns the key in a file that only the user can read, made if it is missing; None if it cannot be kept so."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(path):
            _make(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                return None
            found = file.read(_KEY_BYTES)
    except (OSError, ValueError):
        return None
    return found if len(found) == _KEY_BYTES else None


def _make(path: Path) -> None:
    """Makes the file; of processes that do so at once, one wins."""
    draft = path.with_name(f".{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secrets.token_hex(_KEY_BYTES // 2).encode())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()

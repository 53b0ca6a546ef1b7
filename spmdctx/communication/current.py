"""The world that this process enters by `init` and leaves by `release`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.watch import Watch
from spmdctx.errors import CommunicationError


class World(NamedTuple):
    """The result of `init`: the job, the machine of each process, and the watch over them."""

    cluster: Cluster | None
    hosts: tuple[str, ...]
    watch: Watch | None

    @property
    def devices(self) -> list[Any]:
        """All devices: their numbers in this list are the ranks."""
        return jax.devices()


_world: World | None = None


def enter(world: World | None) -> None:
    """Sets the world; None leaves it."""
    global _world
    _world = world


def is_initialized() -> bool:
    """Returns whether `init` was called, and `release` not since."""
    return _world is not None


def current_world(what: str) -> World:
    """Returns the world; `what` is the name of the function that needs it.

    Raises:
        CommunicationError: before `init`.
    """
    if _world is None:
        raise CommunicationError(
            f"{what} is called before spmdctx.communication.init().", fix="call init() first, at the start of the script"
        )
    return _world

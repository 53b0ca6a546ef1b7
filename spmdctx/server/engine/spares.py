"""Servers that nobody uses yet: they have imported what they need, and take the place of one that is lost."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

from spmdctx.communication.launch.environment import xla_flags
from spmdctx.server.engine.rays import ray
from spmdctx.server.engine.server import Server

_READY_S = 0.5


class Spares:
    """Actors that Ray starts again when their processes are lost.

    Args:
        scheduler: the name of the job's.
        count: of those that are started at once.
    """

    def __init__(self, scheduler: str, count: int) -> None:
        self._scheduler = scheduler
        self._actors: list[Any] = []
        self.have(count)

    def have(self, count: int) -> None:
        """Starts as many as lack, and ends those that are too many."""
        self._actors += [self._new() for _ in range(count - len(self._actors))]
        for actor in self._actors[count:]:
            ray().kill(actor)
        del self._actors[count:]

    def taken(self, count: int) -> list[Any]:
        """Returns so many; those that have not started yet, too."""
        self.have(max(count, len(self._actors)))
        found, self._actors = self._actors[:count], self._actors[count:]
        return found

    async def exchanged(self, lost: Any) -> Any:
        """Takes a server that is lost, whose process Ray starts again, for one that has started; returns the same one if there is none."""
        for number, actor in enumerate(self._actors):
            with suppress(ray().exceptions.RayError, TimeoutError):
                await asyncio.wait_for(actor.life.remote(), _READY_S)
                self._actors[number] = lost
                return actor
        return lost

    def _new(self) -> Any:
        own = ray()
        # Workers have the same flags, lest the bits of sums differ.
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(os.environ), "JAX_NUM_CPU_DEVICES": "1"}
        environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        resources = {"ps": 0.001} if own.cluster_resources().get("ps") else {}
        actor = own.remote(Server).options(
            max_restarts=-1,  # a call that is lost is not made again: the next process knows nothing of it
            num_cpus=0,
            max_concurrency=1000,
            resources=resources,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        return actor.remote(self._scheduler)

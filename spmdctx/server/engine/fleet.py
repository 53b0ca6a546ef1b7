"""The servers of a job, as the scheduler holds them: it starts them for a layout, has them load and save, and learns of their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from spmdctx.server.engine.rays import ray
from spmdctx.server.engine.server import Order, Server, Snapshot
from spmdctx.server.program.spec import ServerSpec


class Job(NamedTuple):
    """What a job is told once: see the options of the parameter server."""

    num_servers: int
    mode: str
    max_staleness: int
    save_every: int
    folder: str


class Layout(NamedTuple):
    """A step that is divided for servers.

    Attributes:
        specs: one for each server.
        num_parts: of each step.
        fingerprint: of the step.
        version: of the saved arrays from which servers start.
        is_local: whether some of its state stays with workers, who save it.
    """

    specs: Sequence[ServerSpec]
    num_parts: int
    fingerprint: str
    version: int
    is_local: bool = False


class Fleet:
    """The servers of the present layout.

    Args:
        job: what it was told.

    Attributes:
        servers: their actors, which Ray starts again when their processes are lost.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.servers: list[Any] = []
        self._lives: list[str] = []
        self._specs: Sequence[ServerSpec] = ()
        # They import what they need while a worker traces the step.
        self._early = [self._new_server(number) for number in range(job.num_servers)]

    def start(self, layout: Layout) -> None:
        """Starts the servers of a layout, which are to load."""
        self._specs = layout.specs
        early, self._early = self._early, []
        self.servers = [early[number] if number < len(early) else self._new_server(number) for number in range(len(layout.specs))]
        for server in early[len(layout.specs) :]:
            ray().kill(server)

    def _new_server(self, number: int) -> Any:
        own = ray()
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
        environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        resources = {"ps": 0.001} if own.cluster_resources().get("ps") else {}
        actor = own.remote(Server).options(
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            max_concurrency=1000,
            resources=resources,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        )
        return actor.remote(number)

    async def load(self, version: int, generation: int) -> None:
        """Has all servers take over the arrays of a version; Ray asks a process again that is lost meanwhile."""
        loads = [self._load(number, version, generation) for number in range(len(self.servers))]
        self._lives = list(await asyncio.gather(*loads))

    async def load_one(self, number: int, version: int, generation: int) -> None:
        """Has one server take over the arrays of a version."""
        self._lives[number] = await self._load(number, version, generation)

    async def _load(self, number: int, version: int, generation: int) -> str:
        job = self._job
        order = Order(self._specs[number], job.folder, version, generation, job.save_every, job.mode, job.max_staleness)
        life: str = await self.servers[number].load.remote(order)
        return life

    def life(self, number: int) -> str:
        """Returns what tells the process of a server, as it has loaded, from the next one."""
        return self._lives[number]

    async def end_of(self, number: int, life: str) -> None:
        """Returns when the process of a server is no more."""
        with suppress(ray().exceptions.RayError):
            # Ray would ask the next process again; that one tells that it is another.
            await self.servers[number].watch.options(max_task_retries=0).remote(life)

    def is_current(self, number: int, server: Any, life: str) -> bool:
        """Returns whether a server is one of the layout, and was last loaded in this process."""
        return number < len(self.servers) and self.servers[number] is server and self._lives[number] == life

    async def save(self, generation: int, version: int) -> list[str]:
        """Has all servers save the arrays of a version; returns the names of their files, none if a server was lost.

        Raises:
            ray.exceptions.RayTaskError: one cannot save.
        """
        try:
            files = await asyncio.gather(*(server.save.remote(generation, version) for server in self.servers))
        except ray().exceptions.RayActorError:
            return []
        return [] if None in files else [str(file) for file in files]

    async def snapshots(self, generation: int, version: int, floor: int) -> list[Snapshot]:
        """Has all servers save their arrays as they are, under the name of a version; none if the generation is over.

        Raises:
            ray.exceptions.RayTaskError: one cannot save.
        """
        try:
            found = await asyncio.gather(*(server.snapshot.remote(generation, version, floor) for server in self.servers))
        except ray().exceptions.RayActorError:
            return []
        return [] if None in found else list(found)

    def forget(self, version: int) -> None:
        """Lets servers drop what they keep for workers of the steps before a version."""
        for server in self.servers:
            server.forget.remote(version)

    def end(self) -> list[Any]:
        """Ends the layout; returns the servers, which are to be killed once nobody is told of them any more."""
        old, self.servers, self._lives = self.servers, [], []
        return old

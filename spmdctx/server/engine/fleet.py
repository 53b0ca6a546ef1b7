"""The servers of a job, as the scheduler holds them: it starts them for a layout, has them load and save, and learns of their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from spmdctx.errors import CommunicationError
from spmdctx.server.engine.rays import first_line, ray
from spmdctx.server.engine.server import Order, Snapshot
from spmdctx.server.engine.spares import Spares
from spmdctx.server.program.spec import ServerSpec
from spmdctx.server.state.folder import Updates

_START_S = 300.0
"""Seconds in which the process of a server has to answer; what it loads then may take longer."""

_MOST_LOSSES = 5
_AGAIN_S = 0.2
_NUM_SPARES = 1


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
        scheduler: the name of the job's.

    Attributes:
        servers: their actors, which Ray starts again when their processes are lost.
        edition: counts layouts, and servers that have lost what they held.
    """

    def __init__(self, job: Job, scheduler: str) -> None:
        self._job = job
        self.servers: list[Any] = []
        self.edition = 0
        self._lives: list[str] = []
        self._specs: Sequence[ServerSpec] = ()
        # They import what they need while a worker traces the step.
        self._spares = Spares(scheduler, job.num_servers)

    def start(self, layout: Layout) -> None:
        """Starts the servers of a layout, which are to load."""
        self._specs = layout.specs
        self.servers = self._spares.taken(len(layout.specs))
        self.edition += 1

    def provide(self) -> None:
        """Starts a server that takes the place of one that is lost."""
        self._spares.have(_NUM_SPARES)

    async def replace(self, number: int) -> None:
        """Has a server that has started already take the place of one whose process is lost, if there is one."""
        self.servers[number] = await self._spares.exchanged(self.servers[number])
        self.edition += 1

    async def load(self, version: int, generation: int, updates: Updates | None = None) -> None:
        """Has all servers take over the arrays of a version; see `load_one`."""
        loads = [self._load(number, version, generation, updates) for number in range(len(self.servers))]
        self._lives = list(await asyncio.gather(*loads))

    async def load_one(self, number: int, version: int, generation: int, updates: Updates | None) -> None:
        """Has one server take over the arrays of a version; a process that is lost meanwhile is asked again, by the next.

        Args:
            number: of the server.
            version: that is saved.
            generation: in which it counts.
            updates: what the arrays have had, in "async".

        Raises:
            CommunicationError: it does not start, or is lost again and again.
            ray.exceptions.RayTaskError: it cannot load.
        """
        self._lives[number] = await self._load(number, version, generation, updates)

    async def _load(self, number: int, version: int, generation: int, updates: Updates | None) -> str:
        job, server, errors = self._job, self.servers[number], ray().exceptions
        done = Updates(0, ()) if updates is None else updates
        order = Order(self._specs[number], job.folder, version, generation, job.save_every, job.mode, job.max_staleness, done)
        for _ in range(_MOST_LOSSES):
            await _started(number, server)
            try:
                life: str = await server.load.remote(order)
            except errors.RayTaskError:
                raise
            except errors.RayActorError as error:
                cause = error
                await asyncio.sleep(_AGAIN_S)
            else:
                return life
        raise CommunicationError(
            f"Server {number} was lost {_MOST_LOSSES} times while it loaded its arrays.",
            got=first_line(cause),
            fix="look at the memory of its machine, and at Ray's logs there (session_latest/logs)",
        ) from cause

    def life(self, number: int) -> str:
        """Returns what tells the process of a server, as it has loaded, from the next one."""
        return self._lives[number]

    async def end_of(self, number: int, life: str) -> None:
        """Returns when the process of a server is no more."""
        with suppress(ray().exceptions.RayError):
            await self.servers[number].watch.remote(life)

    def is_current(self, number: int, life: str) -> bool:
        """Returns whether a server of the layout was last loaded in this process."""
        return number < len(self.servers) and self._lives[number] == life

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


async def _started(number: int, server: Any) -> None:
    """Waits until the process of a server answers.

    Raises:
        CommunicationError: it does not, or cannot start.
    """
    try:
        await asyncio.wait_for(server.life.options(max_task_retries=-1).remote(), _START_S)
    except (TimeoutError, ray().exceptions.RayError) as error:
        is_late = isinstance(error, TimeoutError)
        raise CommunicationError(
            f"Server {number} cannot start.",
            got=f"no answer in {_START_S:g} s" if is_late else first_line(error),
            fix='look at `ray status` (memory, and "ps" among the resources of nodes), and at Ray\'s logs (session_latest/logs)',
        ) from error

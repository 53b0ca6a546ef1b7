"""The actor that keeps a job's progress: it tells workers what to do, starts servers, and has lost steps done again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdctx.server.engine.rays import ray
from spmdctx.server.engine.server import Order, Server
from spmdctx.server.program.spec import ServerSpec
from spmdctx.server.state.folder import SavedState, Updates, complete, load_results, saved_states
from spmdctx.server.state.progress import Failed, Progress, Reply, Summary

_POLL_S = 20.0
_QUIET_S = 10.0


class Job(NamedTuple):
    """What a job is told once: see the options of the parameter server."""

    num_servers: int
    mode: str
    max_staleness: int
    save_every: int
    folder: str


class Answer(NamedTuple):
    """A reply to a worker; it keeps the inputs of steps from `kept_from` on."""

    reply: Reply | None
    kept_from: int


class Layout(NamedTuple):
    """A step that is divided for servers.

    Attributes:
        specs: one for each server.
        num_parts: of each step.
        fingerprint: of the step.
        version: of the saved arrays from which servers start.
    """

    specs: Sequence[ServerSpec]
    num_parts: int
    fingerprint: str
    version: int


class Scheduler:
    """The progress of one job; all methods are called by way of Ray.

    Raises:
        CheckpointError: the folder holds a state that is damaged.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Path(job.folder)
        self._progress = Progress(job.num_servers, job.mode, job.max_staleness)
        self._changed = asyncio.Condition()
        self._recovering = asyncio.Lock()
        self._servers: list[Any] = []
        self._layout: Layout | None = None
        self._board: dict[tuple[int, int], dict[str, Any]] = {}
        self._files: dict[int, dict[int, str]] = {}
        self._common = 0
        self._asked_for: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lines: list[tuple[int, str, str]] = []
        self._fingerprint = ""
        self._is_saving = False
        for state in saved_states(self._folder)[-1:]:
            self._resume(state)

    def _resume(self, state: SavedState) -> None:
        """Goes on from a saved state."""
        progress = self._progress
        self._common = progress.saved = progress.version = state.version
        self._fingerprint = state.fingerprint
        progress.results = dict(load_results(state))
        if progress.mode == "async":
            updates = state.updates or Updates(state.version, ())
            progress.resume(state.version, updates.floor, updates.done)
        elif state.updates is not None:
            progress.fail(f"The folder {self._folder} holds the state of an asynchronous job, whose steps may be done in part.")

    async def job(self) -> Job:
        """Returns what the job was told."""
        return self._job

    async def hello(self, worker: int) -> None:
        """A worker has started."""
        self._progress.hello(worker)
        await self._notify()

    async def lost(self, worker: int) -> None:
        """A worker is gone, and does not come again."""
        self._progress.lost(worker)
        await self._notify()

    async def ask(self, worker: int, step: int) -> Answer:
        """Returns what a worker does in a step; None as the reply if there was nothing for a while."""
        found: Reply | None = None

        def is_answered() -> bool:
            nonlocal found
            found = self._progress.ask(worker, step)
            return found is not None

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_answered), _POLL_S)
            except TimeoutError:
                found = None
        return Answer(found, self._common if self._progress.mode == "sync" else self._progress.floor)

    async def servers(self) -> list[Any]:
        """Returns the actors of the servers."""
        return self._servers

    async def set_up(self, layout: Layout) -> None:
        """Starts servers for a step that a worker has divided."""
        if self._fingerprint not in ("", layout.fingerprint):
            await self.fail(
                f"The folder {self._folder} holds the state of another step.",
            )
            return
        self._fingerprint = layout.fingerprint
        progress = self._progress
        if progress.ready:
            return
        progress.busy = True
        self._layout = layout
        if layout.version == 0:
            await asyncio.to_thread(complete, self._folder, 0, layout.fingerprint, [], {})
        self._common = layout.version
        self._servers = [self._new_server(number) for number in range(len(layout.specs))]
        async with self._recovering:
            await self._load_all(layout.version, progress.generation + 1)
            progress.start(layout.version, len(layout.specs), layout.num_parts)
        for number in range(len(layout.specs)):
            self._start(self._watched(number, self._servers[number]))
        await self._notify()

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
            runtime_env={"env_vars": environment},
        )
        return actor.remote(number)

    async def _load_all(self, version: int, generation: int) -> None:
        layout = self._layout
        assert layout is not None, "servers follow a layout"
        orders = [self._order(number, version, generation) for number in range(len(layout.specs))]
        await asyncio.gather(*(server.load.remote(order) for server, order in zip(self._servers, orders, strict=True)))

    def _order(self, server: int, version: int, generation: int) -> Order:
        job, layout = self._job, self._layout
        assert layout is not None, "servers follow a layout"
        return Order(layout.specs[server], job.folder, version, generation, job.save_every, job.mode, job.max_staleness)

    async def _watched(self, number: int, server: Any) -> None:
        """Has the lost steps done again whenever a server was lost."""
        while number < len(self._servers) and self._servers[number] is server:
            try:
                await server.watch.options(max_task_retries=0).remote()
            except Exception:
                if number >= len(self._servers) or self._servers[number] is not server:
                    return
                await self._recover(number)

    async def _recover(self, number: int) -> None:
        progress, layout = self._progress, self._layout
        assert layout is not None, "a server that was lost had a layout"
        async with self._recovering:
            try:
                if progress.mode == "async":
                    await self._servers[number].load.remote(self._order(number, self._common, progress.generation))
                else:
                    progress.rewind(self._common)
                    progress.busy = True
                    self._board.clear()
                    await self._notify()
                    await self._load_all(self._common, progress.generation)
            except Exception as error:
                progress.fail(f"Server {number} was lost, and its state cannot be loaded: {error}")
            progress.busy = False
        await self._notify()

    async def pushed(self, generation: int, step: int, parts: Sequence[int], results: Mapping[int, Any], late: int) -> None:
        """A worker has pushed parts to all servers; in "async" they were late by so many updates at most."""
        progress = self._progress
        progress.pushed(generation, step, parts, results, late)
        if progress.mode == "async" and generation == progress.generation and not (self._is_saving or progress.busy):
            if self._asked_for is not None:
                self._start(self._lay_out())
            elif progress.version // self._job.save_every > self._common // self._job.save_every:
                self._start(self._save_updates())
        await self._notify()

    async def _save_updates(self) -> None:
        """Has all servers save what they hold, in "async"."""
        self._is_saving = True
        version = self._progress.version
        try:
            files, updates = await self._snapshots(version)
        except Exception as error:
            await self.fail(f"Servers cannot save their arrays: {error}")
        else:
            await self._complete(version, files, updates)
        self._is_saving = False

    async def _snapshots(self, version: int) -> tuple[list[str], Updates]:
        """Has all servers save their arrays as they are.

        An update that only some of them have had counts as done, so that no array gets it twice.
        """
        floor, done = self._progress.floor, set(self._progress.done)
        found = await asyncio.gather(*(server.snapshot.remote(version, floor) for server in self._servers))
        done.update(task for one in found for task in one.applied if task[0] >= floor)
        return [one.file for one in found], Updates(floor, tuple(sorted(done)))

    async def applied(self, server: int, generation: int, version: int, results: Mapping[int, Any]) -> None:
        """A server has renewed its arrays."""
        if self._progress.applied(server, generation, version, results):
            self._board = {key: values for key, values in self._board.items() if key[0] >= version - 1}
            if self._asked_for is not None:
                self._start(self._lay_out())
        await self._notify()

    async def exchange(self, generation: int, key: tuple[int, int], values: Mapping[str, Any], awaited: Sequence[str]) -> Any:
        """Takes what a server sends to others, and returns what it waits for; None if the generation is over."""
        progress = self._progress

        def is_over() -> bool:
            return progress.generation != generation or bool(progress.failure)

        if is_over():
            return None
        # What one exchange brings is kept for the step: a server may need it in a later one.
        self._board.setdefault((key[0], 0), {}).update(values)
        await self._notify()
        board = self._board[key[0], 0]
        async with self._changed:
            await self._changed.wait_for(lambda: is_over() or all(slot in board for slot in awaited))
        return None if is_over() else {slot: board[slot] for slot in awaited}

    async def saved(self, server: int, generation: int, version: int, file: str) -> None:
        """A server has saved its arrays."""
        if generation != self._progress.generation or self._layout is None:
            return
        own = self._files.setdefault(version, {})
        own[server] = file
        if len(own) == len(self._layout.specs):
            await self._complete(version, self._files.pop(version).values())

    async def _complete(self, version: int, files: Any, updates: Updates | None = None) -> None:
        results = {step: own for step, own in self._progress.results.items() if step < version or updates is not None}
        try:
            await asyncio.to_thread(complete, self._folder, version, self._fingerprint, list(files), results, updates)
        except Exception as error:
            await self.fail(f"A state cannot be saved: {error}")
            return
        self._common = max(self._common, version)

    async def scale(self, num_servers: int) -> None:
        """Goes on with another number of servers, after the present step."""
        self._asked_for = num_servers

    async def _lay_out(self) -> None:
        progress, count = self._progress, self._asked_for
        self._asked_for = None
        if count is None or count == progress.num_servers:
            return
        progress.busy = True
        async with self._recovering:
            await self._quiet()
            version, updates, files = progress.version, None, list[str]()
            try:
                if progress.mode == "sync":
                    files = list(await asyncio.gather(*(server.save.remote(version) for server in self._servers)))
                else:
                    files, updates = await self._snapshots(version)
            except Exception as error:
                progress.fail(f"Servers cannot save their state: {error}")
            await self._complete(version, files, updates)
            old, self._servers = self._servers, []
            self._files.clear()
            self._board.clear()
            progress.end_layout(count, version)
        for server in old:
            ray().kill(server)
        await self._notify()

    async def _quiet(self) -> None:
        """Waits until no update is under way, in "async"; not for long, since a worker may be lost."""
        if self._progress.mode == "async":
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: not self._progress.num_under_way), _QUIET_S)

    async def remove_worker(self, worker: int) -> None:
        """Lets a worker leave before its next step."""
        self._progress.leaving.add(worker)
        await self._notify()

    async def fail(self, text: str) -> None:
        """Ends the job with an error."""
        self._progress.fail(text)
        await self._notify()

    async def state(self) -> Progress:
        """Returns the progress."""
        return self._progress

    async def summary(self) -> Summary:
        """Returns how far the job has come."""
        return self._progress.summary

    async def say(self, worker: int, stream: str, lines: Sequence[str]) -> None:
        """Takes lines that a worker writes."""
        self._lines += [(worker, stream, line) for line in lines]
        await self._notify()

    async def said(self, after: int, seconds: float) -> list[tuple[int, str, str]]:
        """Returns the lines after the first ones, once there are any."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: len(self._lines) > after), seconds)
            except TimeoutError:
                return []
        return self._lines[after:]

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


Call = Callable[..., Any]
__all__ = ["Answer", "Call", "Failed", "Job", "Layout", "Scheduler"]

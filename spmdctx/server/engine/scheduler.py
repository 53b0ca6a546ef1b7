"""The actor that keeps a job's progress: it tells workers what to do, starts servers, and has lost steps done again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmdctx.server.engine.attendance import Attendance
from spmdctx.server.engine.fleet import Fleet, Job, Layout
from spmdctx.server.engine.messages import WORKERS, Answer, Word
from spmdctx.server.engine.rays import SCHEDULER, cause_of, ray
from spmdctx.server.state.folder import WORKERS_FILE, SavedState, Updates, complete, load_results, newest_state, shard_name, state_folder
from spmdctx.server.state.progress import Leave, Progress, Reply

_POLL_S = 20.0
_QUIET_S = 10.0
_SPARE_S = 3.0


class Scheduler(Attendance):
    """The progress of one job; all methods are called by way of Ray.

    Args:
        job: what it is told.
        name: by which actors find this one.

    Raises:
        CheckpointError: the folder holds a state that is damaged.
    """

    def __init__(self, job: Job, name: str = SCHEDULER) -> None:
        super().__init__(Progress(job.num_servers, job.mode, job.max_staleness))
        self._job = job
        self._folder = Path(job.folder)
        self._recovering = asyncio.Lock()
        self._fleet = Fleet(job, name)
        self._layout: Layout | None = None
        self._board: dict[tuple[int, int], dict[str, Any]] = {}
        self._files: dict[int, dict[int, str]] = {}
        self._common = 0
        self._had: Sequence[Updates] = ()
        self._asked_for: int | None = None
        self._step: tuple[str, int] | None = None
        self._is_saving = False
        self._found = newest_state(self._folder)
        if self._found is not None:
            self._resume(self._found)

    def _resume(self, state: SavedState) -> None:
        """Goes on from a saved state."""
        progress = self._progress
        self._common = progress.saved = progress.version = state.version
        progress.results = dict(load_results(state))
        if progress.mode == "async":
            updates = state.updates or Updates(state.version, ())
            progress.resume(state.version, updates.floor, updates.done)
        elif state.updates is not None:
            progress.fail(f"The folder {self._folder} holds the state of an asynchronous job, whose steps may be done in part.")

    async def job(self) -> Job:
        """Returns what the job was told."""
        return self._job

    async def hello(self, worker: int, fingerprint: str, num_parts: int) -> bool:
        """The script of a worker has come to its first step, which has a fingerprint and parts; returns whether servers are there."""
        wrong = self._misfit(fingerprint, num_parts)
        if wrong:
            await self.fail(wrong)
        self._step = (fingerprint, num_parts)
        self._progress.hello(worker)
        await self._notify()
        return self._progress.ready

    def _misfit(self, fingerprint: str, num_parts: int) -> str:
        """Says why a step is not the one of this job, or of its folder, if it is not."""
        if self._step not in (None, (fingerprint, num_parts)):
            return "A job trains one step, and with one set of shapes: its workers have come with another one."
        return "" if self._found is None else self._found.misfit(fingerprint, num_parts)

    async def ask(self, worker: int, step: int, life: str = "") -> Answer:
        """Returns what a worker does in a step; None as the reply if there was nothing for a while."""
        found: Reply | None = None

        def is_answered() -> bool:
            nonlocal found
            if self._presence.is_over(worker, life):
                found = Leave()
            elif not self._presence.is_silent(worker):
                found = self._progress.ask(worker, step)
            return found is not None

        self._presence.beat(worker, life)
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_answered), _POLL_S)
            except TimeoutError:
                found = None
        return Answer(found, self._common if self._progress.mode == "sync" else self._progress.floor, self._fleet.edition)

    async def servers(self) -> tuple[int, int, list[Any]]:
        """Returns the generation, the edition and the actors of the servers.

        There are none where a worker that asks has to divide the step for them first.
        """
        progress, fleet = self._progress, self._fleet
        async with self._changed:
            await self._changed.wait_for(lambda: progress.ready or not progress.busy or bool(progress.failure))
        return progress.generation, fleet.edition, fleet.servers

    async def set_up(self, layout: Layout) -> None:
        """Starts servers for a step that a worker has divided."""
        progress, fleet = self._progress, self._fleet
        # A worker that was thought lost may come late with a layout that another has brought, or that is over.
        expected = (progress.num_servers, progress.saved or 0)
        if progress.failure or progress.ready or progress.busy or (len(layout.specs), layout.version) != expected:
            return
        progress.busy = True
        self._layout = layout
        async with self._recovering:
            try:
                fleet.start(layout)
                if layout.version == 0:
                    files = [*map(shard_name, range(len(layout.specs))), *self._files_of_workers]
                    await asyncio.to_thread(complete, self._folder, self._state(0, files), {})
                self._common = layout.version
                updates = Updates(progress.floor, progress.done)
                self._had = [updates] * len(layout.specs)
                await fleet.load(layout.version, progress.generation + 1, updates)
            except Exception as error:
                await self.fail(f"Servers cannot load their state: {cause_of(error)}")
                return
            progress.start(layout.version, len(layout.specs), layout.num_parts)
        for number in range(len(fleet.servers)):
            self._start(self._watched(number))
        self._start(self._provide())
        await self._notify()

    async def _provide(self) -> None:
        """Starts a spare server, once the first steps are under way."""
        await asyncio.sleep(_SPARE_S)
        if self._progress.ready:
            self._fleet.provide()

    def _state(self, version: int, files: Iterable[str]) -> SavedState:
        layout = self._layout
        assert layout is not None, "a state that is saved has a layout"
        return SavedState(version, state_folder(self._folder, version), layout.fingerprint, layout.num_parts, tuple(files))

    async def _watched(self, number: int) -> None:
        """Has the lost steps done again whenever a server was lost."""
        fleet, layout = self._fleet, self._layout
        while self._layout is layout and self._progress.ready and not self._progress.failure:
            life = fleet.life(number)
            await fleet.end_of(number, life)
            async with self._recovering:
                # Loading for another server may have reached the new process of this one.
                if self._layout is layout and fleet.is_current(number, life) and not self._progress.failure:
                    await self._recover(number)

    async def _recover(self, number: int) -> None:
        progress = self._progress
        progress.busy = True
        try:
            await self._fleet.replace(number)
            if progress.mode == "async":
                await self._fleet.load_one(number, self._common, progress.generation, self._had[number])
            else:
                progress.rewind(self._common)
                self._board.clear()
                self._files.clear()
                await self._notify()
                await self._fleet.load(self._common, progress.generation)
        except Exception as error:
            progress.fail(f"Server {number} was lost, and its state cannot be loaded: {cause_of(error)}")
        progress.busy = False
        await self._notify()

    async def pushed(self, word: Word) -> None:
        """A worker has pushed parts to all servers."""
        progress, generation = self._progress, word.generation
        progress.num_bytes += word.num_bytes
        if progress.mode == "async" and word.edition != self._fleet.edition:
            return  # a server has lost it since, and gets it again
        progress.pushed(generation, word.step, word.parts, word.results, word.late)
        if progress.mode == "async" and generation == progress.generation and not (self._is_saving or progress.busy):
            if self._asked_for not in (None, progress.num_servers):
                progress.busy = True
                self._start(self._lay_out())
            elif progress.version // self._job.save_every > self._common // self._job.save_every:
                self._start(self._save_updates())
        await self._notify()

    async def _save_updates(self) -> None:
        """Has all servers save what they hold, in "async"."""
        self._is_saving = True
        version = self._progress.version
        try:
            files, updates, had = await self._saved_by_all(version)
        except Exception as error:
            await self.fail(f"Servers cannot save their arrays: {cause_of(error)}")
        else:
            if files and await self._complete(version, files, updates):
                self._had = had
        self._is_saving = False

    async def _saved_by_all(self, version: int) -> tuple[list[str], Updates | None, list[Updates]]:
        """Has all servers save their arrays; returns their files, none if a server was lost, and what all and each of them have had.

        In "async" an update that only some of them have had counts as done, so that no array gets it twice in another layout.
        """
        progress = self._progress
        if progress.mode == "sync":
            return await self._fleet.save(progress.generation, version), None, []
        floor, done = progress.floor, set(progress.done)
        found = await self._fleet.snapshots(progress.generation, version, floor)
        done.update(task for one in found for task in one.applied if task[0] >= floor)
        return [one.file for one in found], Updates(floor, tuple(sorted(done))), [Updates(floor, one.applied) for one in found]

    async def applied(self, server: int, generation: int, version: int, results: Mapping[int, Any]) -> None:
        """A server has renewed its arrays."""
        if self._progress.applied(server, generation, version, results):
            self._board = {key: values for key, values in self._board.items() if key[0] >= version - 1}
            is_last = self._asked_for not in (None, self._progress.num_servers)
            if self._files_of_workers and (is_last or version % self._job.save_every == 0):
                self._progress.save()
            if is_last:
                self._progress.busy = True
                self._start(self._lay_out())
        await self._notify()

    async def reported(self, step: int, results: Mapping[int, Any]) -> None:
        """A worker has made results of a step that no server makes."""
        self._progress.reported(step, results)

    async def reached(self, generation: int, version: int) -> bool:
        """Returns once all servers have come to a version; false if the generation is over."""
        return await self._until(generation, lambda: self._progress.version >= version)

    async def exchange(self, generation: int, key: tuple[int, int], values: Mapping[str, Any], awaited: Sequence[str]) -> Any:
        """Takes what a server sends to others, and returns what it waits for; None if the generation is over."""
        if self._is_over(generation):
            return None
        # What one exchange brings is kept for the step: a server may need it in a later one.
        board = self._board.setdefault((key[0], 0), {})
        board.update(values)
        await self._notify()
        is_there = await self._until(generation, lambda: all(slot in board for slot in awaited))
        return {slot: board[slot] for slot in awaited} if is_there else None

    async def saved(self, server: int, generation: int, version: int, file: str) -> None:
        """A server has saved its arrays."""
        if not await self.reached(generation, version) or self._layout is None:
            return  # word that all have come to the version, with the results of its steps, may come later
        if server == WORKERS and version == self._progress.unsaved:
            self._progress.saved_by_worker()
        (own := self._files.setdefault(version, {}))[server] = file
        if len(own) == len(self._layout.specs) + len(self._files_of_workers):
            await self._complete(version, self._files.pop(version).values())
        await self._notify()

    @property
    def _files_of_workers(self) -> list[str]:
        return [WORKERS_FILE] if self._layout is not None and self._layout.is_local else []

    async def _complete(self, version: int, files: Any, updates: Updates | None = None) -> bool:
        """Makes a state count; returns whether servers that are lost go on from it."""
        results = self._progress.results_before(version)
        try:
            await asyncio.to_thread(complete, self._folder, self._state(version, files)._replace(updates=updates), results)
        except Exception as error:
            await self.fail(f"A state cannot be saved: {cause_of(error)}")
            return False
        is_newest = version >= self._common
        self._common = max(self._common, version)
        if self._files_of_workers:
            self._fleet.forget(self._common)
        return is_newest

    async def scale(self, num_servers: int) -> None:
        """Goes on with another number of servers, after the present step."""
        self._asked_for = num_servers

    async def _lay_out(self) -> None:
        """Has servers save their arrays and end, and the next worker divide the step for as many as were asked for."""
        progress = self._progress
        if self._files_of_workers:
            version = progress.version
            if not await self._until(progress.generation, lambda: self._common >= version or WORKERS in self._files.get(version, {})):
                return
        async with self._recovering:
            await self._quiet()
            version, count = progress.version, self._asked_for
            try:
                files, updates, _ = await self._saved_by_all(version)
            except Exception as error:
                await self.fail(f"Servers cannot save their state: {cause_of(error)}")
                return
            if count is None or not files:
                # A server was lost meanwhile: its steps are done again first.
                progress.busy = False
                await self._notify()
                return
            await self._complete(version, [*files, *self._files_of_workers], updates)
            for task in updates.done if updates is not None else ():
                progress.apply(*task)
            old = self._fleet.end()
            self._asked_for = None
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
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: not self._progress.num_under_way), _QUIET_S)

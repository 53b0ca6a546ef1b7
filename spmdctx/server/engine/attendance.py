"""What a scheduler knows of the workers of its job: who is there, what they write, and whether the job goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from spmdctx.server.engine.messages import Lines, Roll
from spmdctx.server.state.presence import BEAT_S, Presence
from spmdctx.server.state.progress import Progress, Summary


class Attendance:
    """The workers of one job; all public methods are called by way of Ray.

    Args:
        progress: of the job.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lines = Lines()
        self._presence = Presence()
        self._number_of: dict[str, int] = {}

    async def begin(self, worker: int, life: str) -> None:
        """A process of a worker has started: what an earlier one had begun is free."""
        if self._presence.begin(worker, life):
            self._progress.lost(worker)
        if not self._tasks:
            self._start(self._look_after())
        await self._notify()

    async def join(self, name: str, life: str) -> int:
        """Returns the number of a process that has come by itself to be a worker: that of an earlier one of its name, or the next."""
        if not name or name not in self._number_of:
            self._number_of[name] = self._presence.num_begun
        await self.begin(self._number_of[name], life)
        return self._number_of[name]

    async def roll(self) -> Roll:
        """Returns who is there."""
        return Roll(self._presence.num_begun, self._presence.silence(), self._progress.failure)

    async def beat(self, worker: int, life: str) -> None:
        """A worker goes on."""
        if self._presence.beat(worker, life):
            await self._notify()

    async def silence(self) -> dict[int, float]:
        """Returns for how many seconds nothing has been heard of each worker that has begun and not ended."""
        return self._presence.silence()

    async def lost(self, worker: int) -> None:
        """A worker is gone, and does not come again."""
        self._presence.end(worker)
        self._progress.lost(worker)
        await self._notify()

    async def _look_after(self) -> None:
        """Frees what workers have begun of which nothing is heard any more."""
        while True:
            await asyncio.sleep(BEAT_S)
            silent = self._presence.fall_silent()
            for worker in silent:
                self._progress.lost(worker)
            if silent:
                await self._notify()

    async def remove_worker(self, worker: int) -> None:
        """Lets a worker leave before its next step."""
        self._progress.leaving.add(worker)
        await self._notify()

    async def fail(self, text: str) -> None:
        """Ends the job with an error."""
        self._progress.fail(text)
        await self._notify()

    async def failure(self) -> str:
        """Returns why the job cannot go on; empty if it can."""
        return self._progress.failure

    async def summary(self) -> Summary:
        """Returns how far the job has come."""
        return self._progress.summary

    async def say(self, worker: int, stream: str, lines: Sequence[str]) -> None:
        """Takes lines that a worker writes."""
        self._lines.add(worker, stream, lines)
        await self._notify()

    async def said(self, after: int, seconds: float) -> list[tuple[int, str, str]]:
        """Returns the lines after the first ones, once there are any; those before are kept no longer."""
        found = self._lines.after(after)
        if not found and seconds:
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: self._lines.after(after)), seconds)
        return self._lines.after(after)

    async def _until(self, generation: int, is_so: Callable[[], bool]) -> bool:
        """Waits for something; returns False if the generation is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_over(generation) or is_so())
        return not self._is_over(generation)

    def _is_over(self, generation: int) -> bool:
        return self._progress.generation != generation or bool(self._progress.failure)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

"""Which workers are there: each process of a worker has a life of its own, and says now and then that it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

BEAT_S = 0.5
LEASE_S = 3.0
"""Seconds of silence after which others take what a worker has begun; one that was only slow loses nothing by it."""


class Presence:
    """The workers of a job, by number.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lives: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._silent: set[int] = set()
        self._looked = clock()

    def begin(self, worker: int, life: str) -> bool:
        """A process of a worker has started, or says so again; returns whether it is another one than before."""
        is_new = self._lives.get(worker) != life
        self._lives[worker] = life
        self.beat(worker, life)
        return is_new

    @property
    def num_begun(self) -> int:
        """Workers that have ever begun."""
        return len(self._lives)

    def end(self, worker: int) -> None:
        """A worker is gone, and does not come again."""
        self._heard.pop(worker, None)
        self._silent.discard(worker)

    def beat(self, worker: int, life: str) -> bool:
        """A worker goes on; returns whether it was thought lost."""
        if self._lives.get(worker) != life:
            return False
        was_silent = worker in self._silent
        self._heard[worker] = self._clock()
        self._silent.discard(worker)
        return was_silent

    def is_over(self, worker: int, life: str) -> bool:
        """Returns whether another process has taken the place of this one."""
        return self._lives.get(worker, life) != life

    def is_silent(self, worker: int) -> bool:
        """Returns whether nothing was heard of a worker for a while."""
        return worker in self._silent

    def fall_silent(self) -> list[int]:
        """Returns the workers of which nothing has been heard since the lease ended, each once.

        Where this was not asked for long, whoever asks was held up, and so was what workers say.
        """
        now = self._clock()
        late, self._looked = now - self._looked > 2 * BEAT_S + 0.5, now
        found = [] if late else [worker for worker, at in self._heard.items() if now - at > LEASE_S and worker not in self._silent]
        self._silent.update(found)
        return found

    def silence(self) -> dict[int, float]:
        """Returns for how many seconds nothing has been heard of each worker that has begun and not ended."""
        return {worker: self._clock() - at for worker, at in self._heard.items()}

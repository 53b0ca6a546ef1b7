"""A thread that prepares items ahead of their use: bounded, passing exceptions on, and closed when nobody needs it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

_PATIENCE_S = 5.0
"""Seconds that `close` waits for a thread that hangs in the source; it is a daemon and ends with the process."""


class _Failed(NamedTuple):
    error: BaseException


class Prefetcher(Generic[Item]):
    """Calls `produce` in a thread, at most `depth` results ahead, until it raises; with depth 0 it is called on demand.

    What `produce` raises, StopIteration included, comes out of `next` in its turn, and again from then on as the end.
    """

    def __init__(self, produce: Callable[[], Item], depth: int, finish: Callable[[], None], stopped: threading.Event) -> None:
        """Starts the thread.

        Args:
            produce: makes the next result.
            depth: how many results are made ahead.
            finish: called once after the last call of `produce`, where that was made.
            stopped: set when no more results are wanted.
        """
        self._produce, self._finish = produce, finish
        self._ended = False
        self._worker = _Worker(produce, depth, finish, stopped) if depth else None
        if self._worker is not None:
            # The thread refers only to the worker, so that a prefetcher that is dropped can end it.
            self._finalizer = weakref.finalize(self, self._worker.stop)

    def next(self) -> Item:
        """Returns the next result.

        Raises:
            StopIteration: at the end, after an exception, and after `close`.
        """
        if self._ended:
            raise StopIteration
        if self._worker is None:
            try:
                return self._produce()
            except BaseException:
                self.close()
                raise
        item = self._worker.take()
        if isinstance(item, _Failed):
            self.close()
            raise item.error
        return item

    def close(self) -> None:
        """Ends the thread and drops what it has made; may be called again."""
        if self._ended:
            return
        self._ended = True
        if self._worker is None:
            self._finish()
        else:
            self._finalizer()


class _Worker(Generic[Item]):
    """The state that the thread and the prefetcher share."""

    def __init__(self, produce: Callable[[], Item], depth: int, finish: Callable[[], None], stopped: threading.Event) -> None:
        self._slots = threading.Semaphore(depth)
        self._items: queue.SimpleQueue[Item | _Failed] = queue.SimpleQueue()
        self._stopped = stopped
        self._thread = threading.Thread(target=self._run, args=(produce, finish), name="spmdctx-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Item | _Failed:
        item = self._items.get()
        self._slots.release()
        return item

    def stop(self) -> None:
        self._stopped.set()
        self._slots.release()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        while not self._items.empty():
            self._items.get()

    def _run(self, produce: Callable[[], Item], finish: Callable[[], None]) -> None:
        try:
            while True:
                self._slots.acquire()
                if self._stopped.is_set():
                    return
                self._items.put(produce())
        except BaseException as error:
            self._items.put(_Failed(error))
        finally:
            finish()

"""The agreement between processes on their parts of a batch, so that all continue, pad, drop or stop together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from threading import Event
from typing import NamedTuple

import jax

from spmdctx._compat import KeyValueStore, key_value_store
from spmdctx.errors import StrategyError

_POLL_S = 0.5
_COMPLETE = "complete "
_numbers = count()


class Share(NamedTuple):
    """One process's part of one batch.

    `rows` are those it has, -1 where its source has ended and -2 where it failed; `expected` those that its devices hold, in the
    `ranges` of the whole batch. `contents` has, for the first batch of a pass, per leaf a digest of which part it is and one of
    what is in it.
    """

    rows: int
    expected: int
    ranges: tuple[tuple[int, int], ...]
    contents: tuple[str, ...] = ()


ENDED, FAILED = -1, -2


class Agreement:
    """One exchange for each batch over JAX's coordination service; processes must make their data loaders in the same order.

    Process 0 collects the shares and sends them to all. If all are complete, it sends only that fact, so that traffic grows with
    the number of processes and not with its square.
    """

    def __init__(
        self, store: Callable[[], KeyValueStore] = key_value_store, process: int | None = None, num_processes: int | None = None
    ) -> None:
        self._store = store
        self._process, self._num_processes = process, num_processes
        self._number = next(_numbers)
        self._pass = self._batch = 0

    def restart(self) -> None:
        """Starts a new pass over the source, in all processes."""
        self._pass, self._batch = self._pass + 1, 0

    def tell_failure(self) -> None:
        """Tells the others that this process cannot read the next batch, and does not wait for them."""
        me, failed = self._me(), Share(FAILED, 0, ())
        self._store().set(self._key(self._batch, me) if me else self._key(self._batch), _written(failed))

    def exchange(self, own: Share, stopped: Event) -> list[Share]:
        """Returns the shares of all processes in their order, or one share for all if all are complete.

        Args:
            own: this process's share.
            stopped: set when nobody waits any more.

        Raises:
            StrategyError: nobody waits any more.
        """
        store, batch, me = self._store(), self._batch, self._me()
        self._batch += 1
        if me:
            store.set(self._key(batch, me), _written(own))
            told = self._wait(self._key(batch), stopped)
        else:
            number = self._num_processes or jax.process_count()
            shares = [own, *(_read(self._wait(self._key(batch, process), stopped)) for process in range(1, number))]
            told = _summary(shares)
            store.set(self._key(batch), told)
        if batch > 1:  # all processes are past that batch: they have told of the one after it
            store.delete(self._key(batch - 2, me) if me else self._key(batch - 2))
        if told.startswith(_COMPLETE):
            rows = int(told.removeprefix(_COMPLETE))
            return [Share(rows, rows, ((0, rows),))]
        return [_read(share) for share in told.split("|")]

    def _me(self) -> int:
        return jax.process_index() if self._process is None else self._process

    def _key(self, batch: int, process: int | None = None) -> str:
        return f"spmdctx/data/{self._number}/{self._pass}/{batch}/{'all' if process is None else process}"

    def _wait(self, key: str, stopped: Event) -> str:
        while not stopped.is_set():
            told = self._store().get(key, _POLL_S)
            if told is not None:
                return told
        raise StrategyError("The data loader was closed while it waited for another process.")


def _summary(shares: Sequence[Share]) -> str:
    if all(share.rows == share.expected and not share.contents for share in shares):
        return f"{_COMPLETE}{max(stop for share in shares for _, stop in share.ranges)}"
    return "|".join(map(_written, shares))


def _written(share: Share) -> str:
    ranges = ";".join(f"{start}-{stop}" for start, stop in share.ranges)
    return f"{share.rows},{share.expected},{ranges},{';'.join(share.contents)}"


def _read(text: str) -> Share:
    rows, expected, ranges, contents = text.split(",")
    pairs = [pair.split("-") for pair in ranges.split(";") if pair]
    return Share(
        int(rows), int(expected), tuple((int(start), int(stop)) for start, stop in pairs), tuple(filter(None, contents.split(";")))
    )

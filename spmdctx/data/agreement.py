"""What the processes tell one another of their parts of a batch, so that all of them go on, pad, drop or stop together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Event
from typing import NamedTuple

import jax

from spmdctx._compat import KeyValueStore, key_value_store
from spmdctx.errors import StrategyError

_POLL_S = 0.5
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
    """An exchange per batch over JAX's coordination service; processes must make their data loaders in the same order."""

    def __init__(self, store: Callable[[], KeyValueStore] = key_value_store) -> None:
        self._store = store
        self._number = next(_numbers)
        self._pass = self._batch = 0

    def restart(self) -> None:
        """A new pass over the source, in all processes."""
        self._pass, self._batch = self._pass + 1, 0

    def tell(self, own: Share) -> None:
        """Tells the others of this process's share of the next batch, and does not wait for theirs."""
        self._store().set(self._key(self._batch, jax.process_index()), _written(own))

    def exchange(self, own: Share, stopped: Event) -> list[Share]:
        """The shares of all processes, in their order.

        Args:
            own: this process's.
            stopped: set when nobody waits any more.

        Raises:
            StrategyError: nobody waits any more.
        """
        self.tell(own)
        me, batch = jax.process_index(), self._batch
        self._batch += 1
        if batch > 1:
            self._store().delete(self._key(batch - 2, me))  # all have read it: they are past batch - 1
        found = []
        for process in range(jax.process_count()):
            found.append(own if process == me else _read(self._wait(self._key(batch, process), stopped)))
        return found

    def _key(self, batch: int, process: int) -> str:
        return f"spmdctx/data/{self._number}/{self._pass}/{batch}/{process}"

    def _wait(self, key: str, stopped: Event) -> str:
        while not stopped.is_set():
            told = self._store().get(key, _POLL_S)
            if told is not None:
                return told
        raise StrategyError("The data loader was closed while it waited for another process.")


def _written(share: Share) -> str:
    ranges = ";".join(f"{start}-{stop}" for start, stop in share.ranges)
    return f"{share.rows},{share.expected},{ranges},{';'.join(share.contents)}"


def _read(text: str) -> Share:
    rows, expected, ranges, contents = text.split(",")
    pairs = [pair.split("-") for pair in ranges.split(";") if pair]
    return Share(
        int(rows), int(expected), tuple((int(start), int(stop)) for start, stop in pairs), tuple(filter(None, contents.split(";")))
    )

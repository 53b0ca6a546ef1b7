"""`spmdctx.data.shard`: turns an iterable of batches into global arrays, split as planned and put on the devices ahead of use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from threading import Event
from typing import Any

from spmdctx.data.agreement import Agreement
from spmdctx.data.prefetch import Prefetcher
from spmdctx.data.producer import Producer, Ready
from spmdctx.data.reader import Reader, state_from_saved
from spmdctx.data.remainder import REMAINDERS
from spmdctx.data.targets import Mask, targets_of
from spmdctx.errors import StrategyError, message


def shard(
    source: Iterable[Any],
    target: Any,
    *,
    remainder: str = "error",
    mask: Mask | None = None,
    prefetch: int = 2,
    whole: bool | None = None,
) -> ShardedBatches:
    """Returns the batches of `source` as global arrays, each placed as the step takes it.

    Args:
        source: an iterable of batches: pytrees of arrays in the structure of the step's batch argument, or tuples of all of them.
            Leaves that are `Blocks` (`spmdctx.data.arrays` makes batches of them) are read by blocks. So are objects of other
            classes with `shape`, `dtype` and `__getitem__`. Each process reads each distinct block of its devices once.
        target: a step, whose last plan counts when the first batch is requested; a Plan, over `jax.devices()`; or a pytree of
            shardings, such as those of `step.in_shardings`.
        remainder: the treatment of a batch with fewer rows than the plan: "error"; "drop"; or "pad" with copies of its last row.
        mask: the key or position in the batch of a mask, one for real rows and zero for padding. If batches do not bring it, it is
            made. It must be an argument of the step, since every batch has it. If the loss is local (`spmdctx.value_and_grad` in
            data_parallel), a device may hold only padding: divide by a fixed number of rows there, not by the mask's sum.
        prefetch: how many batches a thread puts on the devices ahead of their use; 0 for none.
        whole: with several processes, whether each of them provides whole batches; by default if full_batch is set. Otherwise each
            provides the rows, or blocks, that its devices hold (`spmdctx.data.process_shard`). In both cases the processes read in
            step, and agree on short batches and on the end.

    Raises:
        StrategyError: an option does not exist; or, when they are read, batches do not fit.
        PlanError: on the first batch: nothing was planned, or the plan has no batch of this structure.
        TypeError: the source cannot be iterated over.
    """
    if remainder not in REMAINDERS:
        raise StrategyError(f"data.shard has no remainder {remainder!r}.", need="one of " + ", ".join(map(repr, REMAINDERS)))
    if type(prefetch) is not int:
        raise TypeError(message("prefetch counts batches.", got=f"{prefetch!r} of type {type(prefetch).__name__}", need="an int >= 0"))
    if prefetch < 0:
        raise StrategyError("prefetch counts batches.", got=str(prefetch), need="an int >= 0")
    if not isinstance(source, Iterable):
        raise TypeError(
            message(
                "data.shard reads from an iterable of batches.",
                got=type(source).__name__,
                fix="data.arrays(source, batch_size) makes batches of what has __getitem__ for slices",
            )
        )
    return ShardedBatches(source, target, remainder, mask, prefetch, whole)


class ShardedBatches:
    """An iterator over batches on their devices; made by `spmdctx.data.shard`.

    After its end, a new `for` begins a new pass over the source, which is an error where that is an iterator and has none. Leaving
    a `for` early keeps the place; `close` ends the thread.

    Attributes:
        rows: how many rows of the last batch are real.
        padded_rows: how many rows were made up so far.
        dropped_rows: how many rows were left out so far.
        notes: a sentence per batch that was padded or dropped.
    """

    def __init__(self, source: Iterable[Any], target: Any, remainder: str, mask: Mask | None, prefetch: int, whole: bool | None) -> None:
        self._source, self._target = source, target
        self._remainder, self._mask, self._prefetch, self._whole = remainder, mask, prefetch, whole
        self._agreement = Agreement()
        self._ahead: Prefetcher[Ready] | None = None
        self._ended = self._was_read = self._is_used_up = False
        self._state: dict[str, Any] = {"batches": 0, "source": None}
        self.rows = self.padded_rows = self.dropped_rows = 0
        self.notes: tuple[str, ...] = ()

    def __iter__(self) -> ShardedBatches:
        if self._ended:
            self._restart({"batches": 0, "source": None})
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._ahead is None:
            self._ahead = self._started()
        try:
            ready = self._ahead.next()
        except BaseException:
            self._ended = True
            raise
        self._state = {"batches": ready.number + (ready.batch is not None), "source": ready.source_state}
        self._note(ready)
        if ready.batch is None:
            self._is_used_up = True
            self.close()
            raise StopIteration
        return ready.batch

    def __enter__(self) -> ShardedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the pass and its thread; batches read ahead are dropped. An iterator that this object made of the source is closed too."""
        self._ended = True
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last batch that was given out, whatever was read ahead; save it with a checkpoint.

        It is the source's own state if its iterator has `get_state` (grain's do), else the number of batches read in this pass. It
        holds JSON values if the source's state does.
        """
        return dict(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `get_state` returned; a source without a state of its own is read up to it.

        Raises:
            StrategyError: something else than a state.
        """
        if not isinstance(state, Mapping) or set(state) != {"batches", "source"}:
            raise StrategyError("This is no state of a data loader.", got=repr(state), need="what get_state gave")
        self._restart(dict(state))

    def _restart(self, state: dict[str, Any]) -> None:
        self.close()
        self._agreement.restart()
        self._state, self._ended = state, False

    def _started(self) -> Prefetcher[Ready]:
        targets = targets_of(self._target)
        iterator: Iterator[Any] = iter(self._source)
        is_ours = iterator is not self._source
        batches, own = self._state["batches"], self._state["source"]
        if batches and own is None and self._was_read and not is_ours:
            raise StrategyError("The source is an iterator that was read from: it cannot go back.", fix="set the state of a fresh one")
        if own is None and self._is_used_up and not is_ours:
            raise StrategyError(
                "The source is an iterator that has ended: a second pass over it would be empty.",
                fix="give an iterable that begins anew, such as a list, spmdctx.data.arrays, or a class with __iter__",
            )
        self._was_read = True
        if own is not None:
            stateful: Any = iterator
            stateful.set_state(state_from_saved(own))
        whole = targets.whole if self._whole is None else self._whole
        reader = Reader(iterator, targets, self._mask, whole, skip=batches if own is None else 0)
        stopped = Event()
        producer = Producer(reader, self._remainder, self._agreement, stopped, first=batches)
        close = getattr(iterator, "close", None) if is_ours else None
        return Prefetcher(producer, self._prefetch, close or _nothing, stopped)

    def _note(self, ready: Ready) -> None:
        sentences = []
        for number, rows in ready.dropped:
            self.dropped_rows += rows
            is_end = ready.batch is None and number == ready.number
            why = "and another process has no more: it and what follows are dropped" if is_end else "fewer than planned: it is dropped"
            sentences.append(f"Batch {number} has {rows} rows, {why}.")
        if ready.batch is not None:
            self.rows = ready.rows
            missing = ready.expected - ready.rows
            if missing:
                self.padded_rows += missing
                sentences.append(
                    f"Batch {ready.number} has {ready.rows} of {ready.expected} rows: it is padded with copies of the last row."
                )
        self.notes += tuple(sentences)


def _nothing() -> None:
    """Does nothing, to close an iterator that cannot be closed or is the user's own."""

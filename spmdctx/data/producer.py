"""The producer, which reads batches and puts them on the devices, one after the other, in the prefetching thread."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdctx._compat import x64_is_on
from spmdctx.data.agreement import Agreement
from spmdctx.data.blocks import Bounds, Piece, assemble, part_of
from spmdctx.data.lazy import is_read_by_blocks, reader
from spmdctx.data.reader import Form, Reader
from spmdctx.data.remainder import Decision, decide
from spmdctx.errors import StrategyError


class Ready(NamedTuple):
    """A batch on its devices.

    `rows` of `expected` are real. `number` is the batch's place in the pass over the source, and `source_state` the state of the
    source after it. `dropped` are the numbers and rows of the batches left out since the last one.
    """

    batch: Any
    rows: int
    expected: int
    number: int
    source_state: Any
    dropped: tuple[tuple[int, int], ...]


class Producer:
    """One pass over a source: calling it gives a `Ready`; one without a batch is the end."""

    def __init__(self, source: Reader, remainder: str, agreement: Agreement, stopped: Event, first: int) -> None:
        self._source, self._remainder, self._agreement, self._stopped = source, remainder, agreement, stopped
        self._number = first
        self._previous: list[Any] | None = None
        self._x64 = x64_is_on()
        self._num_used = first  # a pass that goes on may end with nothing but a short batch
        self._ended = False

    def __call__(self) -> Ready:
        """Returns the next batch, or the end once.

        Raises:
            StopIteration: after the end.
        """
        if self._ended:
            raise StopIteration
        dropped: list[tuple[int, int]] = []
        with jax.enable_x64(self._x64):
            while True:
                values, decision = self._next()
                number = self._number
                if decision.kind == "end":
                    dropped += [(number, decision.rows)] if decision.rows else []
                    self._check_used(dropped)
                    self._ended = True
                    return Ready(None, 0, 0, number, self._source.state(), tuple(dropped))
                self._number += 1
                if decision.kind == "drop":
                    dropped.append((number, decision.rows))
                    continue
                self._num_used += 1
                state = self._source.state()
                batch = self._placed(values, decision)
                return Ready(batch, decision.rows, decision.expected, number, state, tuple(dropped))

    def _next(self) -> tuple[list[Any] | None, Decision]:
        """Returns the next batch's values and the decision on it, agreed with the other processes if all of them share it."""
        source, where = self._source, f"batch {self._number}"
        try:
            values, own = source.read(where)
        except BaseException:
            if source.spans:
                self._agreement.tell_failure()
            raise
        shares = self._agreement.exchange(own, self._stopped) if source.spans else [own]
        return values, decide(shares, self._remainder, self._number)

    def _placed(self, values: Sequence[Any] | None, decision: Decision) -> Any:
        form = self._source.form
        assert form is not None, "a batch that is used has a form"
        given = 0 if values is None else None
        if values is None:
            assert self._previous is not None, "a process without batches is an error"
            values = self._previous
        elif form.rows is not None and decision.kind == "pad":
            given = values[form.rows].shape[0]
        if self._source.local:
            self._previous = [_last_row(value, form.counts_rows(index)) for index, value in enumerate(values)]
        pieces = [self._piece(form, index, value, given) for index, value in enumerate(values)]
        arrays = assemble(pieces)
        # The source may write to its memory again once it is asked for the next batch.
        return jax.tree.unflatten(form.structure, jax.block_until_ready(arrays))

    def _piece(self, form: Form, index: int, value: Any, given: int | None) -> Piece:
        """Returns one leaf to place; `given` rows of it are real, None means all."""
        shape, sharding = form.shapes[index], form.leaves[index].sharding
        if index == form.mask:
            value = _mask(value, form.given[index], form.leaves[index].dtype, given)
            read = reader(value, None)
        elif given is None or not form.counts_rows(index):
            read = reader(value, None)
        else:
            read = reader(value, max(given, 1))
        if not self._source.local:
            return Piece(shape, sharding, read, in_memory=not is_read_by_blocks(value))
        part = part_of(sharding, shape)

        def read_local(bounds: Bounds) -> Any:
            return read(part.local_bounds(bounds))

        return Piece(shape, sharding, read_local)

    def _check_used(self, dropped: Sequence[tuple[int, int]]) -> None:
        if dropped and not self._num_used:
            raise StrategyError(
                f"Every batch is dropped: the largest has {max(rows for _, rows in dropped)} rows.",
                fix="plan the step for batches of this size, or say remainder='pad'",
            )


def _last_row(value: Any, counts_rows: bool) -> Any:
    """Returns the row with which a process pads after the end of its source."""
    return np.array(value[-1:]) if counts_rows and value is not None and not is_read_by_blocks(value) else value


def _mask(value: Any, shape: tuple[int, ...], dtype: Any, given: int | None) -> Any:
    """Returns the mask of a batch: as given, else one; zero for rows that are padding."""
    rows = shape[0] if given is None else given
    mask = np.zeros(shape, np.bool_ if dtype is None else dtype)
    mask[:rows] = 1 if value is None else value[:rows]
    return mask

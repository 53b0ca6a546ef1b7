"""Reads the batches of a source one after the other and checks them against the plan."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdctx.data.agreement import ENDED, Share
from spmdctx.data.blocks import Bounds, part_of, slices
from spmdctx.data.lazy import is_read_by_blocks
from spmdctx.data.targets import Leaf, Mask, Targets
from spmdctx.errors import StrategyError

_BYTES = "bytes"
"""Key of a state that is bytes, as of grain's DataLoader, since JSON has no bytes."""


class Form(NamedTuple):
    """The form of all batches of a source.

    `shapes` are global; `given` are the shapes of this process's batches, which differ if each process provides its part. `rows`
    is the leaf whose dimension 0 counts the rows, or None if no leaf has dimensions. `mask` is the leaf of the mask.
    """

    leaves: list[Leaf]
    structure: Any
    shapes: list[tuple[int, ...]]
    given: list[tuple[int, ...]]
    rows: int | None
    mask: int | None

    def counts_rows(self, leaf: int) -> bool:
        """Returns whether dimension 0 of a leaf is that of the batch."""
        if self.rows is None or not self.shapes[leaf]:
            return False
        return leaf == self.mask or self.shapes[leaf][0] == self.shapes[self.rows][0]

    def row_ranges(self, leaf: int, local: bool) -> Bounds:
        """Returns the rows of the whole batch that this process's batches hold."""
        shape = self.shapes[leaf]
        return part_of(self.leaves[leaf].sharding, shape).dims[0] if local else ((0, shape[0]),)


class Reader:
    """Reads a source; `form` and `local`, whether batches are this process's parts, are known from the first batch on.

    `spans` says whether batches go to devices of several processes, which then read in step.
    """

    def __init__(self, iterator: Iterator[Any], targets: Targets, mask: Mask | None, whole: bool, skip: int) -> None:
        self._iterator, self._targets, self._mask = iterator, targets, mask
        self._skip, self._has_told = skip, False
        self.form: Form | None = None
        self.spans = any(not leaf.sharding.is_fully_addressable for leaf in targets.flat)
        self.local = self.spans and not whole

    def read(self, where: str) -> tuple[list[Any] | None, Share]:
        """Returns the values of the next batch, or None at the end, and which rows they are; a missing mask is None.

        Raises:
            PlanError: a batch has another structure.
            StrategyError: a batch has other shapes or types, or its leaves have different numbers of rows.
        """
        values = self._next(where)
        form = self.form
        if form is None:
            return None, Share(ENDED, 0, ())
        rows, expected = (1, 1) if values is None else _rows(values, form, where)
        ranges: Bounds = ((0, 1),)
        if form.rows is not None:
            expected, ranges = form.given[form.rows][0], form.row_ranges(form.rows, self.local)
        if values is not None and rows < expected and self.local:
            self._check_ranges(form, ranges, where)
        contents = _contents(values, form, self.local) if values is not None and self.spans and not self._has_told else ()
        self._has_told = True
        return values, Share(ENDED if values is None else rows, expected, ranges, contents)

    def state(self) -> Any:
        """Returns the source's own state, or None if it has none."""
        if not hasattr(self._iterator, "get_state"):
            return None
        state = self._iterator.get_state()
        return {_BYTES: state.decode("latin-1")} if isinstance(state, bytes) else copy.deepcopy(state)

    def _next(self, where: str) -> list[Any] | None:
        end = object()
        for done in range(self._skip):
            if next(self._iterator, end) is end:
                raise StrategyError(
                    f"The source ends after {done} batches, and the state says that {self._skip} were read.",
                    fix="set the state of the source that it was taken from",
                )
        self._skip = 0
        batch = next(self._iterator, end)
        if batch is end:
            return None
        found = self._targets.match(batch, self._mask)
        values = [value if value is None or is_read_by_blocks(value) else np.asarray(value) for value in found.values]
        if self.form is None:
            self.local = self.local and not any(map(is_read_by_blocks, values))
            self.form = _form(values, found.leaves, found.structure, found.mask, self.local)
        _check_types(values, self.form, where)
        return values

    @staticmethod
    def _check_ranges(form: Form, ranges: Bounds, where: str) -> None:
        for leaf in range(len(form.leaves)):
            if leaf != form.mask and form.counts_rows(leaf) and form.row_ranges(leaf, True) != ranges:
                raise StrategyError(
                    f"A short batch is no part of one: '{form.leaves[leaf].path}' has other rows in this process than the first leaf.",
                    where=where,
                    fix="let every process give whole batches (whole=True)",
                )


def state_from_saved(state: Any) -> Any:
    """Returns a source's state as the source gave it."""
    return state[_BYTES].encode("latin-1") if isinstance(state, dict) and set(state) == {_BYTES} else state


def _form(values: Sequence[Any], leaves: list[Leaf], structure: Any, mask: int | None, local: bool) -> Form:
    shapes = [_global_shape(value, leaf, local) for value, leaf in zip(values, leaves, strict=True)]
    rows = next((index for index, shape in enumerate(shapes) if shape and index != mask), None)
    if mask is not None and rows is not None and not shapes[mask]:
        shapes[mask] = shapes[rows][:1]
    given = shapes
    if local:
        parts = [part_of(leaf.sharding, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        for part, leaf in zip(parts, leaves, strict=True):
            if not part.is_grid:
                raise StrategyError(
                    f"The blocks of '{leaf.path}' that this process holds make up no array.",
                    got=str(leaf.sharding),
                    fix="let every process give whole batches (whole=True), or give leaves that are read by blocks",
                )
        given = [part.local_shape for part in parts]
    return Form(leaves, structure, shapes, given, rows, mask)


def _global_shape(value: Any, leaf: Leaf, local: bool) -> tuple[int, ...]:
    if leaf.shape is not None:
        return leaf.shape
    if value is None:
        return ()
    try:
        if local:
            return tuple(jax.make_array_from_process_local_data(leaf.sharding, value).shape)
        leaf.sharding.shard_shape(tuple(value.shape))
    except ValueError as error:
        raise StrategyError(
            "A batch leaf cannot be split.", where=leaf.path, got=f"shape {value.shape}", need=str(leaf.sharding)
        ) from error
    return tuple(value.shape)


def _rows(values: Sequence[Any], form: Form, where: str) -> tuple[int, int]:
    """Returns how many rows a batch has, and how many it should have."""
    if form.rows is None:
        rows, expected = 1, 1
    else:
        expected, shape = form.given[form.rows][0], np.shape(values[form.rows])
        rows = min(shape[0], expected) if shape else expected
    for index, (value, leaf) in enumerate(zip(values, form.leaves, strict=True)):
        shape = form.given[index]
        need = (rows, *shape[1:]) if rows < expected and form.counts_rows(index) else shape
        if value is not None and tuple(value.shape) != need:
            raise StrategyError(
                f"Batch leaf '{leaf.path}' has not the shape that it should have.",
                where=where,
                got=f"shape {tuple(value.shape)}",
                need=f"shape {need}"
                + ("" if need == shape else f", as '{form.leaves[form.rows or 0].path}' has {rows} of {expected} rows"),
                fix="plan the step for batches of this shape, or give each process its part of the batch, or all of it with whole=True",
            )
    return rows, expected


def _contents(values: Sequence[Any], form: Form, local: bool) -> tuple[str, ...]:
    """Returns digests for each leaf: of the part that this process holds, and of its contents ("-" if not in memory)."""
    found = []
    for value, leaf, shape in zip(values, form.leaves, form.shapes, strict=True):
        part = part_of(leaf.sharding, shape)
        if value is None or is_read_by_blocks(value):
            found.append("-")
            continue
        digest = 0
        for bounds, _ in part.blocks:
            digest = zlib.crc32(value[slices(part.local_bounds(bounds) if local else bounds)].tobytes(), digest)
        found.append(f"{zlib.crc32(np.array([bounds for bounds, _ in part.blocks], dtype=np.int64).tobytes()):08x}{digest:08x}")
    return tuple(found)


def _check_types(values: Sequence[Any], form: Form, where: str) -> None:
    for value, leaf in zip(values, form.leaves, strict=True):
        if value is None or leaf.dtype is None:
            continue
        given = jax.dtypes.canonicalize_dtype(value.dtype)
        if given != leaf.dtype:
            raise StrategyError(
                f"Batch leaf '{leaf.path}' has another type than the plan.", where=where, got=str(given), need=str(leaf.dtype)
            )

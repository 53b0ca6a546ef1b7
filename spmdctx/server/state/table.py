"""One server's rows of a table: they are renewed in place, and only those that a step reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx.server.program.rows import Rows
from spmdctx.server.program.spec import TableSpec

Array = np.ndarray[Any, Any]
_LEAST = 16
_STEPS = 256
_BLOCK = 1 << 16


class Touched(NamedTuple):
    """The rows that one step renews: their places, and what programs take, with rows of zero gradient at the end."""

    places: Array
    padded: Array
    held: list[Array]
    gradient: Array


class RowTable:
    """The rows of one table on one server.

    A row whose gradient is zero changes all the same by some optimizers. Such steps are done when the row is next read or saved, by the
    scalars of each of them, so that the table is what it would be if all rows were renewed in each step.

    Args:
        spec: what to do with it.
        arrays: what is held, by slot; the table takes them over.
        version: updates done.
    """

    def __init__(self, spec: TableSpec, arrays: Mapping[str, Array], version: int) -> None:
        self.spec, self.version = spec, version
        self._arrays = {slot: np.require(arrays[slot], requirements=["C", "W"]) for slot in spec.held}
        call = jax.export.deserialize(bytearray(spec.step)).call
        self._step = jax.jit(call)
        self._skipped = jax.jit(_Skipped(call, len(spec.held), spec))
        self._count = len(next(iter(self._arrays.values())))
        self._last = None if spec.is_still else np.full(self._count, version, np.int64)
        self._first = version
        self._past: list[list[Array]] = []
        self._before: tuple[Array, Array] | None = None
        self._lock = threading.RLock()

    def arrays(self) -> dict[str, Array]:
        """Returns what is held, all rows as they are after the last update; nobody may write to it."""
        with self._lock:
            if self._last is not None:
                self._catch_up(np.flatnonzero(self._last < self.version), self.version)
            self._first, self._past = self.version, []
        return self._arrays

    def read(self, slot: str) -> Array:
        """Returns a copy of an array, all rows as they are after the last update; others may still read the version before."""
        number = list(self.spec.held).index(slot)
        with self._lock:
            found = self._arrays[slot].copy()
            late = np.arange(0) if self._last is None else np.flatnonzero(self._last < self.version)
            for places in self._alike(late, self.version):
                found[places] = self._renewed(places, self.version)[number]
            return found

    def assign(self, version: int, arrays: Mapping[str, Array]) -> None:
        """Takes over rows in place of all those of a version, by slot; what others have missed before is done first."""
        with self._lock:
            if not arrays or version != self.version:
                return
            self.arrays()
            for slot, rows in arrays.items():
                self._arrays[slot][:] = rows

    def pull(self, places: Array, version: int | None = None) -> Array | None:
        """Returns rows of the table as they are now, or in a version: the present one or the one before, else None.

        Another server may be one version behind, and a worker may still need what belongs to that one.
        """
        with self._lock:
            first = next(iter(self._arrays.values()))
            if version is None or version == self.version:
                self._catch_up(places, self.version)
                return first[places]
            if version != self.version - 1 or self._before is None:
                return None
            known, old = self._before
            at = np.searchsorted(known, places).clip(max=max(len(known) - 1, 0))
            is_known = known[at] == places if len(known) else np.zeros(len(places), bool)
            if self._last is not None and (self._last[places[~is_known]] > version).any():
                return None
            self._catch_up(places[~is_known], version)
            found = first[places]
            found[is_known] = old[at[is_known]]
            return found

    def touched(self, parts: Sequence[Rows], num_parts: int) -> Touched:
        """Returns the rows of all parts, their gradients joined as those of whole arrays."""
        join = self.spec.join
        parts = parts if join.kind == "mean" else parts[-1:]
        places = np.unique(np.concatenate([own.places for own in parts]))
        size = bucket(len(places))
        dtype = jnp.dtype(join.sum_dtype)
        total = np.zeros((size, *self.spec.gradient_shape), dtype)
        for own in parts:
            total[np.searchsorted(places, own.places)] += own.values.astype(dtype, copy=False)
        if join.kind == "mean":
            total = (total / dtype.type(num_parts)).astype(dtype, copy=False)
        padded = np.concatenate([places, np.zeros(size - len(places), places.dtype)])
        with self._lock:
            self._catch_up(places, self.version)
            held = [own[padded] for own in self._arrays.values()]
        return Touched(places, padded, held, total.astype(jnp.dtype(join.dtype), copy=False))

    def renew(self, touched: Touched, scalars: Mapping[str, Any]) -> None:
        """Does one update: renews the rows, and keeps what others need to be renewed later."""
        own = [np.asarray(scalars[slot]) for slot in self.spec.scalars]
        made = [np.asarray(one) for one in self._step(*touched.held, touched.gradient, *own)]
        with self._lock:
            self._before = touched.places, touched.held[0][: len(touched.places)]
            for array, rows in zip(self._arrays.values(), made, strict=True):
                array[touched.places] = rows[: len(touched.places)]
            if self._last is not None:
                self._past.append(own)
                self._last[touched.places] = self.version + 1
            self.version += 1

    def _catch_up(self, places: Array, version: int) -> None:
        """Does the updates before a version that some rows have missed."""
        for own in self._alike(places, version):
            for array, rows in zip(self._arrays.values(), self._renewed(own, version), strict=True):
                array[own] = rows
            if self._last is not None:
                self._last[own] = version

    def _alike(self, places: Array, version: int) -> Iterator[Array]:
        """Gives the places that have missed updates, those together that have missed about as many."""
        if self._last is None or not len(places):
            return
        missed = version - self._last[places]
        places, missed = places[missed > 0], missed[missed > 0]
        classes = np.frexp(missed)[1]
        for one in np.unique(classes):
            own = np.unique(places[classes == one])
            for start in range(0, len(own), _BLOCK):
                yield own[start : start + _BLOCK]

    def _renewed(self, places: Array, version: int) -> list[Array]:
        """Returns rows of all arrays after the updates before a version that they have missed."""
        assert self._last is not None, "a table whose rows are still has nothing to do late"
        size = bucket(len(places), 4)
        padded = np.concatenate([places, np.full(size - len(places), places[0])])
        last = self._last[padded]
        held = [own[padded] for own in self._arrays.values()]
        for first in range(int(last.min()), version, _STEPS):
            past = self._past[first - self._first : min(first + _STEPS, version) - self._first]
            scalars = [np.stack([*column, *[column[-1]] * (_STEPS - len(past))]) for column in zip(*past, strict=True)]
            held = self._skipped(held, (last - first).astype(np.int32), np.int32(len(past)), scalars)
        return [np.asarray(rows)[: len(places)] for rows in held]


class _Skipped:
    """Does up to `_STEPS` updates of rows whose gradient is zero."""

    def __init__(self, call: Any, num_held: int, spec: TableSpec) -> None:
        self._call, self._num_held, self._spec = call, num_held, spec

    def __call__(self, held: Sequence[Any], start: Any, count: Any, scalars: Sequence[Any]) -> list[Any]:
        zero = jnp.zeros((held[0].shape[0], *self._spec.gradient_shape), self._spec.join.dtype)

        def renewed(number: Any, rows: list[Any]) -> list[Any]:
            made = self._call(*rows, zero, *(column[number] for column in scalars))
            begun = start <= number
            return [jnp.where(begun.reshape(-1, *[1] * (old.ndim - 1)), new, old) for old, new in zip(rows, made, strict=True)]

        found: list[Any] = jax.lax.fori_loop(0, count, renewed, list(held))
        return found


def bucket(count: int, factor: int = 2) -> int:
    """Returns the number of rows that programs take for so many: few different ones, so that few are compiled."""
    size = _LEAST
    while size < count:
        size *= factor
    return size

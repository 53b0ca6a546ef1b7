"""Counts what a plan has in memory beside its values as they are stored, and when.

That is copies in other shardings, results that wait for their reduction, and what products that run last keep alive.
`machine.xla.collectives.placing` and `machine.xla.late_products` tell what XLA does there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.cost.memory.lives import Copy, StepMemory
from spmdctx.ir.graph import Graph, Op
from spmdctx.machine.xla.collectives.combining import Reduced, combined
from spmdctx.machine.xla.collectives.placing import MOST_HIDING, PRODUCTS_WAITED
from spmdctx.machine.xla.late_products import LARGEST_UPDATE, GradientProduct
from spmdctx.machine.xla.overlap import overlap_candidates


class _LateRead(NamedTuple):
    """A read of a value's copy `key` by a product that may run last."""

    op: int
    value: int
    key: object
    bytes: int


class Copies:
    """The copies of values in other shardings than their own; each is alive from its first reader to its last."""

    def __init__(self, graph: Graph, memory: StepMemory) -> None:
        self._graph, self._memory = graph, memory
        self._of: dict[object, Copy] = {}
        self._gathered = self._of
        self._last = max(len(graph.ops) - 1, 0)
        self._terminal = overlap_candidates(graph).terminal
        self._may_be_last = frozenset(product.op for product in memory.gradients)
        self._reads: list[_LateRead] = []
        self._gathers: list[tuple[object, int, int]] = []
        self._in_place: list[tuple[int, int]] = []
        self._slices: list[tuple[object, int]] = []
        self._passes: list[tuple[int, object, int]] = []
        self._reduced: list[Reduced] = []
        self._waiting: list[Copy] = []

    def finish(self, moved: Collection[int], sizes: Sequence[int], late: Mapping[int, GradientProduct]) -> list[Copy]:
        """Returns all copies when every op is known; may be called again.

        Args:
            moved: values that are moved anywhere.
            sizes: bytes of each value as it is stored.
            late: the products that run last, from `late`.
        """
        self._of = dict(self._gathered)
        for read in self._reads:
            time = self._last if read.op in late else self._memory.times[read.op]
            self._read(read.key, time if read.op in late else self._memory.firsts[read.op], time, read.bytes)
        self._hide_gathers()
        until = self._read_late(late)
        ends = {life.value: life.end for life in self._memory.lives if life.value in until} if until else {}
        found = [Copy(ends[value] + 1, time, sizes[value]) for value, time in until.items() if ends.get(value, time) < time]
        # The next value of a carry is not made in the carry's memory if it is moved.
        found += [Copy(start, end, sizes[value]) for value, start, end in self._memory.in_carries if value in moved]
        return [*found, *self._waiting, *self._of.values(), *self._on_the_way()]

    def reduce_with_others(self, op: Op, value: int, group: Hashable, num_bytes: int) -> None:
        """Adds a gradient that XLA may reduce with others of its group."""
        if self._memory.iteration_ends[op.id] == op.id:
            self._reduced.append(Reduced(op.id, value, group, num_bytes))

    def combine(self, most_bytes: int) -> None:
        """Keeps gradients in memory until the last one is made that is reduced with them, if one all_reduce takes `most_bytes`."""
        ends = {life.value: life.end for life in self._memory.lives} if self._reduced else {}
        for together in combined(self._graph, self._reduced, most_bytes):
            time = max(self._memory.times[one.op] for one in together)
            starts = [ends.get(one.value, self._memory.times[one.op]) + 1 for one in together]
            self._waiting += [Copy(start, time, one.bytes) for start, one in zip(starts, together, strict=True) if start <= time]

    def _on_the_way(self) -> list[Copy]:
        """Returns, for each time, the largest copy on the way to another one; a copy that is also read itself counts as such there."""
        largest: dict[int, int] = {}
        for time, key, num_bytes in self._passes:
            known = self._of.get(key)
            if known is None or not known.start <= time <= known.end:
                largest[time] = max(largest.get(time, 0), num_bytes)
        return [Copy(time, time, num_bytes) for time, num_bytes in largest.items()]

    def late(self, moved: Collection[int], reduced: Collection[int], sizes: Sequence[int]) -> dict[int, GradientProduct]:
        """Returns the products that run last, by their ops.

        Args:
            moved: values that are moved anywhere.
            reduced: ops that make partial results.
            sizes: bytes of each value as it is stored.
        """
        materialized = self._memory.materialized
        here = [one for one in self._memory.gradients if one.op not in reduced and not any(map(moved.__contains__, one.made))]
        return {one.op: one for one in here if sum(sizes[value] for value in one.made if materialized[value]) <= LARGEST_UPDATE}

    def is_materialized(self, value: int) -> bool:
        """Returns whether the value exists in memory in its own sharding."""
        return bool(self._memory.materialized[value])

    def is_made_in_place(self, value: int) -> bool:
        """Returns whether the value, or everything that is made of it by transposing, exists in memory in its own sharding."""
        return bool(self._memory.settled[value])

    @property
    def narrow(self) -> bytearray:
        """The flags of the values that are kept in the type of matrix operands if the compiler narrows these."""
        return self._memory.narrow

    def pass_on(self, op: Op, value: int, num_bytes: int) -> None:
        """Adds the copy of a value that `op` makes in another sharding than the value's own."""
        time = self._memory.runs[op.id]
        self._of["made", value] = Copy(time, self._after(time), num_bytes)

    def keep(self, op: Op, value: int, num_bytes: int, *, to_the_end: bool, put_off: bool) -> None:
        """Adds the partial result that `op` makes, which stays in memory until XLA reduces it.

        XLA reduces it right after the op, or `to_the_end` of the op's iteration of its loop. With `put_off`, outside of loops, it waits
        for some more matrix products (`PRODUCTS_WAITED`).
        """
        time, products = self._memory.times[op.id], self._memory.products
        until = max(time, self._memory.iteration_ends[op.id]) if to_the_end else time
        if put_off and products and self._memory.iteration_ends[op.id] == op.id:
            place = bisect_left(products, self._memory.runs[op.id]) + PRODUCTS_WAITED
            until = max(until, products[min(place, len(products) - 1)])
        self._of["unreduced", value] = Copy(self._memory.runs[op.id], until, num_bytes)

    def reduce_in_place(self, op: Op, num_bytes: int) -> None:
        """Notes that XLA reduces the result of `op` in place, unless it fuses a gather with the op."""
        self._in_place.append((op.id, num_bytes))

    def make(self, op: Op, value: int, key: object, num_bytes: int, *, gathered: bool) -> None:
        """Adds a read by `op` of the copy of a value that `key` names."""
        if gathered and not self._terminal[value]:
            self._gathers.append((key, op.id, self._graph.producers.get(value, -1)))
        if op.id in self._may_be_last and value in op.operands:
            self._reads.append(_LateRead(op.id, value, key, num_bytes))
        else:
            self._read(key, self._memory.firsts[op.id], self._memory.times[op.id], num_bytes)

    def make_after(self, op: Op, key: object, num_bytes: int) -> None:
        """Adds the copy that is made of the result of `op`, when values that only `op` reads are gone."""
        time = self._after(self._memory.runs[op.id])
        self._read(key, time, time, num_bytes)

    def keep_for_loop(self, op: Op, key: object, last: int, num_bytes: int) -> None:
        """Adds the copy with which `op` enters a loop, until the op `last` leaves it."""
        self._read(key, op.id, last, num_bytes)

    def pass_through(self, op: Op, key: object, num_bytes: int) -> None:
        """Adds a copy on the way to another one that `op` reads; of those made at the same time, memory holds one after the other."""
        self._passes.append((self._memory.firsts[op.id], key, num_bytes))

    def turn(self, op: Op, value: int, num_bytes: int) -> None:
        """Adds what `op` makes of a value that the step returns, until a copy turns it at the step's end."""
        self._of["turned", value] = Copy(self._memory.runs[op.id], self._last, num_bytes)

    def scatter(self, op: Op, num_bytes: int) -> None:
        """Adds the table in rows into which `op` scatters, until it is laid out as its result."""
        time = self._memory.times[op.id]
        self._of["in rows", op.id] = Copy(time, time, num_bytes)

    def slice_of(self, key: object, value: int) -> None:
        """Notes that a value is a slice of a gathered copy, and that readers of the value read the copy in its place."""
        self._slices.append((key, value))

    def _read(self, key: object, start: int, end: int, num_bytes: int) -> None:
        known = self._of.get(key)
        self._of[key] = Copy(start, end, num_bytes) if known is None else Copy(min(known.start, start), max(known.end, end), known.bytes)

    def _after(self, time: int) -> int:
        return min(time + 1, self._last)

    def _hide_gathers(self) -> None:
        """Finds the products that XLA fuses gathers with; results of these are not reduced in place.

        XLA fuses a gather with the products that run before its reader, if the gathered value exists before them. It does not so fuse the
        gather of a gradient.
        """
        runs, ends, products = self._memory.runs, self._memory.iteration_ends, self._memory.products
        hiding = set()
        for key, reader, maker in self._gathers:
            place = bisect_left(products, min(runs[reader], self._of[key].start))
            for product in reversed(products[max(place - MOST_HIDING, 0) : place]):
                if maker >= 0 and runs[maker] >= product:
                    break
                if ends[product] == ends[reader] or (ends[product] == product and ends[reader] == reader):
                    hiding.add(product)
        for op, num_bytes in self._in_place:
            if op in hiding:
                self._of["unreduced, hides a gather", op] = Copy(runs[op], self._memory.times[op], num_bytes)

    def waiting(self, sizes: Sequence[int], late: Mapping[int, GradientProduct], time: int) -> dict[int, int]:
        """Returns the bytes that each of the products that run last keeps alive at a time for itself.

        These are values that it reads after the end of their lives, and copies.
        """
        ends = {life.value: life.end for life in self._memory.lives}
        found = dict.fromkeys(late, 0)
        for one in late.values():
            found[one.op] = sum(sizes[value] for value in (*one.read, *one.read_inside) if ends.get(value, time) < time)
        for read in self._reads:
            if read.op in late and self._memory.times[read.op] < time:
                found[read.op] += read.bytes
        return found

    def _read_late(self, late: Mapping[int, GradientProduct]) -> dict[int, int]:
        """Returns until when the products that run last read values, or until when values are copied for them.

        Also prolongs the gathered copies whose slices are read later.
        """
        until: dict[int, int] = {}

        def extend(values: Iterable[int], time: int) -> None:
            for value in values:
                until[value] = max(until.get(value, 0), time)

        copied = {(read.op, read.value): self._of[read.key].start for read in self._reads if read.op in late}
        for one in late.values():
            extend(one.read_inside, self._last)
            for value in one.read:
                extend((value,), copied.get((one.op, value), self._last))
        ends: dict[int, int] = {life.value: life.end for life in self._memory.lives} if self._slices else {}
        for key, value in self._slices:
            if key in self._of:
                known, end = self._of[key], max(ends.get(value, 0), until.get(value, 0))
                self._of[key] = known._replace(end=max(known.end, end))
        return until

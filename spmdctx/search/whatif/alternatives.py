"""The alternatives to a plan's choices: what each costs the whole step, and which changes would let it win.

An alternative is a whole assignment with one value (or op) forced. Its price is that of `cost.price`, like the plan's own:

    delta = price(alternative) - price(plan)

Alternatives that split into other numbers of slices come before mere permutations of the plan's axes, which seldom differ in price.

A flip is a figure of the machine or of the program at which the sign of delta changes; both assignments are priced again there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeVar

from spmdctx.cost.bill import Bill
from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.ir.mesh import LogicalMesh, divides
from spmdctx.ir.projection import FactorAxes, legal, project
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding, TensorSharding
from spmdctx.machine.collectives import collective_price
from spmdctx.machine.topology import Topology
from spmdctx.search.problem.space import Space
from spmdctx.search.whatif.neighbourhood import Changes, Neighbourhood
from spmdctx.search.whatif.rescale import batch_size, with_batch

MAX_POLISHED = 8
MAX_PRICED = 3
BANDWIDTH_SCALES = tuple(2.0**power for power in range(-6, 7))
BATCH_SCALES = (Fraction(2), Fraction(4), Fraction(16))
BISECTIONS = 24

ROUNDING_S = 1e-9
"""A difference of step times below this, or below a millionth of the step, counts as zero."""

Force = Callable[[Mapping[int, TensorSharding], Mapping[int, FactorAxes]], Assignment]
"""Finds the best assignment for forced shardings (by value) and forced axes (by op)."""

_T = TypeVar("_T")


class _TimedCollective(NamedTuple):
    """A collective, its seconds, and the share of them that hides behind compute."""

    kind: str
    axes: AxisNames
    payload_bytes: int
    time_s: float
    share: float


_Option = tuple[dict[int, TensorSharding], FactorAxes | None]
"""Shardings to force, and the axes of the op that they are for."""


class Alternative(NamedTuple):
    """Another choice for one value or op, with everything that follows from it.

    `sharding` is the value's (of an op's first result), `axes` the op's, None for a value. `delta_s` and `delta_bytes` are
    the seconds of the step (0 if only rounding differs) and the bytes at the peak of one device beyond the plan's. `num_moved`
    counts the other values that change their sharding along; `bill` is the price of the whole assignment.
    """

    sharding: TensorSharding
    axes: FactorAxes | None
    delta_s: float
    delta_bytes: int
    num_moved: int
    assignment: Assignment
    bill: Bill


class Flip(NamedTuple):
    """A `figure` at which the alternative wins: below or above `value`, while it is `now`.

    `figure` is "link_bytes_per_s", "memory_bytes" or "batch". The threshold of a batch is the first size tried at which the
    alternative is faster; `delta_s` is its lead there (negative), 0 at a threshold that was found exactly.
    """

    figure: str
    below: bool
    value: float
    now: float | None
    delta_s: float


@dataclass(frozen=True)
class PricedAlternatives:
    """The alternatives of one plan, computed on demand.

    Attributes:
        graph, scopes, from_literals, manual, assignment, mesh, topology, donated: as for `price`.
        pinned: values that the user fixed; they move only if the question is about them.
        forced: ops whose axes the user fixed.
        memory_bytes: the budget per device, if there is one.
        force: the search for the plan that follows from a forced value or op; None for a local one.
    """

    graph: Graph
    scopes: tuple[int, ...]
    from_literals: frozenset[int]
    manual: tuple[Collective, ...]
    assignment: Assignment
    mesh: LogicalMesh
    topology: Topology
    donated: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    forced: frozenset[int] = frozenset()
    memory_bytes: int | None = None
    force: Force | None = None
    _known: dict[tuple[str, int], tuple[Alternative, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _batches: dict[Fraction, tuple[Graph, float] | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of_value(self, value: int) -> tuple[Alternative, ...]:
        """Returns the best other shardings of a value, each group the fastest first.

        Other numbers of slices come first; alternatives that do not fit come last.
        """
        key = ("value", value)
        if key not in self._known:
            options: list[_Option] = [({value: sharding}, None) for sharding in self._around.options(value)]
            self._known[key] = tuple(self._priced(value, None, options))
        return self._known[key]

    def of_op(self, op: int) -> tuple[Alternative, ...]:
        """Returns the best other ways to split an op, in the order of `of_value`."""
        key = ("op", op)
        if key not in self._known:
            results = self.graph.ops[op].results
            self._known[key] = tuple(self._priced(results[0], op, list(self._ways(op)))) if results else ()
        return self._known[key]

    def fits(self, alternative: Alternative) -> bool:
        """Returns whether the alternative keeps to the budget; over a plan that does not, it needs no more memory than the plan."""
        limit = self.memory_bytes
        return limit is None or alternative.bill.safe_bytes <= max(limit, self._bill.safe_bytes)

    def flips(self, alternative: Alternative) -> tuple[Flip, ...]:
        """Lists the changes that would make the alternative the better choice; none if it already is.

        For one that is as fast, only budgets and batches are tried: links would tell the two apart by rounding.
        """
        if alternative.delta_s < 0 and self.fits(alternative):
            return ()
        if alternative.delta_s <= 0 and not self.fits(alternative):
            return (Flip("memory_bytes", False, float(alternative.bill.safe_bytes), self.memory_bytes, alternative.delta_s),)
        links = self._bandwidth_flips(alternative) if alternative.delta_s > 0 else ()
        return (*self._memory_flips(alternative), *links, *self._batch_flips(alternative))

    @cached_property
    def _around(self) -> Neighbourhood:
        space = Space(self.graph, self.mesh, self.topology, self.from_literals)
        return Neighbourhood(space, self.assignment, self.pinned, self.forced)

    @cached_property
    def _bill(self) -> Bill:
        return self._price(self.assignment)

    def _price(self, assignment: Assignment, graph: Graph | None = None) -> Bill:
        graph = graph or self.graph
        return price(Step(graph, self.scopes, self.from_literals, self.donated), assignment, self.mesh, self.topology, written=self.manual)

    def _priced(self, value: int, op: int | None, options: list[_Option]) -> list[Alternative]:
        """Ranks the options by the prices of the ops around, then prices the whole step for the best few."""
        own = self.assignment.values[value] if op is None else self.assignment.ops[op].axes

        def counts(option: _Option) -> tuple[int, ...]:
            return slices(option[0][value] if option[1] is None else option[1], self.mesh)

        ranked = sorted(options, key=lambda option: self._around.move(option[0], polish=False)[0])
        quick = varied(ranked, counts, slices(own, self.mesh))[:MAX_POLISHED]
        polished = sorted([(*self._around.move(wanted), (wanted, axes)) for wanted, axes in quick], key=lambda row: row[0])
        found: dict[tuple[TensorSharding, FactorAxes | None], Alternative] = {}
        for _, changes, option in varied(polished, lambda row: counts(row[2]), slices(own, self.mesh)):
            if sum(map(self.fits, found.values())) >= MAX_PRICED or len(found) >= 2 * MAX_PRICED:
                break
            row = self._forced(value, op, option, changes)
            found.setdefault((row.sharding, row.axes), row)
        return sorted(found.values(), key=lambda row: self._rank(row, own))

    def _rank(self, row: Alternative, own: FactorAxes) -> tuple[bool, bool, float, int, TensorSharding]:
        same = slices(row.sharding if row.axes is None else row.axes, self.mesh) == slices(own, self.mesh)
        return (not self.fits(row), same and row.delta_s >= 0, row.delta_s, row.delta_bytes, row.sharding)

    def _forced(self, value: int, op: int | None, option: _Option, changes: Changes) -> Alternative:
        """Returns the alternative of one option.

        Its op has exactly the axes of the option, unless the search `force` chose others.
        """
        wanted, axes = option
        if self.force is not None:
            assignment = self.force({} if op is not None else wanted, {op: axes} if op is not None and axes is not None else {})
        else:
            assignment = self._around.assignment_with(changes)
            if op is not None and axes is not None:
                assignment = _with_axes(assignment, op, axes)
        return self._alternative(value, None if op is None else assignment.ops[op].axes, assignment)

    def _alternative(self, value: int, axes: FactorAxes | None, assignment: Assignment) -> Alternative:
        bill = self._price(assignment)
        pairs = zip(self.assignment.values, assignment.values, strict=True)
        slots = {slot for slot, (old, new) in zip(self._around.space.slot_of, pairs, strict=True) if old != new}
        moved = len(slots - {self._around.space.slot_of[value]})
        delta_s = rounded_s(bill.total_s - self._bill.total_s, self._bill.total_s)
        return Alternative(assignment.values[value], axes, delta_s, bill.memory_bytes - self._bill.memory_bytes, moved, assignment, bill)

    def _ways(self, op: int) -> Iterator[_Option]:
        """Yields options that move an axis of an op to another factor, leave it out, or add a free one, with the shardings that follow."""
        known = self.graph.ops[op]
        own = self.assignment.ops[op].axes
        for axes in dict.fromkeys(_moved_axes(own, known.rule.splittable, [name for name, size in self.mesh.axes if size > 1])):
            axes = legal(known.rule, axes, self.mesh)
            if axes == own or any(size % self.mesh.num_slices(names) for size, names in zip(known.rule.sizes, axes, strict=True)):
                continue
            wanted = {}
            sides = zip((*known.operands, *known.results), (*known.rule.operands, *known.rule.results), strict=True)
            for value, dims in sides:
                if value != LITERAL and value not in self.pinned and value not in self.from_literals:
                    sharding = project(dims, axes)
                    if divides(self.graph.values[value].shape, sharding, self.mesh):
                        wanted[value] = sharding
            yield wanted, axes

    def _memory_flips(self, alternative: Alternative) -> Iterator[Flip]:
        if alternative.delta_bytes < 0:
            yield Flip("memory_bytes", True, float(self._bill.safe_bytes), self.memory_bytes, alternative.delta_s)

    def _bandwidth_flips(self, alternative: Alternative) -> Iterator[Flip]:
        """Yields the bandwidths at which links make up for the difference; compute stays as it is."""
        mine, its = self._bill, alternative.bill
        rows = _difference(its, mine)
        compute_s = its.compute_s - mine.compute_s

        def later_s(row: _TimedCollective, machine: Topology) -> float:
            prices = [collective_price(row.kind, row.axes, self.mesh, one) for one in (self.topology, machine)]
            return row.time_s + row.payload_bytes * (prices[1].s_per_byte - prices[0].s_per_byte)

        def delta_s(scale: float) -> float:
            machine = replace(
                self.topology,
                link_bytes_per_s=self.topology.link_bytes_per_s * scale,
                network_bytes_per_s=self.topology.network_bytes_per_s * scale,
            )
            return compute_s + sum(count * (1 - row.share) * later_s(row, machine) for row, count in rows)

        for scales in (BANDWIDTH_SCALES[6::-1], BANDWIDTH_SCALES[6:]):
            flipped = next((scale for scale in scales[1:] if delta_s(scale) < 0), None)
            if flipped is not None:
                near = flipped * 2 if flipped < 1 else flipped / 2
                scale = _bisected(delta_s, near, flipped)
                now = self.topology.link_bytes_per_s
                yield Flip("link_bytes_per_s", scale < 1, now * scale, now, 0.0)

    def _batch_flips(self, alternative: Alternative) -> Iterator[Flip]:
        """Yields the nearest batch tried at which the alternative wins, above and below.

        No batch is looked for if the alternative does not win at the farthest one.
        """
        size = batch_size(self.graph)
        for below in (False, True):
            scales = [1 / scale if below else scale for scale in BATCH_SCALES] if size else []
            while scales and self._scaled(scales[-1]) is None:
                scales.pop()
            deltas = ((scale, self._delta_at(scale, alternative)) for scale in scales)
            if scales and self._delta_at(scales[-1], alternative) < 0:
                scale, delta_s = next(row for row in deltas if row[1] < 0)
                yield Flip("batch", below, float(size * scale), size, delta_s)

    def _delta_at(self, scale: Fraction, alternative: Alternative) -> float:
        """Returns the alternative's extra cost over the plan with another batch; 0 if there is no such batch."""
        scaled = self._scaled(scale)
        return 0.0 if scaled is None else rounded_s(self._price(alternative.assignment, scaled[0]).total_s - scaled[1], scaled[1])

    def _scaled(self, scale: Fraction) -> tuple[Graph, float] | None:
        """Returns the step with another batch, and the plan's cost there; None if the batch does not divide."""
        if scale not in self._batches:
            graph = with_batch(self.graph, scale)
            self._batches[scale] = None if graph is None else (graph, self._price(self.assignment, graph).total_s)
        return self._batches[scale]


def rounded_s(delta_s: float, total_s: float) -> float:
    """Returns a difference of step times; 0 if it is only rounding."""
    return 0.0 if abs(delta_s) < max(ROUNDING_S, 1e-6 * total_s) else delta_s


def slices(axes: FactorAxes, mesh: LogicalMesh) -> tuple[int, ...]:
    """Returns the number of slices of each dimension (or factor), whatever the axes are called."""
    return tuple(map(mesh.num_slices, axes))


def varied(rows: Iterable[_T], counts: Callable[[_T], tuple[int, ...]], own: tuple[int, ...]) -> list[_T]:
    """Reorders the rows: the first of each other split, then those that only permute the axes of an earlier one or of `own`."""
    seen = {own}
    others: list[_T] = []
    same: list[_T] = []
    for row in rows:
        (same if counts(row) in seen else others).append(row)
        seen.add(counts(row))
    return others + same


def _moved_axes(own: FactorAxes, splittable: Collection[bool], names: Iterable[str]) -> Iterator[FactorAxes]:
    """Yields every way to put one axis elsewhere: on another factor, on none, or on one if it was on none."""
    for name in names:
        without = tuple(tuple(axis for axis in axes if axis != name) for axes in own)
        yield without
        for factor, free in enumerate(splittable):
            if free:
                yield tuple((*axes, name) if index == factor else axes for index, axes in enumerate(without))


def _with_axes(assignment: Assignment, op: int, axes: FactorAxes) -> Assignment:
    return replace(assignment, ops=(*assignment.ops[:op], OpSharding(axes), *assignment.ops[op + 1 :]))


def _difference(its: Bill, mine: Bill) -> list[tuple[_TimedCollective, int]]:
    """Returns the executions per row that only one bill has, negative for those of `mine`."""
    counts: Counter[_TimedCollective] = Counter()
    for bill, sign in ((its, 1), (mine, -1)):
        for row, share in zip(bill.collectives, bill.shares, strict=True):
            counts[_TimedCollective(row.kind, row.axes, row.payload_bytes, row.time_s, share)] += sign * row.repeats
    return [(key, count) for key, count in counts.items() if count]


def _bisected(delta_s: Callable[[float], float], near: float, far: float) -> float:
    """Returns the scale between `near`, where the plan wins, and `far`, where the alternative does, at which both are even."""
    for _ in range(BISECTIONS):
        middle = math.sqrt(near * far)
        near, far = (middle, far) if delta_s(middle) >= 0 else (near, middle)
    return math.sqrt(near * far)

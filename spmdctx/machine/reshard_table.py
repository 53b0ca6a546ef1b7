"""Finds the cheapest chains of reshards for all pairs of shardings of a shape at once, and their seconds.

A state is a sharding. Steps out of it, with `b` the bytes of one device's block and `n` the devices of the step's group:

    slice               append an unused axis to a dimension, minor-most     moves nothing
    all_to_all          minor-most axes of one dimension become another's        b (n - 1) / n
    collective_permute  other axes or another order, the same slices per dimension   b
    all_gather          drop minor-most axes of one dimension                b (n - 1)

The chain from one state to another moves the fewest bytes. Every collective counts half a device's final share on top of its
bytes, so that none is done for little. Floyd and Warshall's recurrence over the domain finds the chains of all pairs; for a few
hundred shardings it takes a few hundred NumPy operations. The seconds of a chain are a line over the bytes of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.ir.domain import AxisCodes, Domain, axis_codes, domain
from spmdctx.ir.mesh import AnySizes, LogicalMesh
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.collectives import LinearPrice, collective_price
from spmdctx.machine.topology import Topology

_SLICE_PRICE = 1e-6
"""The price of a slice in units of the whole tensor: of two chains that move the same bytes, the one with fewer slices wins."""

_STEP_PRICE = 0.51
"""The price of a collective on top of its bytes, in blocks of a tensor split over all devices; uneven, so that nothing ties."""


class Hop(NamedTuple):
    """One step out of a sharding: its kind, the axes of its group, and the number of the sharding after it."""

    kind: str
    axes: AxisNames
    after: int


class Paths(NamedTuple):
    """All cheapest chains of a domain: `following[i, j]` is the first sharding after i on the way to j."""

    following: IntArray
    hops: dict[tuple[int, int], Hop]


class ReshardTable(NamedTuple):
    """The seconds from sharding i to sharding j of a tensor of b bytes: `fixed_s[i, j] + s_per_byte[i, j] * b`."""

    fixed_s: FloatArray
    s_per_byte: FloatArray


def chain(known: Domain, source: int, target: int, all_to_all: bool = True) -> Iterator[Hop]:
    """Yields the steps from one sharding of a domain to another; without `all_to_all`, none of that kind."""
    paths = _paths(known.rows.tobytes(), len(known.shape), known.codes.mesh, all_to_all)
    while source != target:
        hop = paths.hops[source, int(paths.following[source, target])]
        yield hop
        source = hop.after


def reshard_table(known: Domain, topology: Topology) -> ReshardTable:
    """Returns the table of a domain; shapes that divide alike share one."""
    if not known.shape:
        return ReshardTable(np.zeros((1, 1)), np.zeros((1, 1)))
    if isinstance(known.codes.mesh, AnySizes):
        return _least_of(known, [domain(part, known.shape) for part in known.codes.mesh.parts], topology)
    return _table(known.rows.tobytes(), len(known.shape), known.codes.mesh, topology)


def _least_of(known: Domain, parts: Sequence[Domain], topology: Topology) -> ReshardTable:
    """Returns for each pair the least of its lines on meshes of several sizes; pairs that no mesh has cost the most of all."""
    tables = [reshard_table(part, topology) for part in parts]
    found = []
    for lines in zip(*tables, strict=True):
        least = np.full((len(known), len(known)), np.inf)
        for part, own in zip(parts, lines, strict=True):
            numbers = known.numbers(part.rows)
            places = np.ix_(numbers, numbers)
            least[places] = np.minimum(least[places], own)
        found.append(np.where(np.isinf(least), max(float(own.max()) for own in lines), least))
    return ReshardTable(*found)


@lru_cache(maxsize=1024)
def _paths(rows: bytes, num_dims: int, mesh: LogicalMesh, all_to_all: bool) -> Paths:
    """Finds the cheapest chains of all pairs from single steps."""
    codes = axis_codes(mesh)
    states = np.frombuffer(rows, dtype=np.int64).reshape(-1, num_dims)
    count = len(states)
    price = np.full((count, count), np.inf)
    np.fill_diagonal(price, 0.0)
    hops: dict[tuple[int, int], Hop] = {}
    step_price = _STEP_PRICE / mesh.num_devices
    prices: dict[tuple[int, int], float] = {}
    for number, hop, moved in _single_steps(states, codes):
        if hop.kind == "all_to_all" and not all_to_all:
            continue
        own = moved + (_SLICE_PRICE if hop.kind == "slice" else step_price)
        pair = number, hop.after
        if own < prices.get(pair, math.inf) - 1e-12:
            prices[pair] = own
            hops[pair] = hop
    for pair, own in prices.items():
        price[pair] = own
    names = [codes.names(bits) for bits in range(int(codes.bits.max(initial=0)) + 1)]
    numbers, others, moved_bits = _permutes(states, codes)
    own_s = 1 / np.prod(codes.slices[states], axis=1)[numbers] + step_price
    cheaper = np.flatnonzero(own_s < price[numbers, others] - 1e-12)
    price[numbers[cheaper], others[cheaper]] = own_s[cheaper]
    for number, other, bits in zip(numbers[cheaper].tolist(), others[cheaper].tolist(), moved_bits[cheaper].tolist(), strict=True):
        hops[number, other] = Hop("collective_permute", names[bits], other)
    following = np.broadcast_to(np.arange(count), (count, count)).copy()
    most, through, better = price - 1e-12, np.empty_like(price), np.empty(price.shape, dtype=bool)
    for middle in range(count):
        np.add(price[:, middle, None], price[None, middle, :], out=through)
        np.less(through, most, out=better)
        # Few are better: their places are handled one by one.
        places = np.flatnonzero(better)
        if len(places):
            lower = through.take(places)
            price.put(places, lower)
            most.put(places, lower - 1e-12)
            following.put(places, following[:, middle].take(places // count))
    return Paths(following, hops)


@lru_cache(maxsize=1024)
def _table(rows: bytes, num_dims: int, mesh: LogicalMesh, topology: Topology) -> ReshardTable:
    """Adds up the seconds along all chains at once, one step of each chain after the other."""
    paths = _paths(rows, num_dims, mesh, topology.preferences.allows_all_to_all)
    codes = axis_codes(mesh)
    states = np.frombuffer(rows, dtype=np.int64).reshape(-1, num_dims)
    slices = np.prod(codes.slices[states], axis=1)
    count = len(states)
    fixed, slope = np.zeros((count, count)), np.zeros((count, count))
    lines: dict[tuple[str, AxisNames], LinearPrice] = {}
    payloads = (1 / slices).tolist()
    for (number, other), (kind, axes, _) in paths.hops.items():
        if kind != "slice":
            line = lines.get((kind, axes))
            if line is None:
                line = lines[kind, axes] = collective_price(kind, axes, mesh, topology)
            fixed[number, other] = line.fixed_s
            slope[number, other] = line.s_per_byte * payloads[other if kind == "all_gather" else number]
    first_fixed, first_slope = fixed.ravel(), slope.ravel()
    all_fixed, all_slope = np.zeros(count * count), np.zeros(count * count)
    pairs = np.flatnonzero(~np.eye(count, dtype=bool))
    place, target = np.divmod(pairs, count)
    while len(pairs):
        after = paths.following.take(place * count + target)
        step = place * count + after
        all_fixed[pairs] += first_fixed.take(step)
        all_slope[pairs] += first_slope.take(step)
        moving = np.flatnonzero(after != target)
        pairs, place, target = pairs[moving], after[moving], target[moving]
    return ReshardTable(all_fixed.reshape(count, count), all_slope.reshape(count, count))


def _single_steps(states: IntArray, codes: AxisCodes) -> Iterator[tuple[int, Hop, float]]:
    """Yields every step out of every state but permutes, with the bytes that it moves in units of the whole tensor."""
    slices = np.prod(codes.slices[states], axis=1).tolist()
    places = {tuple(row): number for number, row in enumerate(states.tolist())}
    known = _known_steps(codes.mesh)
    for row, number in places.items():
        steps = known.get(row)
        if steps is None:
            steps = known[row] = [(kind, axes, after, _moved(kind, axes, codes.mesh)) for kind, axes, after in _steps(row, codes)]
        for kind, axes, after, moved in steps:
            other = places.get(after)
            if other is not None:
                yield number, Hop(kind, axes, other), moved / slices[number]


def _permutes(states: IntArray, codes: AxisCodes) -> tuple[IntArray, IntArray, IntArray]:
    """Returns every pair of states that a collective_permute joins, and the axes along which it moves blocks, as bits."""
    cuts = codes.slices[states]
    alike = np.ones((len(states), len(states)), dtype=bool)
    for own in cuts.T:
        alike &= own[:, None] == own
    np.fill_diagonal(alike, False)
    numbers, others = np.nonzero(alike)
    return numbers, others, np.bitwise_or.reduce(codes.moved[states[numbers], states[others]], axis=1)


@lru_cache(maxsize=64)
def _known_steps(mesh: LogicalMesh) -> dict[tuple[int, ...], list[tuple[str, AxisNames, tuple[int, ...], float]]]:
    """Returns the cache of a mesh: the steps out of each row that was asked for, each with the blocks that it moves."""
    return {}


def _moved(kind: str, axes: AxisNames, mesh: LogicalMesh) -> float:
    """Returns the number of blocks that one device moves."""
    group = mesh.num_slices(axes)
    return {"slice": 0.0, "all_gather": group - 1.0, "all_to_all": (group - 1) / group}[kind]


def _steps(row: tuple[int, ...], codes: AxisCodes) -> Iterator[tuple[str, AxisNames, tuple[int, ...]]]:
    """Yields the slices, all_gathers and all_to_alls out of one sharding: kind, axes, and the row after."""
    held = [codes.axes[code] for code in row]
    used = {name for own in held for name in own}
    free = [own for own in codes.units if own[0] not in used]
    for dim, own in enumerate(held):
        for added in free:
            yield from _put(row, codes, "slice", added, {dim: own + added})
        for start in range(len(own)):
            kept, leaving = own[:start], own[start:]
            yield from _put(row, codes, "all_gather", leaving, {dim: kept})
            for other, theirs in enumerate(held):
                if other != dim:
                    yield from _put(row, codes, "all_to_all", leaving, {dim: kept, other: theirs + leaving})


def _put(
    row: tuple[int, ...], codes: AxisCodes, kind: str, axes: AxisNames, changed: dict[int, AxisNames]
) -> Iterator[tuple[str, AxisNames, tuple[int, ...]]]:
    after = list(row)
    for dim, own in changed.items():
        code = codes.of.get(own)
        if code is None:
            return
        after[dim] = code
    yield kind, axes, tuple(after)

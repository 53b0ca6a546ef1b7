"""Says why a line of equations is cut where it is: what each chunk takes, what crosses, and what another place would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


class OtherPlace(NamedTuple):
    """Another place for one cut, all others as they are.

    Attributes:
        is_later: whether it is behind the chosen place.
        source: the source line behind which it would be.
        seconds: of the chunk that grows.
        longest_s: of the largest chunk of all.
        crossing_bytes: of one micro-batch.
        between_s: the seconds of the equations that would change sides.
    """

    is_later: bool
    source: str
    seconds: float
    longest_s: float
    crossing_bytes: float
    between_s: float


class CutReason(NamedTuple):
    """Why one cut is where it is.

    Attributes:
        before: the source line of the last equation before it.
        after: that of the first one behind it.
        crossing_bytes: what crosses in each direction, of one micro-batch.
        limit_s: how large the largest chunk may be, if fewer bytes cross then.
        others: the next place earlier and the next one later that no more bytes cross, or else the fewest.
    """

    before: str
    after: str
    crossing_bytes: float
    limit_s: float
    others: tuple[OtherPlace, ...]


class ChunkReason(NamedTuple):
    """What a chunk holds.

    Attributes:
        sources: the source lines of its equations, in their order.
        leaves: the paths of the parameters that it reads.
        seconds: of both passes of one micro-batch, estimated on one device.
    """

    sources: tuple[str, ...]
    leaves: tuple[str, ...]
    seconds: float


class CutLine(NamedTuple):
    """A line of equations with its cuts.

    Attributes:
        seconds: of each equation, both passes.
        crossing: for each equation but the last, the bytes that cross a cut behind it.
        places: the numbers of the last equations before the cuts.
        limit_s: how large the largest chunk may be.
        source_of: gives the source line of an equation by its number.
    """

    seconds: Sequence[float]
    crossing: Sequence[float]
    places: Sequence[int]
    limit_s: float
    source_of: Callable[[int], str]

    def chunk_reasons(self, leaves: Sequence[tuple[str, ...]]) -> tuple[ChunkReason, ...]:
        """Returns what each chunk holds; `leaves` are the parameters of each."""
        bounds = (0, *(place + 1 for place in self.places), len(self.seconds))
        return tuple(
            ChunkReason(tuple(dict.fromkeys(map(self.source_of, range(first, last)))), own, sum(self.seconds[first:last]))
            for (first, last), own in zip(pairwise(bounds), leaves, strict=True)
        )

    def cut_reasons(self) -> tuple[CutReason, ...]:
        """Returns why each cut is where it is."""
        ends = [0.0]
        for own in self.seconds:
            ends.append(ends[-1] + own)
        bounds = (0, *(place + 1 for place in self.places), len(self.seconds))
        sizes = [ends[last] - ends[first] for first, last in pairwise(bounds)]
        found = []
        for number, place in enumerate(self.places):
            rest = max((size for index, size in enumerate(sizes) if index not in (number, number + 1)), default=0.0)
            around = _Around(ends, self.crossing, (bounds[number], place, bounds[number + 2]), rest)
            tried = (around.nearest(is_later=False), around.nearest(is_later=True))
            others = tuple(around.other(one, self.source_of) for one in tried if one >= 0)
            found.append(CutReason(self.source_of(place), self.source_of(place + 1), self.crossing[place], self.limit_s, others))
        return tuple(found)


class _Around(NamedTuple):
    """The line around one cut: the seconds before each equation, the bytes, the cut between the bounds of its chunks, the longest other."""

    ends: Sequence[float]
    crossing: Sequence[float]
    bounds: tuple[int, int, int]
    rest: float

    def nearest(self, *, is_later: bool) -> int:
        """Returns the nearest place on one side that no more bytes cross, or the one of the fewest bytes; -1 if there is none."""
        first, place, last = self.bounds
        # Equations that take no time move nothing.
        tried = range(place + 1, last - 1) if is_later else range(place - 1, first - 1, -1)
        moved = [other for other in tried if self.ends[other + 1] != self.ends[place + 1]]
        best = next((other for other in moved if self.crossing[other] <= self.crossing[place]), None)
        return best if best is not None else min(moved, key=lambda other: self.crossing[other], default=-1)

    def other(self, place: int, source_of: Callable[[int], str]) -> OtherPlace:
        """Returns what the cut would be at another place."""
        first, chosen, last = self.bounds
        sizes = (self.ends[place + 1] - self.ends[first], self.ends[last] - self.ends[place + 1])
        grown = sizes[0] if place > chosen else sizes[1]
        between = abs(self.ends[place + 1] - self.ends[chosen + 1])
        return OtherPlace(place > chosen, source_of(place), grown, max(*sizes, self.rest), self.crossing[place], between)

"""Chooses where to cut a line of equations: the largest chunk as small as can be, then the fewest bytes across the cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MOST_PLACES = 800
"""Longer lines are cut only where the fewest bytes cross in each of so many parts of equal cost."""

SLACK = 1.05
"""How much larger than necessary the largest chunk may be if fewer bytes cross."""

BALANCED = 1.04
"""Fewer bytes are no reason to make the largest chunk larger than so many times the mean, if it need not be."""

_EVEN = 1.002
"""How much larger than necessary the largest chunk of even cuts may be."""

_Floats = npt.NDArray[np.float64]


class Range(NamedTuple):
    """The places at which one cut may lie: the numbers of the last equation before it, both ends included."""

    first: int
    last: int


class Cuts(NamedTuple):
    """A line cut into chunks.

    Attributes:
        places: the numbers of the last equations before the cuts.
        largest: the cost of the largest chunk.
        crossing: the bytes that cross all cuts.
        limit: what the largest chunk might cost if fewer bytes crossed then.
    """

    places: tuple[int, ...]
    largest: float
    crossing: float
    limit: float = math.inf


def choose_cuts(
    costs: Sequence[float], crossing: Sequence[float], num_chunks: int, ranges: Sequence[Range] | None = None, slack: float = SLACK
) -> Cuts | None:
    """Cuts a line of equations into chunks.

    The seconds that a move takes are no part of the first goal: otherwise a small model would lie in one chunk whole.

    Args:
        costs: of each equation.
        crossing: for each equation but the last, the bytes that cross a cut behind it.
        num_chunks: how many; each has an equation at least.
        ranges: where each cut may lie; anywhere if None.
        slack: how much larger than necessary the largest chunk may be.

    Returns:
        The cuts, or None if the ranges allow none.
    """
    count = len(costs)
    if num_chunks > count:
        return None
    ranges = _anywhere(count, num_chunks) if ranges is None else ranges
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    bytes_behind = np.asarray(crossing, np.float64)
    places = _places(ends, bytes_behind, ranges)
    line = _Line(ends, bytes_behind, places, ranges)
    least = line.solve(None)
    if least is None:
        return None
    limit = limit_of(least.largest, ends[-1] / num_chunks, slack)
    found = line.solve(limit)
    assert found is not None, "the cuts of the least largest chunk are within the limit"
    return found._replace(limit=limit)


def _anywhere(count: int, num_chunks: int) -> Sequence[Range]:
    return [Range(0, count - 2)] * (num_chunks - 1)


def even_cuts(
    costs: Sequence[float], crossing: Sequence[float], num_chunks: int, ranges: Sequence[Range] | None = None, largest: float = math.inf
) -> list[tuple[int, ...]]:
    """Returns the cuts with the least largest chunk, for several limits on the bytes that cross any one cut.

    Limits are powers of 2, so that few cuts stand for all of the ways in which bytes can be paid for evenness.

    Args:
        costs: of each equation.
        crossing: for each equation but the last, the bytes that cross a cut behind it.
        num_chunks: how many; each has an equation at least.
        ranges: where each cut may lie; anywhere if None.
        largest: what the largest chunk may cost; without it, a small model whose moves are dear would lie in one chunk.
    """
    ranges = _anywhere(len(costs), num_chunks) if ranges is None else ranges
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    bytes_behind = np.asarray(crossing, np.float64)
    levels = np.exp2(np.ceil(np.log2(np.maximum(bytes_behind, 1.0))))
    found: dict[tuple[int, ...], None] = {}
    for level in np.unique(levels):
        allowed = np.flatnonzero(levels <= level)
        line = _Line(ends, bytes_behind, allowed[_thinned(ends[allowed + 1], bytes_behind[allowed])], ranges)
        least = line.solve(None)
        if least is not None and least.largest <= largest:
            cuts = line.solve(least.largest * _EVEN)
            assert cuts is not None, "the cuts of the least largest chunk are within the limit"
            found[cuts.places] = None
    return list(found)


def limit_of(least: float, mean: float, slack: float = SLACK) -> float:
    """Returns how large the largest chunk may be, if it is `least` where it is as small as can be."""
    return max(least, min(least * slack, BALANCED * mean)) if least <= BALANCED * mean else least * slack


def _places(ends: _Floats, crossing: _Floats, ranges: Sequence[Range]) -> npt.NDArray[np.int64]:
    """Returns the places that are tried: all of a short line, else the best one of each part."""
    chosen = _thinned(ends[1:-1], crossing)
    if len(chosen) == len(crossing):
        return chosen
    # A narrow range may hold none of them.
    own = [one.first + int(np.argmin(crossing[one.first : one.last + 1])) for one in ranges if one.first <= one.last]
    return np.unique(np.concatenate([chosen, np.array(own, np.int64)]))


def _thinned(ends: _Floats, crossing: _Floats) -> npt.NDArray[np.int64]:
    """Returns which of some places are tried, by number: in each of many parts of equal cost the one that the fewest bytes cross."""
    places = np.arange(len(crossing))
    if len(places) <= _MOST_PLACES:
        return places
    parts = np.minimum((ends / max(ends[-1], 1e-300) * _MOST_PLACES).astype(np.int64), _MOST_PLACES - 1)
    order = np.lexsort((places, crossing, parts))
    return np.sort(order[np.concatenate([[True], np.diff(parts[order]) > 0])])


class _Line:
    """Dynamic programming over the places: after each, how many chunks came before it."""

    def __init__(self, ends: _Floats, crossing: _Floats, places: npt.NDArray[np.int64], ranges: Sequence[Range]) -> None:
        self._places, self._ranges, self._crossing = places, ranges, crossing
        # The cost before each place, with the line's beginning first and its end last.
        self._before = np.concatenate([[0.0], ends[places + 1], [ends[-1]]])
        self._total = max(ends[-1], 1e-300)

    def solve(self, limit: float | None) -> Cuts | None:
        """Returns the cuts with the least largest chunk, or, within a limit, those that the fewest bytes cross."""
        size = len(self._before)
        best = np.full(size, np.inf)
        best[0] = 0.0
        ways: list[npt.NDArray[np.int64]] = []
        for number in range(len(self._ranges) + 1):
            best, way = self._one_more(best, self._allowed(number, size), limit)
            ways.append(way)
        if not np.isfinite(best[-1]):
            return None
        bounds = [size - 1]
        for way in reversed(ways):
            bounds.append(int(way[bounds[-1]]))
        bounds.reverse()
        cuts = [int(self._places[bound - 1]) for bound in bounds[1:-1]]
        largest = max(self._before[last] - self._before[first] for first, last in pairwise(bounds))
        return Cuts(tuple(cuts), float(largest), float(self._crossing[cuts].sum()))

    def _allowed(self, number: int, size: int) -> npt.NDArray[np.int64]:
        """Returns the positions at which chunk `number` may end."""
        if number == len(self._ranges):
            return np.array([size - 1])
        own = self._ranges[number]
        return 1 + np.flatnonzero((self._places >= own.first) & (self._places <= own.last))

    def _one_more(self, best: _Floats, allowed: npt.NDArray[np.int64], limit: float | None) -> tuple[_Floats, npt.NDArray[np.int64]]:
        """Returns the best costs with one chunk more, and where it begins."""
        found, way = np.full(len(best), np.inf), np.zeros(len(best), np.int64)
        sizes = self._before[allowed, None] - self._before
        if limit is None:
            costs = np.maximum(best, sizes)
        else:
            # Among cuts that as many whole bytes cross, the chunks are to be alike.
            behind = np.append(self._crossing[self._places], 0.0)[allowed - 1]
            costs = np.where(sizes <= limit, best + (behind[:, None] + 0.5 * (sizes / self._total) ** 2), np.inf)
        costs[np.arange(len(best)) >= allowed[:, None]] = np.inf
        way[allowed] = np.argmin(costs, axis=1)
        found[allowed] = costs[np.arange(len(allowed)), way[allowed]]
        return found, way

"""Cuts against exhaustive enumeration, ranges that marks leave, and long lines."""

import itertools
import random

import pytest

from spmdctx.pipeline.cut.choose import BALANCED, SLACK, Range, choose_cuts, even_cuts
from tests.pace import paced


def sizes(costs, places):
    bounds = [0, *(place + 1 for place in places), len(costs)]
    return [sum(costs[first:last]) for first, last in itertools.pairwise(bounds)]


def exhaustive(costs, crossing, num_chunks, ranges, slack):
    every = [
        places
        for places in itertools.combinations(range(len(costs) - 1), num_chunks - 1)
        if all(own.first <= place <= own.last for own, place in zip(ranges, places, strict=True))
    ]
    if not every:
        return None
    least = min(max(sizes(costs, places)) for places in every)
    mean = sum(costs) / num_chunks
    limit = max(least, min(least * slack, BALANCED * mean)) if least <= BALANCED * mean else least * slack
    near = [places for places in every if max(sizes(costs, places)) <= limit]
    return least, min(sum(crossing[place] for place in places) for places in near)


@pytest.mark.parametrize("seed", range(250))
def test_cuts_are_those_of_exhaustive_enumeration(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    num_chunks = draw.randint(1, min(count, 5))
    costs = [draw.choice([0.0, 1.0, draw.uniform(0, 10)]) for _ in range(count)]
    crossing = [float(draw.randint(1, 9)) for _ in range(count - 1)]
    ranges = [Range(0, count - 2)] * (num_chunks - 1)
    if draw.random() < 0.4:
        ranges = [Range(first := draw.randint(0, count - 2), draw.randint(first, count - 2)) for _ in ranges]
    want, found = exhaustive(costs, crossing, num_chunks, ranges, SLACK), choose_cuts(costs, crossing, num_chunks, ranges)
    assert (found is None) == (want is None)
    if found is not None:
        assert max(sizes(costs, found.places)) == pytest.approx(found.largest)
        assert found.largest <= want[0] * SLACK * (1 + 1e-12)
        assert found.crossing == want[1] == sum(crossing[place] for place in found.places)


@pytest.mark.parametrize("seed", range(200))
def test_even_cuts_are_those_of_exhaustive_enumeration_for_each_limit_on_bytes(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 10)
    num_chunks = draw.randint(1, min(count, 5))
    costs = [draw.choice([0.0, 1.0, draw.uniform(0, 10)]) for _ in range(count)]
    crossing = [float(2 ** draw.randint(0, 5)) for _ in range(count - 1)]
    ranges = [Range(0, count - 2)] * (num_chunks - 1)
    if draw.random() < 0.4:
        ranges = [Range(first := draw.randint(0, count - 2), draw.randint(first, count - 2)) for _ in ranges]
    every = [
        places
        for places in itertools.combinations(range(count - 1), num_chunks - 1)
        if all(own.first <= place <= own.last for own, place in zip(ranges, places, strict=True))
    ]
    found = even_cuts(costs, crossing, num_chunks, ranges)
    assert set(found) <= set(every)
    for level in {crossing[place] for place in range(count - 1)}:
        within = [places for places in every if all(crossing[place] <= level for place in places)]
        if within:
            least = min(max(sizes(costs, places)) for places in within)
            ours = [max(sizes(costs, places)) for places in found if all(crossing[place] <= level for place in places)]
            assert min(ours) <= least * 1.0021


def test_even_cuts_are_never_less_even_than_asked():
    crossing = [9.0, 9.0, 9.0, 9.0, 0.0]
    assert set(even_cuts([1.0] * 6, crossing, 2)) == {(2,), (4,)}
    assert even_cuts([1.0] * 6, crossing, 2, largest=4.0) == [(2,)]


def test_there_are_no_more_chunks_than_equations():
    assert choose_cuts([1.0, 2.0], [1.0], 3) is None


def test_a_long_line_is_cut_in_a_moment_where_little_crosses():
    layers, length = 80, 75
    costs = [1.0] * (layers * length)
    crossing = [1.0 if (place + 1) % length == 0 else 3.0 + place % 5 for place in range(len(costs) - 1)]
    found, turns = paced(lambda: choose_cuts(costs, crossing, 8))
    assert turns < 100
    assert found.crossing == 7
    assert found.largest == 10 * length


def test_a_narrow_range_of_a_long_line_is_cut_inside():
    count = 5000
    found = choose_cuts([1.0] * count, [1.0] * (count - 1), 3, [Range(101, 103), Range(4900, 4900)])
    assert 101 <= found.places[0] <= 103
    assert found.places[1] == 4900

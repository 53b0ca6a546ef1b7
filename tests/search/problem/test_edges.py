"""Rows of what is handed over, and their sums."""

import random

import numpy as np
import pytest

from spmdctx.search.problem.edges import EdgeRow, EdgeRows


def table(rows):
    kinds = (np.int64, np.int64, np.int64, np.int64, bool, np.float64, np.float64, np.int64)
    return EdgeRows(*(np.array([row[place] for row in rows], dtype=kind) for place, kind in enumerate(kinds)))


def row(source, target, weight, value, result=0, position=0, narrow=False):
    return EdgeRow(source, result, target, position, narrow, weight, 2 * weight, value)


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_those_of_one_row_after_the_other(seed):
    draw = random.Random(seed)
    rows = [
        EdgeRow(*map(draw.randrange, (4, 2, 4, 3)), draw.random() < 0.3, draw.random(), draw.random(), number)
        for number in range(draw.randrange(1, 200))
    ]
    expected = {}
    for one in rows:
        known = expected.setdefault(one[:5], [0.0, 0.0, one.value])
        known[0] += one.weight
        known[1] += one.times
    # Equal to the last bit, and in the order of the first rows.
    assert list(table(rows).summed()) == [EdgeRow(*way, *rest) for way, rest in expected.items()]


def test_no_rows_have_no_sums():
    assert list(table([]).summed()) == []


def test_rows_are_added_before_those_at_their_places():
    rows = [row(0, 1, 1.0, 10), row(2, 3, 1.0, 11), row(4, 5, 1.0, 12)]
    added = [row(6, 7, 0.5, 20), row(8, 9, 0.5, 21)]
    assert table(rows).before([0, 2], added).values.tolist() == [20, 10, 11, 21, 12]
    assert table(rows).before([], []).values.tolist() == [10, 11, 12]

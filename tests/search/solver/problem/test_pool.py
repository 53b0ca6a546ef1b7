"""Minima of the pool."""

import numpy as np
import pytest

from spmdctx.search.solver.problem import pool as pool_module
from spmdctx.search.solver.problem.pool import Pool


@pytest.mark.parametrize("widths", [(3,), (5, 5), (2, 7), (7, 2), (1, 4)])
def test_small_minima_are_those_of_large_ones_to_the_last_bit(widths, monkeypatch):
    random = np.random.default_rng(sum(widths))
    costs, tables = random.random(6), [np.where(own < 0.2, np.inf, own) for own in (random.random((6, width)) for width in widths)]
    found = []
    for small in (pool_module._SMALL, 0):
        monkeypatch.setattr(pool_module, "_SMALL", small)
        pool = Pool()
        number, lowest = pool.best(pool.intern(costs), tuple(map(pool.intern, tables)))
        found.append((pool.arrays[number].tobytes(), pool.arrays[number].shape, lowest))
    assert found[0] == found[1]


@pytest.mark.parametrize("repeats", [1, 40])
def test_the_worst_of_a_row_beside_another_ignores_what_the_other_forbids(repeats):
    random = np.random.default_rng(repeats)
    table = random.random((5, 4))
    table[random.random(table.shape) < 0.3] = np.inf
    table[:, 0] = random.random(5)
    pool = Pool()
    number = pool.new(np.ascontiguousarray(np.repeat(np.repeat(table, repeats, axis=0), repeats, axis=1)))
    allowed = np.isfinite(table)
    expected = [[max(row[own] - other[own]) for other, own in zip(table, allowed, strict=True)] for row in table]
    small, of = pool.lines(number)
    assert len(small) == 5
    worst = pool.worst_of_lines(number)[np.ix_(of[::repeats], of[::repeats])]
    assert np.array_equal(worst, np.array(expected))

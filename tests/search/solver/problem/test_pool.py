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

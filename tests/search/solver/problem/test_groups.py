import numpy as np
import pytest

from spmdctx.search.solver.problem import groups as groups_module
from spmdctx.search.solver.problem import pool as pool_module
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.groups import content_hash, grouped
from spmdctx.search.solver.problem.pool import Pool
from spmdctx.search.solver.problem.problem import Edge, Problem
from spmdctx.search.solver.solve import solve
from spmdctx.search.solver.unlimited import dual as dual_module
from spmdctx.search.solver.unlimited.dual import Dual


def repeating(seed, height, width, distinct=5):
    """A table of few distinct rows and columns, with forbidden pairs."""
    random = np.random.default_rng(seed)
    small = random.random((distinct, distinct))
    small[random.random(small.shape) < 0.2] = np.inf
    small[:, 0] = small[0] = 1.5
    return small[random.integers(0, distinct, height)][:, random.integers(0, distinct, width)]


def ring(seed, num_nodes=6, num_states=90):
    """A ring with chords, too wide to peel, whose tables repeat rows and columns; two edges share a table."""
    random = np.random.default_rng(seed)
    costs = tuple(random.random(num_states) for _ in range(num_nodes))
    shared = repeating(seed, num_states, num_states)
    pairs = [(node, (node + step) % num_nodes) for step in (1, 2) for node in range(num_nodes)]
    tables = [shared if place in (0, 3) else repeating(100 * seed + place, num_states, num_states) for place in range(len(pairs))]
    return Problem(costs, tuple(Edge(left, right, table) for (left, right), table in zip(pairs, tables, strict=True)))


@pytest.mark.parametrize("seed", range(5))
def test_a_grouped_table_is_the_table(seed):
    table = repeating(seed, 120, 70)
    groups = grouped(table)
    assert groups is not None
    assert groups.small.size <= 25
    np.testing.assert_array_equal(groups.small[groups.rows.of][:, groups.columns.of], table)
    other = groups.transposed()
    np.testing.assert_array_equal(other.small[other.rows.of][:, other.columns.of], table.T)


def test_small_tables_and_tables_of_distinct_lines_are_not_grouped():
    assert grouped(repeating(0, 20, 20)) is None
    assert grouped(np.random.default_rng(0).random((100, 100))) is None


def test_lines_that_only_share_a_hash_are_not_grouped(monkeypatch):
    monkeypatch.setattr(groups_module, "_line_hashes", lambda table: np.zeros(len(table), dtype=np.uint64))
    assert grouped(repeating(0, 120, 70)) is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_colour", [False, True])
def test_messages_and_bounds_are_the_same_to_the_last_bit(seed, by_colour, monkeypatch):
    monkeypatch.setattr(dual_module, "MAX_NUMBERED", 0 if by_colour else 1000)
    problem = ring(seed)

    def run():
        dual = Dual(CostGraph.of(problem.costs, problem.edges, Pool()))
        dual.sweep(3, lambda: False)
        return dual.bound(), dual.decode()

    bound, states = run()
    monkeypatch.setattr(pool_module, "grouped", lambda table: None)
    plain, plain_states = run()
    assert (bound.value, states) == (plain.value, plain_states)
    for node, beliefs in plain.beliefs.items():
        np.testing.assert_array_equal(bound.beliefs[node], beliefs)


@pytest.mark.parametrize("seed", range(3))
def test_solutions_are_the_same(seed, monkeypatch):
    monkeypatch.setattr(pool_module, "_WIDE", 1)
    problem = ring(seed, num_nodes=5)
    found = solve(problem)
    monkeypatch.setattr(pool_module, "grouped", lambda table: None)
    assert solve(problem) == found


def test_arrays_of_one_hash_keep_their_own_numbers(monkeypatch):
    monkeypatch.setattr(pool_module, "content_hash", lambda array: 1)
    pool, arrays = Pool(), [np.full((10, 10), float(value)) for value in range(3)]
    numbers = [pool.intern(array) for array in arrays]
    assert numbers == [0, 1, 2]
    assert [pool.intern(array.copy()) for array in arrays] == numbers


def test_the_hash_tells_arrays_apart_that_differ_in_one_high_bit_or_in_order():
    arrays = [np.zeros((16, 8)) for _ in range(4)]
    arrays[1][3, 2], arrays[2][2, 3], arrays[3][3, 2] = 1.0, 1.0, 2.0
    assert len({content_hash(array) for array in arrays}) == 4

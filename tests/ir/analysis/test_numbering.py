"""Numbers of things that are alike: equal numbers mean equal things, whatever the columns and rows hold."""

import numpy as np
import pytest

from spmdctx.ir.analysis import numbering
from spmdctx.ir.analysis.numbering import Numbering, numbered_rows


def _classes_of(keys):
    numbers = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_alike_only_where_all_is_equal(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    own, lengths = random.integers(0, 3, count), random.integers(0, 4, count)
    items = [random.integers(0, 3, length) for length in lengths]
    for kind in (np.uint8, np.int64):
        found = numbered_rows(own, np.repeat(np.arange(count), lengths), np.concatenate(items).astype(kind))
        assert found.tolist() == _classes_of((head, *row.tolist()) for head, row in zip(own.tolist(), items, strict=True))


def test_rows_whose_items_only_add_up_alike_differ():
    owners = np.array([0, 0, 1, 1, 2])
    assert numbered_rows(np.zeros(4, np.int64), owners, np.array([1, 3, 2, 2, 4])).tolist() == [0, 1, 2, 3]


def test_things_of_one_hash_are_told_apart_by_their_rows(monkeypatch):
    monkeypatch.setattr(numbering, "_hashes", lambda own, *_: np.zeros(len(own), np.uint64))
    owners = np.array([0, 0, 1, 2, 2, 3])
    assert numbered_rows(np.zeros(4, np.int64), owners, np.array([1, 2, 1, 1, 2, 1])).tolist() == [0, 1, 0, 1]


def test_things_without_items_are_told_apart_by_their_own_number():
    nothing = np.array([], dtype=np.int64)
    assert numbered_rows(np.array([5, 5, 0]), nothing, nothing).tolist() == [0, 0, 1]
    assert numbered_rows(nothing, nothing, nothing).tolist() == []


@pytest.mark.parametrize("scale", [1, 1 << 40, 1 << 61])
@pytest.mark.parametrize("seed", range(5))
def test_columns_of_any_numbers_are_told_apart(seed, scale):
    random = np.random.default_rng(seed)
    columns = [random.integers(-2, 3, 80) * scale for _ in range(4)]
    alike = Numbering(np.unique(columns[0], return_inverse=True)[1])
    for column in columns[1:]:
        alike.refine(column)
    firsts, numbers = alike.classes()
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(firsts) == len(set(keys))
    assert all((numbers[a] == numbers[b]) == (keys[a] == keys[b]) for a in range(80) for b in range(80))

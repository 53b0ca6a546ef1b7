"""The acceptance matrix: a pairwise covering array of it; `benchmarks/matrix.py` runs the whole."""

from __future__ import annotations

import pytest

from tests.zoo import CASES
from tests.zoo.matrix import ALL_CELLS, SEARCHES, Cell, covering_cells, run_cell

CELLS = covering_cells()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_step_is_the_same_on_any_devices_in_any_mode(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert outcome.equal, f"{outcome.place} differs by {outcome.difference:.2e}"
    assert outcome.split_share >= cell.min_split_share
    assert outcome.audit.ok, str(outcome.audit)
    if cell.mode not in ("stand_alone", "auto_parallel"):  # a search may use them where nothing is said
        assert "all_to_all" not in {row.kind for row in outcome.audit.rows}, str(outcome.audit)


def test_the_covering_array_shows_every_pair_of_the_matrix() -> None:
    covered = set().union(*(cell.pairs for cell in CELLS))
    assert all(cell.pairs <= covered for cell in ALL_CELLS)
    assert len(CELLS) < len(ALL_CELLS) / 6


def test_the_covering_array_shows_every_model_by_every_search() -> None:
    shown = {(cell.model, cell.search) for cell in CELLS if cell.search}
    assert shown >= {(one.name, search) for one in CASES for search in SEARCHES if one.name != "resnet50"}
    assert "resnet50" in {name for name, _ in shown}

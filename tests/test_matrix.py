"""The acceptance matrix: a pairwise covering array of it; `benchmarks/matrix.py` runs the whole."""

from __future__ import annotations

import pytest

from tests.zoo.matrix import ALL_CELLS, MIN_SPLIT_SHARE, Cell, covering_cells, run_cell

CELLS = covering_cells()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_step_is_the_same_on_any_devices_in_any_mode(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert outcome.equal, f"{outcome.place} differs by {outcome.difference:.2e}"
    assert cell.mode == "stand_alone" or outcome.split_share >= MIN_SPLIT_SHARE
    assert outcome.audit.ok, str(outcome.audit)


def test_the_covering_array_shows_every_pair_of_the_matrix() -> None:
    def pairs(cells: tuple[Cell, ...]) -> set[tuple[object, ...]]:
        rows = [(cell.model, cell.flavor, cell.mode, cell.num_devices) for cell in cells]
        return {(i, row[i], j, row[j]) for row in rows for i in range(4) for j in range(i)}

    assert pairs(CELLS) == pairs(ALL_CELLS)
    assert len(CELLS) < len(ALL_CELLS) / 8

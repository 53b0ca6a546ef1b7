"""The cells around a loss: what they take."""

import pytest

import spmdctx
from spmdctx.errors import ContextError

CELLS = [spmdctx.PipelineCell, spmdctx.MicroBatchInterleaved]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("network", ["loss", None, 3])
def test_a_cell_needs_a_loss_that_can_be_called(cell, network):
    with pytest.raises(ContextError, match=f"{cell.__name__} needs a loss"):
        cell(network, 2)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_a_cell_needs_a_positive_whole_number(cell, count):
    with pytest.raises(ContextError, match="needs a number of"):
        cell(abs, count)


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_called_by_itself_is_its_loss_with_its_name(cell):
    found = cell(abs, 2)
    assert found(-3) == 3
    assert found.__name__ == "abs"

"""Shardings as rows of codes."""

import numpy as np
import pytest

from spmdctx.cost.evaluate import all_shardings
from spmdctx.ir.domain import axis_codes, domain
from spmdctx.ir.mesh import LogicalMesh

SQUARE = LogicalMesh.of((2, 2))
MESHES = (LogicalMesh.of((2,)), LogicalMesh.of((4,)), SQUARE, LogicalMesh.of((2, 3)), LogicalMesh.of((2, 2, 2)))
SHAPES = ((8,), (12, 4), (3, 8), (2, 6, 24), ())


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_domain_holds_every_sharding_that_divides_the_shape_once(mesh, shape):
    found = domain(mesh, shape).shardings
    assert len(set(found)) == len(found)
    assert set(found) == set(all_shardings(shape, mesh))
    assert found[0] == ((),) * len(shape)


def test_numbers_lead_back_to_shardings():
    known = domain(SQUARE, (8, 12))
    assert [known.number(sharding) for sharding in known.shardings] == list(range(len(known)))
    assert known.number((("data", "model"), ("data",))) == -1
    assert domain(SQUARE, (3, 8)).number((("data",), ())) == -1


def test_slices_count_the_blocks_of_a_tensor():
    known = domain(LogicalMesh.of((2, 3)), (6, 6))
    assert known.slices[known.number((("data",), ("model",)))] == 6
    assert known.slices[0] == 1


def test_axes_of_size_one_split_nothing():
    mesh = LogicalMesh.of((1, 4))
    assert len(axis_codes(mesh)) == 2
    assert axis_codes(mesh).code(("data", "model")) == axis_codes(mesh).code(("model",))


def test_codes_are_joined_in_order():
    codes = axis_codes(SQUARE)
    data, model = codes.code(("data",)), codes.code(("model",))
    assert codes.axes[codes.joined[data, model]] == ("data", "model")
    assert codes.axes[codes.joined[model, data]] == ("model", "data")
    assert codes.joined[data, data] == -1
    assert codes.names(int(codes.bits[codes.joined[model, data]])) == ("data", "model")


def test_axes_keep_the_order_of_a_large_mesh():
    codes = axis_codes(LogicalMesh.of((2, 2, 2, 2)))
    assert len(codes) == 16
    assert codes.code(("model", "data")) == -1


def test_rows_leave_out_what_may_not_be_split():
    rows = axis_codes(SQUARE).rows((4, 4), (True, False))
    np.testing.assert_array_equal(rows[:, 1], 0)

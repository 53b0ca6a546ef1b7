"""Where devices sit in a TPU slice."""

import numpy as np
import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.machine.torus import Span, coordinates, scatters_over_slice, slice_sides, spans_of


@pytest.mark.parametrize(
    ("num_devices", "num_dims", "sides"),
    [(1, 2, (1, 1)), (4, 3, (1, 2, 2)), (8, 2, (2, 4)), (8, 3, (2, 2, 2)), (16, 3, (2, 2, 4)), (256, 2, (16, 16)), (6, 2, (1, 6))],
)
def test_slices_are_as_near_to_a_cube_as_can_be(num_devices, num_dims, sides):
    assert slice_sides(num_devices, num_dims) == sides


@pytest.mark.parametrize(
    ("num_devices", "num_dims", "expected"),
    [
        *((4, 2, True), (8, 2, True), (32, 2, True), (128, 2, True), (16, 2, False), (64, 2, False), (256, 2, False)),
        *((4, 3, False), (8, 3, False), (16, 3, False), (32, 3, False), (64, 3, False), (6, 2, True)),
    ],
)
def test_squares_and_boxes_are_not_scattered_over_as_a_whole(num_devices, num_dims, expected):
    assert scatters_over_slice(num_devices, num_dims) == expected


def located(count, sides):
    """The places of the first devices."""
    return list(zip(*(own.tolist() for own in coordinates(np.arange(count), sides)), strict=True))


@pytest.mark.parametrize("sides", [(2, 4), (4, 4), (2, 2, 2), (4, 4, 4), (1, 6)])
def test_every_device_has_a_place_of_its_own(sides):
    count = 1
    for side in sides:
        count *= side
    places = set(located(count, sides))
    assert len(places) == count
    assert all(0 <= place < side for found in places for place, side in zip(found, sides, strict=True))


def test_devices_are_numbered_host_by_host_as_jax_does():
    # The coordinates of jax.experimental.topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").
    assert located(10, (4, 4)) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("axes", "spans"),
    [(("model",), (Span(2, False), Span(2, False))), (("data",), (Span(3, False),)), (("data", "model"), (Span(4, False), Span(2, False)))],
)
def test_a_group_spans_what_its_devices_do(axes, spans):
    assert spans_of(axes, LogicalMesh.of({"data": 2, "model": 4}), topology("tpu-v5e")) == spans


@pytest.mark.parametrize(
    ("preset", "sizes", "is_closed"),
    [("tpu-v5e", {"a": 256}, True), ("tpu-v5e", {"a": 64}, False), ("tpu-v5p", {"a": 8}, False), ("tpu-v5p", {"a": 64}, True)],
)
def test_only_large_slices_close_their_rings(preset, sizes, is_closed):
    assert {span.is_closed for span in spans_of(("a",), LogicalMesh.of(sizes), topology(preset))} == {is_closed}

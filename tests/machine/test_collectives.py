"""Prices of collectives against the textbook formulas and the TPU compiler's choice of links."""

from __future__ import annotations

import dataclasses

import pytest

from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.collectives import Group, collective_time_s, group_of
from spmdctx.machine.presets import topology

MIB = 2**20
V5P_2X2X2 = LogicalMesh.of({"a": 2, "b": 2, "c": 2})


def rate(kind, axes, mesh, machine) -> float:
    """Bytes per second of payload for a very large payload."""
    payload = 2**44
    return payload / collective_time_s(kind, payload, axes, mesh, machine)


@pytest.mark.parametrize(
    ("axes", "links_bytes_per_s"),
    [(("a",), 90e9), (("b", "c"), 180e9), (("a", "b", "c"), 270e9)],
)
def test_all_reduce_on_a_torus_uses_the_links_of_every_direction_it_spans(axes, links_bytes_per_s):
    size = V5P_2X2X2.num_slices(axes)
    used = rate("all_reduce", axes, V5P_2X2X2, topology("tpu-v5p")) * 2 * (size - 1) / size
    assert used == pytest.approx(links_bytes_per_s, rel=0.1)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("axes", "links"), [(("a",), 1), (("a", "b"), 2), (("a", "b", "c"), 2)])
def test_gathers_and_scatters_on_a_torus_use_one_ring_both_ways(kind, axes, links):
    size = V5P_2X2X2.num_slices(axes)
    machine = dataclasses.replace(topology("tpu-v5p"), scatters_over_all=True)
    assert rate(kind, axes, V5P_2X2X2, machine) * (size - 1) / size == pytest.approx(links * 90e9, rel=0.01)


def test_a_slice_that_closes_its_rings_reduces_twice_as_fast():
    small, whole = LogicalMesh.of({"a": 4, "b": 4}), LogicalMesh.of({"a": 16, "b": 16})
    machine = topology("tpu-v5e")
    used = [rate("all_reduce", ("a", "b"), mesh, machine) * 2 * (1 - 1 / mesh.num_devices) for mesh in (small, whole)]
    assert used[1] == pytest.approx(2 * used[0], rel=0.01)


def test_an_all_to_all_on_a_torus_crosses_the_middle_of_its_longest_side():
    mesh, machine = LogicalMesh.of({"a": 2, "b": 4}), topology("tpu-v5e")
    assert rate("all_to_all", ("b",), mesh, machine) == pytest.approx(45e9 * 2, rel=0.01)
    assert rate("all_to_all", ("a", "b"), mesh, machine) == pytest.approx(45e9, rel=0.01)


def test_nvlink_rates_are_those_of_a_ring():
    mesh = LogicalMesh.of({"x": 8})
    machine = topology("h100")
    assert rate("all_gather", ("x",), mesh, machine) == pytest.approx(450e9 * 8 / 7, rel=1e-3)
    assert rate("all_reduce", ("x",), mesh, machine) == pytest.approx(450e9 * 4 / 7, rel=1e-3)
    assert rate("collective_permute", ("x",), mesh, machine) == pytest.approx(450e9, rel=1e-3)


@pytest.mark.parametrize(
    ("axes", "group"),
    [(("model",), Group(4, 1)), (("data",), Group(2, 8)), (("data", "model"), Group(8, 8)), ((), Group(1, 1))],
)
def test_groups_are_cut_at_the_border_of_a_host(axes, group):
    assert group_of(axes, LogicalMesh.of({"data": 16, "model": 4}), devices_per_host=8) == group


def test_a_group_larger_than_a_host_pays_for_the_network():
    machine = topology("h100")
    inside = collective_time_s("all_reduce", 64 * MIB, ("data",), LogicalMesh.of({"data": 8}), machine)
    across = collective_time_s("all_reduce", 64 * MIB, ("data",), LogicalMesh.of({"data": 16}), machine)
    strided = collective_time_s("all_reduce", 64 * MIB, ("data",), LogicalMesh.of({"data": 16, "model": 8}), machine)
    assert inside < across < strided


@pytest.mark.parametrize("preset", ["tpu-v5e", "tpu-v5p", "h100", "cpu"])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_more_bytes_take_longer_and_one_device_takes_no_time(kind, preset):
    mesh = LogicalMesh.of({"a": 4, "b": 8, "one": 1})
    machine = topology(preset)
    times = [collective_time_s(kind, payload, ("a",), mesh, machine) for payload in (0, MIB, 64 * MIB)]
    assert times == sorted(set(times))
    assert collective_time_s(kind, MIB, ("one",), mesh, machine) == 0.0


def test_an_all_reduce_costs_a_reduce_scatter_and_a_gather():
    mesh = LogicalMesh.of({"a": 2, "b": 32})
    machine = dataclasses.replace(topology("h100"), latency_s=0.0, network_latency_s=0.0)
    parts = [collective_time_s(kind, MIB, ("b",), mesh, machine) for kind in ("reduce_scatter", "all_gather", "all_reduce")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no collective called 'broadcast'"):
        collective_time_s("broadcast", 1, ("x",), LogicalMesh.of({"x": 2}), topology("cpu"))


def test_a_scatter_costs_a_reduction_where_the_compiler_reduces_and_slices():
    mesh, payload = LogicalMesh.of({"data": 2, "model": 4}), 1 << 20

    def costs_a_reduction(axes, name):
        scattered, reduced = (collective_time_s(kind, payload, axes, mesh, topology(name)) for kind in ("reduce_scatter", "all_reduce"))
        return scattered == reduced

    assert costs_a_reduction(("data", "model"), "tpu-v5p")
    assert not costs_a_reduction(("model",), "tpu-v5p")
    assert not costs_a_reduction(("data", "model"), "tpu-v5e")

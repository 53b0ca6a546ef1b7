"""Measuring the devices that are there, and planning with what was measured."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cli.main import main
from spmdctx.cli.measure import calibrate
from spmdctx.errors import ContextError
from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.collectives import collective_price
from spmdctx.machine.presets import PRESETS, topology
from spmdctx.machine.topology import read_topology, topology_text


@pytest.fixture(scope="module")
def found():
    return calibrate(megabytes=1, repeats=1)


def test_everything_is_measured(found):
    assert [row.kind for row in found.collectives] == list(COLLECTIVE_KINDS)
    assert all(row.fixed_s > 0 and row.s_per_byte > 0 for row in found.collectives)
    for name in ("peak_flops_per_s", "vector_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "latency_s"):
        assert getattr(found.topology, name) != getattr(PRESETS["cpu"], name)
    assert "8 x cpu" in found.topology.source


def test_the_fitted_wires_lie_between_what_the_collectives_say(found):
    mesh = LogicalMesh.of({"x": len(jax.devices())})
    ratios = [collective_price(row.kind, ("x",), mesh, found.topology).s_per_byte / row.s_per_byte for row in found.collectives]
    assert min(ratios) <= 1.0 + 1e-9
    assert max(ratios) >= 1.0 - 1e-9


def test_one_device_is_measured_alone():
    alone = calibrate(jax.devices()[:1], megabytes=1, repeats=1)
    assert alone.collectives == ()
    assert alone.topology.link_bytes_per_s == PRESETS["cpu"].link_bytes_per_s
    assert "nobody to talk to" in alone.notes[0]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_measured_topology_is_written_read_and_planned_with(suffix, tmp_path, capsys):
    path = tmp_path / f"machine.{suffix}"
    assert main(["calibrate", "--json", "--megabytes", "1", "--repeats", "1", "--out", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["collectives"]) == len(COLLECTIVE_KINDS)
    step = spmdctx.parallel(lambda w, x: x @ w, parallel_mode="data_parallel", device_num=8, topology=path)
    plan = step.plan(jnp.ones((16, 16)), jnp.ones((8, 16)))
    assert plan.topology == "cpu-measured"
    assert dataclasses.asdict(read_topology(path)) == data["topology"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name, tmp_path):
    for as_json in (True, False):
        path = tmp_path / ("machine.json" if as_json else "machine.yaml")
        path.write_text(topology_text(PRESETS[name], as_json=as_json))
        assert topology(str(path)) == PRESETS[name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "holds no topology"),
        ("device: x\nspeed: 3", "speed"),
        ("device: x", "lacks fields"),
        ("a: [", "neither JSON nor YAML"),
    ],
)
def test_a_file_that_is_no_topology_is_refused(text, said, tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(ContextError, match=said):
        topology(path)


def test_a_field_of_a_wrong_type_is_refused(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(topology_text(PRESETS["cpu"]).replace("merges_partial_sums: false", "merges_partial_sums: sometimes"))
    with pytest.raises(ContextError, match="wrong type"):
        topology(path)

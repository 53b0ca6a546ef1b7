"""Machine presets."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import yaml

from spmdctx.errors import ContextError
from spmdctx.machine.presets import CPU, GPU, PRESETS, TPU, topology
from spmdctx.machine.topology import Preferences, as_asked, read_topology, topology_text


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v5p", "tpu-v6e", "h100", "h200", "a100", "cpu"])
def test_every_preset_names_its_source_and_itself(name):
    preset = topology(name)
    assert preset.device == name
    assert preset.source not in ("", "user")


def test_newer_chips_are_faster():
    assert PRESETS["tpu-v5e"].peak_flops_per_s < PRESETS["tpu-v5p"].peak_flops_per_s < PRESETS["tpu-v6e"].peak_flops_per_s
    assert PRESETS["a100"].link_bytes_per_s < PRESETS["h100"].link_bytes_per_s
    assert PRESETS["h100"].memory_bytes < PRESETS["h200"].memory_bytes


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_wires_between_hosts_are_slower_than_those_inside(preset):
    assert preset.network_bytes_per_s < preset.link_bytes_per_s < preset.memory_bytes_per_s


@pytest.mark.parametrize("preset", [one for name, one in PRESETS.items() if name.startswith("tpu")], ids=lambda one: one.device)
def test_gathers_of_weights_hide_on_v5e_only(preset):
    """As in scheduled programs: those for v5p and v6e have no asynchronous collectives."""
    assert (preset.gather_overlap > 0) == (preset.device == "tpu-v5e")
    assert preset.reduction_overlap == 0


def test_a_topology_passes_through():
    own = dataclasses.replace(topology("h100"), device="mine", source="user")
    assert topology(own) is own


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ContextError, match="tpu-v5e, tpu-v5p"):
        topology("tpu-v9")


def test_a_topology_of_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match=r"got: +int"):
        topology(3)


@pytest.mark.parametrize("field", ["peak_flops_per_s", "memory_bytes", "link_bytes_per_s", "devices_per_host"])
def test_figures_must_be_positive(field):
    with pytest.raises(ContextError, match=field):
        dataclasses.replace(topology("cpu"), **{field: 0})


@pytest.mark.parametrize(("name", "compiler"), [("tpu", TPU), ("h100", GPU), ("h200", GPU), ("a100", GPU), ("cpu", CPU)])
def test_the_presets_of_a_backend_have_its_compiler(name, compiler):
    machines = [one for device, one in PRESETS.items() if device.startswith(name)]
    assert machines
    for machine in machines:
        own = {"scratch_bytes": 0, "gather_overlap": 0.0} if compiler is TPU else {}
        assert dataclasses.replace(machine.compiler, **own) == compiler
        assert dataclasses.replace(machine, latency_s=1.0).compiler == machine.compiler


def test_the_compiler_of_a_topology_is_as_its_fields_say():
    machine = dataclasses.replace(topology("tpu-v5e"), sinks_slices=False, scratch_bytes=5)
    assert machine.compiler == dataclasses.replace(topology("tpu-v5e").compiler, sinks_slices=False, scratch_bytes=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.compiler.sinks_slices = True


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_topology_is_the_same_from_its_file_and_from_a_pickle(suffix, tmp_path):
    machine = topology("tpu-v5p")
    path = tmp_path / f"machine.{suffix}"
    path.write_text(topology_text(machine, as_json=suffix == "json"))
    for read in (topology(path), pickle.loads(pickle.dumps(machine))):
        assert read == machine
        assert hash(read) == hash(machine)
        assert dataclasses.replace(read.compiler, version=machine.compiler.version) == machine.compiler


def test_files_with_the_options_of_a_context_are_still_read(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(topology_text(topology("cpu")) + "uses_all_to_all: false\nwidens_gradients: true\n")
    assert topology(path) == topology("cpu")


def test_a_machine_has_the_preferences_of_a_context():
    machine, asked = topology("h100"), Preferences(allows_all_to_all=False)
    assert as_asked(machine, Preferences()) is machine
    found = as_asked(machine, asked)
    assert found.preferences == asked
    assert found != machine
    assert found.compiler == machine.compiler
    assert dataclasses.replace(found, latency_s=1.0).preferences == asked


def written(tmp_path, **fields):
    content = yaml.safe_load(topology_text(topology("tpu-v5e")))
    path = tmp_path / "topology.yaml"
    path.write_text(yaml.safe_dump({**content, **fields}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", 2**53 + 1),
        ("memory_bytes", "16e9"),
        ("peak_flops_per_s", "1.5e14"),
        ("latency_s", 0),
    ],
)
def test_a_field_of_a_file_is_read_exactly(tmp_path, field, value):
    assert getattr(read_topology(written(tmp_path, **{field: value})), field) == (float(value) if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices_per_host", 8.7),
        ("memory_bytes", 10**400),
        ("peak_flops_per_s", 10**400),
        ("latency_s", -1e-6),
        ("latency_s", float("nan")),
        ("network_latency_s", "inf"),
        ("device", 5),
        ("source", ["x"]),
        ("interconnect", "ring"),
        ("scatters_strictly", 1),
        ("gather_overlap", 1.5),
        ("torus_dims", True),
        ("peak_flops_per_s", 1e-300),
    ],
)
def test_a_field_of_a_file_that_no_machine_has_is_refused(tmp_path, field, value):
    with pytest.raises(ContextError, match=r"."):
        read_topology(written(tmp_path, **{field: value}))


@pytest.mark.parametrize(("field", "value"), [("latency_s", "1"), ("device", None), ("memory_bytes", 1.5), ("interconnect", "switch")])
def test_a_field_of_a_wrong_type_is_a_type_error(field, value):
    with pytest.raises(TypeError, match=rf"Topology\.{field}(.|\n)*got:"):
        dataclasses.replace(topology("cpu"), **{field: value})

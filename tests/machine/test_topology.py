"""Machine presets."""

from __future__ import annotations

import dataclasses

import pytest

from spmdctx.errors import ContextError
from spmdctx.machine.presets import PRESETS, topology


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

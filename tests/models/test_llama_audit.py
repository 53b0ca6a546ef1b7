"""A four-layer Llama step, compiled for TPU and GPU meshes that are not there, communicates what its plan says."""

from __future__ import annotations

from typing import Any

import pytest

import spmdctx
from spmdctx.models import UNSPLIT, DecoderConfig, Split, abstract_program
from tests.audit.compile_only import need_gpu, need_tpu

# Whole tiles of a TPU: narrower arrays are padded, and the padding is communicated too.
CONFIG = DecoderConfig(vocab_size=1024, width=256, num_layers=4, num_heads=8, num_kv_heads=4, hidden=512, max_seq=128)

MODES = {
    "data_parallel": (UNSPLIT, {"parallel_mode": "data_parallel"}),
    "megatron": (Split("megatron", 4, 2), {"parallel_mode": "semi_auto_parallel"}),
    "two_pins_per_layer": (
        Split("pins", 4, 2),
        {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "dataset_strategy": ((4, 1), (4, 1))},
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machine", ["v5e:2x4", "8 x H100"])
def test_a_llama_step_communicates_as_planned(mode: str, machine: str) -> None:
    split, options = MODES[mode]
    devices: list[Any] = need_gpu(8) if machine == "8 x H100" else need_tpu(machine)
    with spmdctx.auto_parallel_context(**options):
        step, arguments = abstract_program(CONFIG, batch_size=32, split=split)
        report = spmdctx.parallel(step, devices=devices).audit(*arguments)
    assert report.planned_bytes > 0
    assert report.found_share >= 0.95, str(report)
    assert report.unplanned_share <= 0.05, str(report)

"""What a plan says of a Llama step is what the TPU and the GPU compiler make of it, to the byte and not only by equivalence."""

import pytest

from tests.audit.compile_only import need_gpu, need_tpu
from tests.zoo.llama import STRATEGIES, audit, config, exact_share

TARGETS = {"tpu-v5e": need_tpu, "h100": need_gpu}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("topology", TARGETS)
def test_a_llama_step_communicates_what_its_plan_says(topology, strategy):
    report = audit(STRATEGIES[strategy], TARGETS[topology](), topology, config(num_layers=2))
    assert report.planned_bytes > 0
    assert report.found_share >= 0.95, str(report)
    assert exact_share(report) >= 0.95, str(report)
    assert report.unplanned_share <= 0.05, str(report)


def test_a_llama_step_with_scanned_layers_communicates_what_its_plan_says():
    report = audit(STRATEGIES["megatron"], need_gpu(), "h100", config(scan_layers=True))
    assert exact_share(report) >= 0.95, str(report)
    assert report.unplanned_share <= 0.05, str(report)


def test_activations_in_bfloat16_are_planned_in_bfloat16():
    report = audit(STRATEGIES["two pins per layer"], need_gpu(), "h100", config(scan_layers=True, dtype="bfloat16"))
    assert exact_share(report) >= 0.95, str(report)
    assert report.unplanned_share <= 0.05, str(report)

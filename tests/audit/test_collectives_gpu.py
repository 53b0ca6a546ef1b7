from collections import Counter

import pytest

from spmdctx.audit import parse_collectives
from tests.audit import programs
from tests.audit.compile_only import need_gpu
from tests.audit.programs import DATA, DATA_MODEL


@pytest.fixture(scope="module")
def devices():
    return need_gpu()


def counted(text, mesh):
    return Counter((one.kind, one.axes, one.payload_bytes, one.repeats) for one in parse_collectives(text, mesh))


def test_gradients_reduced_at_once_are_taken_apart(devices):
    text = programs.data_parallel(devices)
    assert "concatenate" in text
    assert counted(text, DATA) == {("all_reduce", ("data",), 4, 1): 1, ("all_reduce", ("data",), 131072, 1): 2}


def test_sharded_weights_are_gathered_and_reduce_scattered(devices):
    assert counted(programs.sharded_weights(devices), DATA) == {
        ("all_gather", ("data",), 262144, 1): 2,
        ("reduce_scatter", ("data",), 262144, 1): 2,
    }


def test_loops_multiply(devices):
    assert counted(programs.nested_scans(devices), DATA_MODEL) == {("all_reduce", ("model",), 32768, 15): 1}


def test_a_gradient_summed_in_a_scan_is_reduced_once_after_it(devices):
    assert counted(programs.accumulated(devices), DATA) == {("all_reduce", ("data",), 262144, 1): 1}


def test_terms_of_one_cotangent_are_reduced_together(devices):
    found = parse_collectives(programs.three_projections(devices), DATA_MODEL)
    assert [(one.payload_bytes, one.summands) for one in found if one.axes == ("model",)] == [(32768, 3)]

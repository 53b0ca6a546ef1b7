from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.audit import parse_collectives
from tests.audit import programs
from tests.audit.compile_only import need_tpu
from tests.audit.programs import DATA, DATA_MODEL


@pytest.fixture(scope="module")
def devices():
    return need_tpu()


def counted(text, mesh):
    return Counter((one.kind, one.axes, one.payload_bytes, one.repeats) for one in parse_collectives(text, mesh))


def test_bfloat16_gradients_are_reduced_as_they_are(devices):
    found = parse_collectives(programs.data_parallel(devices, "bfloat16"), DATA)
    assert Counter((one.payload_bytes, one.dtype) for one in found) == {(4, "float32"): 1, (65536, "bfloat16"): 2}


def test_a_megatron_pair(devices):
    assert counted(programs.megatron(devices), DATA_MODEL) == {
        ("all_reduce", ("model",), 32768, 1): 2,
        ("all_reduce", ("data",), 262144, 1): 2,
        ("all_reduce", ("data",), 4, 1): 1,
    }


def test_sharded_weights_are_gathered_in_bfloat16_and_reduce_scattered(devices):
    assert counted(programs.sharded_weights(devices), DATA) == {
        ("all_gather", ("data",), 131072, 1): 2,
        ("reduce_scatter", ("data",), 262144, 1): 2,
    }


def test_loops_multiply_though_the_compiler_keeps_no_count(devices):
    text = programs.nested_scans(devices)
    assert "known_trip_count" not in text
    assert counted(text, DATA_MODEL) == {("all_reduce", ("model",), 32768, 15): 1}


def test_a_gradient_summed_in_a_scan_is_reduced_once_after_it(devices):
    assert counted(programs.accumulated(devices), DATA) == {("all_reduce", ("data",), 262144, 1): 1}


def test_terms_of_one_cotangent_are_reduced_together(devices):
    found = parse_collectives(programs.three_projections(devices), DATA_MODEL)
    assert [(one.payload_bytes, one.summands) for one in found if one.axes == ("model",)] == [(32768, 3)]


@pytest.mark.parametrize("shape", [(), (3,), (16, 40)])
def test_short_types_are_found_in_the_words_of_padded_tiles(devices, shape):
    def function(x):
        return jnp.all(jnp.isfinite(x), 0), jnp.max(x.astype(jnp.int16), 0), x * 2

    step = spmdctx.parallel(function, devices=devices, parallel_mode="data_parallel", batch_argnums=0)
    report = step.audit(jax.ShapeDtypeStruct((64, *shape), jnp.float32))
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    assert report.planned_bytes

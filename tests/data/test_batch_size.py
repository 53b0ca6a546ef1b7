"""The global batch size, after MindFormers' table."""

import pytest

import spmdctx
from spmdctx import Layout
from spmdctx.data import global_batch_size
from spmdctx.errors import ContextError

SEMI = {"parallel_mode": "semi_auto_parallel", "device_num": 16}
MODEL = {"data_parallel": 4, "micro_batch_num": 5, "micro_batch_interleave_num": 2}
SLICES = {"dataset_strategy": ((4, 1), (4,))}
LAYOUT = {"dataset_strategy": (Layout((4, 4), ("dp", "mp"))("dp", "None"),)}


@pytest.mark.parametrize(
    ("options", "model", "want"),
    [
        ({**SEMI, "full_batch": True}, MODEL, 3 * 4 * 2),
        ({**SEMI, "full_batch": True, "grad_accumulation_step": 7}, MODEL, 3 * 4 * 2 * 7),
        ({**SEMI, "full_batch": True, "pipeline_stages": 2, "grad_accumulation_step": 7}, MODEL, 3 * 4 * 2 * 5),
        ({**SEMI, "parallel_mode": "auto_parallel", "dataset_strategy": "full_batch"}, MODEL, 3 * 4 * 2),
        (SEMI, MODEL, 3 * 16 * 2),
        ({**SEMI, "grad_accumulation_step": 7}, MODEL, 3 * 16 * 2 * 7),
        ({**SEMI, "pipeline_stages": 2}, MODEL, 3 * 16 * 2 * 5),
        ({**SEMI, **SLICES}, MODEL, 3 * 4 * 2),
        ({**SEMI, **SLICES}, {}, 3 * 4),
        ({**SEMI, **SLICES, "pipeline_stages": 2}, MODEL, 3 * 4 * 2 * 5),
        ({**SEMI, **LAYOUT, "grad_accumulation_step": 7}, MODEL, 3 * 4 * 2 * 7),
        ({**SEMI, "parallel_mode": "data_parallel", "grad_accumulation_step": 7}, MODEL, 3 * 16 * 7),
        ({"parallel_mode": "data_parallel"}, {}, 3 * 8),
        ({"parallel_mode": "data_parallel"}, {"num_devices": 2}, 3 * 2),
        ({}, {}, 3),
    ],
)
def test_the_rows_are_those_of_the_table(options, model, want):
    spmdctx.set_auto_parallel_context(**options)
    assert global_batch_size(3, **model) == want


def test_a_context_may_be_given():
    context = spmdctx.context.layers.current_context().replace(parallel_mode="data_parallel", device_num=4)
    assert global_batch_size(3, context=context) == 12


@pytest.mark.parametrize(
    ("options", "model", "error", "words"),
    [
        ({**SEMI, **SLICES}, {"data_parallel": 2}, ContextError, "into 4 slices"),
        (SEMI, {"micro_batch_num": 0}, ContextError, "micro_batch_num is 0"),
        (SEMI, {"data_parallel": True}, TypeError, "data_parallel is a number"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, model, error, words):
    spmdctx.set_auto_parallel_context(**options)
    with pytest.raises(error, match=words):
        global_batch_size(3, **model)

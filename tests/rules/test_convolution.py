"""Convolutions against Shardy and on eight devices."""

from dataclasses import replace

import pytest
from jax import lax

from tests.rules.cases import Case


def conv(**options):
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **{"window_strides": (1, 1), "padding": "SAME", **options})


SPATIAL = (
    "Shardy splits operand 0 dim 1 = operand 1 dim 0 reduction, we don't",
    "Shardy splits operand 0 dim 2 = operand 1 dim 1 reduction, we don't",
)
"""With strides Shardy would reduce over a kernel's positions, which are few, and gathers overlapping windows for it."""

CONVOLUTIONS = [
    Case("conv_general_dilated", conv(), ((8, 8, 4, 4), (8, 8, 3, 3)), label="NCHW"),
    Case(
        "conv_general_dilated",
        conv(window_strides=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ((8, 4, 4, 8), (3, 3, 8, 8)),
        label="NHWC with strides",
        explained=SPATIAL,
    ),
    Case("conv_general_dilated", conv(feature_group_count=2), ((8, 8, 4, 4), (8, 4, 3, 3)), label="feature groups"),
    Case("conv_general_dilated", conv(feature_group_count=8), ((8, 8, 4, 4), (8, 1, 3, 3)), label="depthwise"),
    Case(
        "conv_general_dilated",
        conv(batch_group_count=2),
        ((8, 8, 4, 4), (8, 8, 3, 3)),
        label="batch groups",
    ),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_have_the_factors_that_shardy_gives_them(case):
    assert replace(case, op="stablehlo.convolution").disagreements() == sorted(case.explained)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_every_sharding_of_a_convolution_gives_the_one_device_result(case):
    case.check()

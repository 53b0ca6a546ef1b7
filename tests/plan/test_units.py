"""Quantities as text."""

from __future__ import annotations

import pytest

from spmdctx.mesh import LogicalMesh
from spmdctx.plan.units import dtype_text, mesh_text, place_text, seconds_text, share_text, split_text, tensor_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.9999, "1.00 s"), (8.7e-4, "870 µs"), (3e-8, "30.0 ns"), (1e-12, "1.0e-12 s")],
)
def test_seconds_have_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [("float32", "f32"), ("bfloat16", "bf16"), ("int8", "i8"), ("uint32", "u32"), ("bool", "bool"), ("float8_e4m3fn", "float8_e4m3fn")],
)
def test_dtypes_are_short_where_compilers_shorten_them(dtype, text):
    assert dtype_text(dtype) == text


def test_other_texts():
    assert tensor_text((2, 3), "float32") == "f32[2, 3]"
    assert split_text((("data", "model"), ())) == "[data+model, -]"
    assert split_text(((), ())) == "whole"
    assert mesh_text(LogicalMesh.of([2, 4])) == "data 2 \N{MULTIPLICATION SIGN} model 4"
    assert mesh_text(LogicalMesh.of([])) == "one device"
    assert share_text(1, 4) == "25 %"
    assert share_text(1, 0) == ""
    assert place_text("model.py:3 (step.<locals>.loss)") == "model.py:3 (loss)"
    assert place_text("model.py:3") == "model.py:3"

"""Quantities and files as text."""

from __future__ import annotations

import jax
import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.trace.build.origins import source_line
from spmdctx.wording import (
    bytes_text,
    counted,
    dtype_text,
    exact_bytes_text,
    file_text,
    mesh_text,
    place_text,
    seconds_text,
    share_text,
    split_text,
    tensor_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (17.25 * 1024, "17.2 KiB"), (3 * 2**30, "3.00 GiB"), (500 * 2**20, "500 MiB")],
)
def test_bytes_have_three_digits(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 byte"), (512, "512 bytes"), (12 * 2**30, "12884901888 bytes (12.0 GiB)"), (1025, "1025 bytes (1.00 KiB)")]
)
def test_an_exact_number_of_bytes_comes_with_a_readable_one(count, text):
    assert exact_bytes_text(count) == text


def test_one_thing_is_not_several():
    assert [counted(count, "device") for count in (0, 1, 8)] == ["0 devices", "1 device", "8 devices"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/home/me/net.py", "net.py"),
        ("net.py", "net.py"),
        ("C:\\code\\net.py", "net.py"),
        ("/tmp/ipykernel_4711/1494772071.py", "cell"),
        ("C:\\Temp\\ipykernel_4711\\1494772071.py", "cell"),
        ("<ipython-input-3-0a1b2c>", "cell"),
        ("/code/ipykernel_4711/net.py", "net.py"),
    ],
)
def test_a_file_goes_by_its_name_and_a_cell_by_that(path, text):
    assert file_text(path) == text


def test_ops_of_a_notebook_lie_in_its_cell():
    space = {}
    exec(compile("def double(x):\n    return x + x\n", "/tmp/ipykernel_4711/1494772071.py", "exec"), space)
    jaxpr = jax.make_jaxpr(space["double"])(1.0)
    assert source_line(jaxpr.eqns[0].source_info) == "cell:2 (double)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5, "2.50 s"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (8.7e-4, "870 µs"),
        (3e-8, "30.0 ns"),
        (7.8e-11, "0.078 ns"),
        (1e-13, "<0.001 ns"),
    ],
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
    assert place_text("model.py:3 (step.<locals>.Mlp.__call__)") == "model.py:3 (Mlp.__call__)"
    assert place_text("model.py:3 (Mlp.__call__ in Model/layers_3/mlp)") == "model.py:3 (layers_3/mlp)"

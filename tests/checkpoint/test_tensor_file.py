"""Safetensors files: written and read as the library of the format does, and read by ranges that are counted."""

from __future__ import annotations

import itertools
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

from spmdctx import CheckpointError, UnsupportedError
from spmdctx.checkpoint.blocks import shape_of_block, slices_of
from spmdctx.checkpoint.tensor_file import Reads, Tensor, TensorFile, write_tensors

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64")


def numbers(shape, dtype):
    return (np.random.default_rng(len(shape)).standard_normal(shape) * 50).astype(jnp.dtype(dtype))


def row(name, value):
    return Tensor(name, value.shape, str(value.dtype), lambda: value)


def whole(shape):
    return tuple((0, size) for size in shape)


def read(path, name):
    with TensorFile(path, Reads()) as file:
        info = file.tensors[name]
        out = np.empty(info.shape, info.dtype)
        file.read(name, whole(info.shape), out)
        return out


def test_what_is_written_the_library_reads(tmp_path):
    tensors = {dtype: numbers((3, 5), dtype) for dtype in DTYPES} | {"scalar": np.float32(3.5), "empty": np.zeros((0, 4), np.int8)}
    path = tmp_path / "a.safetensors"
    write_tensors(path, [row(name, np.asarray(value)) for name, value in tensors.items()])
    found = safetensors.numpy.load_file(path)
    assert list(tensors) == sorted(found, key=list(tensors).index)
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    half = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    write_tensors(path, [row("half", np.asarray(half))])
    assert safetensors.flax.load_file(path)["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(safetensors.flax.load_file(path)["half"], half)


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {dtype: numbers((4, 6), dtype) for dtype in DTYPES}
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np"})
    for name, value in tensors.items():
        np.testing.assert_array_equal(read(path, name), value)
    half = {"half": jnp.arange(8, dtype=jnp.bfloat16)}
    safetensors.flax.save_file(half, path)
    np.testing.assert_array_equal(read(path, "half"), half["half"])
    assert read(path, "half").dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_small_floats_are_kept(tmp_path, dtype):
    value = numbers((4, 4), dtype)
    write_tensors(tmp_path / "a.safetensors", [row("w", value)])
    np.testing.assert_array_equal(read(tmp_path / "a.safetensors", "w").view(np.uint8), value.view(np.uint8))


BLOCKS = [((6, 8), block) for block in itertools.product([(0, 6), (2, 4), (5, 6)], [(0, 8), (3, 5), (0, 1)])] + [
    ((2, 3, 4, 5), block) for block in itertools.product([(0, 2), (1, 2)], [(0, 3), (1, 3)], [(0, 4), (2, 3)], [(0, 5), (1, 4)])
]


@pytest.mark.parametrize(("shape", "block"), BLOCKS)
@pytest.mark.parametrize("repeat", [1, 300], ids=["short runs", "long runs"])
def test_a_block_is_what_an_index_gives(tmp_path, shape, block, repeat):
    shape, block = (*shape, repeat), (*block, (0, repeat))
    value = numbers(shape, "float32")
    write_tensors(tmp_path / "a.safetensors", [row("before", numbers((7,), "int8")), row("w", value)])
    reads = Reads()
    with TensorFile(tmp_path / "a.safetensors", reads) as file:
        header = reads.read_bytes
        into = np.full((*shape_of_block(block)[:-1], repeat + 2), np.nan, np.float32)
        file.read("w", block, into[..., 1:-1])
    np.testing.assert_array_equal(into[..., 1:-1], value[slices_of(block)])
    assert np.isnan(into[..., [0, -1]]).all()
    assert reads.needed_bytes == value[slices_of(block)].nbytes
    if repeat > 1:
        assert reads.read_bytes - header == reads.needed_bytes
    else:
        assert reads.needed_bytes <= reads.read_bytes - header <= value.nbytes


def test_columns_of_a_wide_matrix_cost_their_own_bytes(tmp_path):
    value = numbers((64, 4096), "float32")
    write_tensors(tmp_path / "a.safetensors", [row("w", value)])
    reads = Reads()
    with TensorFile(tmp_path / "a.safetensors", reads) as file:
        out = np.empty((64, 512), np.float32)
        file.read("w", ((0, 64), (512, 1024)), out)
    np.testing.assert_array_equal(out, value[:, 512:1024])
    assert reads.num_files == 1
    assert reads.read_bytes - reads.needed_bytes < 200


def _with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _twice(rows):
    text = json.dumps(rows)
    return f"{text[:-1]}, {text[1:]}".encode()


def _rows(*rows):
    return {name: {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]} for name, start, stop in rows}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        (1 << 40).to_bytes(8, "little") + b"{}",
        _with_header(b"not json"),
        _with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 15),
        _with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, b"\0" * 16),
        _with_header({"w": {"dtype": "F3", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16),
        _with_header({"w": [4]}),
        _with_header(b"[1]"),
        _with_header(b"[" * 100_000),
        _with_header({"__metadata__": [1]}),
        _with_header({"__metadata__": {"format": 1}}),
        _with_header(b'{"w": {"dtype": "F32", "shape": [Infinity, 4], "data_offsets": [0, 16]}}', b"\0" * 16),
        _with_header({"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, b"\0" * 16),
        _with_header({"w": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}, b"\0" * 16),
        _with_header(_rows(("w", 0, 16), ("v", 0, 16)), b"\0" * 16),
        _with_header(_rows(("w", 0, 16), ("v", 8, 24)), b"\0" * 24),
        _with_header(_rows(("w", 0, 16), ("v", 24, 40)), b"\0" * 40),
        _with_header(_rows(("w", 8, 24)), b"\0" * 24),
        _with_header(_twice(_rows(("w", 0, 8))), bytes(8)),
        _with_header({"w": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, bytes(4)),
        _with_header({"w": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}, bytes(16)),
        _with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}}, bytes(16)),
        _with_header({"w": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4 * 10**30]}}, bytes(16)),
        _with_header({"w": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
        _with_header({"w": {"dtype": "BOOL", "shape": [True], "data_offsets": [0, 1]}}, bytes(1)),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        TensorFile(tmp_path / "bad.safetensors", Reads())


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("intact") / "a.safetensors"
    write_tensors(path, [row("w", numbers((6, 8), "float32")), row("half", numbers((5,), "bfloat16")), row("s", np.array(3, np.int32))])
    return path.read_bytes()


def read_all(path):
    with TensorFile(path, Reads()) as file:
        for name, info in file.tensors.items():
            file.read(name, tuple((0, size) for size in info.shape), np.empty(info.shape, info.dtype))


def test_every_flipped_bit_of_a_file_is_found_and_named(tmp_path, intact):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(intact)
    read_all(path)
    for place in range(len(intact)):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ (1 << place % 8)]) + intact[place + 1 :])
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            read_all(path)


@pytest.mark.parametrize("missing", [1, 7, 30, 210, 600])
def test_every_cut_is_found_and_named(tmp_path, intact, missing):
    for content in (intact[:-missing], intact + b"\0" * missing):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
            TensorFile(tmp_path / "bad.safetensors", Reads())


def test_a_part_of_a_tensor_is_compared_only_where_that_is_asked_for(tmp_path, intact):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with TensorFile(path, Reads()) as file:
        file.read("w", ((0, 3), (0, 8)), np.empty((3, 8), np.float32))
        with pytest.raises(CheckpointError, match=r"bad\.safetensors(.|\n)*'s' is not what was written: its checksum differs"):
            file.verify()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        TensorFile(tmp_path / "gone.safetensors", Reads())


def test_a_dtype_without_a_code_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(UnsupportedError, match="int4"):
        write_tensors(tmp_path / "a.safetensors", [row("w", np.ones(2, jnp.int4))])
    assert not list(tmp_path.iterdir())


def test_half_a_file_is_never_seen(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, [row("w", np.ones(2))])

    def fail():
        raise RuntimeError("read failed")

    with pytest.raises(RuntimeError, match="read failed"):
        write_tensors(path, [row("v", np.ones(2)), Tensor("w", (2,), "float64", fail)])
    np.testing.assert_array_equal(read(path, "w"), np.ones(2))
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to itself"])
def test_what_is_no_file_is_named_and_does_not_hang(tmp_path, kind):
    path = tmp_path / "bad.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(CheckpointError, match=r"cannot be read(.|\n)*bad\.safetensors"):
        TensorFile(path, Reads())

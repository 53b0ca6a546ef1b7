"""Rows of one server: they catch up what they have missed, are read in the version before, and lie in files for any number of servers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.server.program.rows import Rows
from spmdctx.server.program.spec import Join, TableSpec
from spmdctx.server.state import row_files
from spmdctx.server.state.folder import save_shard, state_folder
from spmdctx.server.state.row_files import Piece, piece_of, read_rows
from spmdctx.server.state.table import RowTable

COUNT = 300


def table_of(step, *, is_still):
    """A table of two columns with one array of state; `step` gives the next rows of both."""
    (count,) = jax.export.symbolic_shape("n")
    row = jax.ShapeDtypeStruct((count, 2), jnp.float32)
    blob = bytes(jax.export.export(jax.jit(step))(row, row, row, jax.ShapeDtypeStruct((), jnp.float32)).serialize())
    join = Join("mean", "float32", "float32")
    spec = TableSpec(COUNT, {"in/0": "t", "in/1": "m"}, "loss/1", (2,), join, blob, ("in/2",), is_still, {})
    rng = np.random.default_rng(0)
    arrays = {slot: rng.normal(size=(COUNT, 2)).astype(np.float32) for slot in spec.held}
    return RowTable(spec, {slot: own.copy() for slot, own in arrays.items()}, 0), arrays


def momentum(table, state, gradient, rate):
    state = 0.5 * state + gradient
    return table - rate * state, state


def renewed(table, parts, rate):
    table.renew(table.touched(parts, len(parts)), {"in/2": np.float32(rate)})


def parts_of(number):
    rng = np.random.default_rng(number)
    places = [np.unique(rng.integers(0, COUNT if number % 3 else 5, 20)) for _ in range(2)]
    return [Rows(own, rng.normal(size=(len(own), 2)).astype(np.float32)) for own in places]


@pytest.mark.parametrize("num_steps", [5, 600])
def test_rows_catch_up_what_they_have_missed(num_steps):
    table, arrays = table_of(momentum, is_still=False)
    values, state = arrays["in/0"], arrays["in/1"]
    for number in range(num_steps):
        rate = np.float32(1 / (number + 2))
        parts = parts_of(number) if number < 3 else []
        parts = parts or [Rows(np.asarray([7]), np.ones((1, 2), np.float32))]
        whole = np.zeros((COUNT, 2), np.float32)
        for own in parts:
            whole[own.places] += own.values
        values, state = map(np.asarray, momentum(values, state, whole / np.float32(len(parts)), rate))
        renewed(table, parts, rate)
    assert np.allclose(table.pull(np.asarray([250, 3, 7])), values[[250, 3, 7]], atol=1e-5)
    found = table.arrays()
    assert np.allclose(found["in/0"], values, atol=1e-5)
    assert np.allclose(found["in/1"], state, atol=1e-5)


def test_rows_are_read_in_the_version_before_until_they_are_saved():
    table, arrays = table_of(momentum, is_still=False)
    renewed(table, parts_of(1), 0.5)
    every = np.arange(COUNT)
    before = table.pull(every, 1)
    renewed(table, parts_of(2), 0.25)
    some = np.arange(0, COUNT, 3)
    assert np.array_equal(table.pull(some, 1), before[some])
    assert not np.array_equal(table.pull(some, 2), before[some])
    assert table.pull(some, 0) is None
    table.arrays()
    assert table.pull(every, 1) is None
    assert np.array_equal(arrays["in/0"].shape, table.pull(every).shape)


def test_rows_whose_gradient_is_zero_may_be_still():
    table, arrays = table_of(lambda rows, state, gradient, rate: (rows - rate * gradient, state), is_still=True)
    renewed(table, [Rows(np.asarray([4, 9]), np.ones((2, 2), np.float32))], 1.0)
    wanted = arrays["in/0"].copy()
    wanted[[4, 9]] -= 1
    assert np.array_equal(table.arrays()["in/0"], wanted)
    assert np.array_equal(table.pull(np.arange(COUNT), 0), arrays["in/0"])


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_rows_lie_in_files_for_any_number_of_servers(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(row_files, "_BLOCK_BYTES", block_bytes)
    whole = np.random.default_rng(0).normal(size=(101, 3))
    for server in range(3):
        save_shard(tmp_path, 5, server, {Piece("a/b", server, 3).name: whole[server::3], f"other {server}": whole})
    files = sorted(state_folder(tmp_path, 5).glob("server-*"))
    for count in (1, 2, 3, 4):
        assert all(np.array_equal(read_rows(files, Piece("a/b", own, count)), whole[own::count]) for own in range(count))
    assert np.array_equal(read_rows(files, Piece("other 1", 1, 2)), whole[1::2])
    assert read_rows(files[:2], Piece("a/b", 0, 1)) is None
    assert read_rows(files, Piece("a", 0, 1)) is None
    assert piece_of(Piece("a#rows 1 of 2", 1, 2).name) == Piece("a#rows 1 of 2", 1, 2)


def test_reading_a_table_leaves_the_version_before_to_those_who_need_it():
    table, _ = table_of(momentum, is_still=False)
    renewed(table, [Rows(np.arange(COUNT), np.ones((COUNT, 2), np.float32))], 0.5)
    before = table.pull(np.asarray([3])).copy()
    renewed(table, [Rows(np.asarray([7]), np.ones((1, 2), np.float32))], 0.5)
    whole = table.read("in/0")
    np.testing.assert_array_equal(table.pull(np.asarray([3]), 1), before)
    np.testing.assert_array_equal(whole, table.arrays()["in/0"])
    assert not np.array_equal(whole[3], before[0])

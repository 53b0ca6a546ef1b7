"""Meshes of many axes are searched in blocks of them, and say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.ir.domain import AxisCodes
from spmdctx.ir.mesh import Blocks, LogicalMesh
from spmdctx.search.setup.blocks import with_blocks, without_blocks
from spmdctx.search.setup.request import Setup
from tests.search.random_graphs import random_step

TWELVE = LogicalMesh.of({f"a{place}": 2 for place in range(12)})


@pytest.mark.parametrize("count", [2, 4])
def test_few_axes_are_not_joined(count):
    setup = Setup(LogicalMesh.of({f"a{place}": 2 for place in range(count)}))
    assert with_blocks(random_step(1, 4).graph, setup) is setup


def test_axes_that_a_pin_uses_apart_stay_apart():
    graph = random_step(1, 4).graph
    rank = len(graph.values[0].shape)
    pin = (("a3",), ("a5", "a4"), *[()] * rank)[:rank]
    found = with_blocks(graph, Setup(TWELVE, pins={0: pin}))
    assert isinstance(found.mesh, Blocks)
    assert sum(found.mesh.blocks, ()) == TWELVE.names
    assert ("a3",) in found.mesh.blocks
    assert not any({"a4", "a5"} <= set(block) for block in found.mesh.blocks) or rank < 2
    (note,) = found.notes
    assert "12 axes" in note
    assert without_blocks(found).mesh == TWELVE


def test_the_codes_of_blocks_split_whole_blocks_in_the_order_of_the_mesh():
    mesh = LogicalMesh.of({"a": 2, "b": 2, "c": 3})
    codes = AxisCodes(Blocks(mesh.axes, (("a", "b"), ("c",))))
    assert codes.axes == [(), ("a", "b"), ("c",), ("a", "b", "c")]
    assert codes.bits.tolist() == [0, 1, 2, 3]
    assert codes.names(3) == ("a", "b", "c")
    assert codes.slices.tolist() == [1, 4, 3, 12]
    assert np.array_equal(codes.moved, codes.moved.T)


def _attention(w, x):
    query, key = jnp.einsum("bsd,dhk->bshk", x, w), jnp.einsum("bsd,dhk->bshk", x, w)
    return jnp.einsum("bshk,bthk->bhst", query, key).sum()


@pytest.mark.parametrize(
    ("function", "shapes", "axes"),
    [
        (lambda w, x: jnp.tanh(x @ w).sum(), ((64, 64), (256, 64)), 9),
        (jax.grad(_attention), ((16, 8, 8), (64, 8, 16)), 6),
        (lambda w, x: (x.sum(0) * w).sum(), ((512,), (128, 512)), 12),
    ],
)
def test_a_step_on_many_axes_is_planned_and_a_note_says_what_was_left_out(function, shapes, axes):
    mesh = {f"a{place}": 2 for place in range(axes)}
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = spmdctx.plan(function, *arrays, parallel_mode="auto_parallel", device_num=2**axes, mesh=mesh, topology="tpu-v5e")
    assert dict(found.logical_mesh.axes) == mesh
    assert type(found.logical_mesh) is LogicalMesh
    assert any(f"The mesh has {axes} axes" in note for note in found.notes)


def _on_nine_axes(**options):
    mesh = {f"a{place}": 2 for place in range(9)}
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (256, 64))]
    own = {"parallel_mode": "auto_parallel", "device_num": 512, "mesh": mesh, "topology": "tpu-v5e", **options}
    return spmdctx.plan(lambda w, x: jnp.tanh(x @ w).sum(), *arrays, **own)


def test_that_no_plan_fits_is_not_said_to_be_proven_of_joined_axes():
    with pytest.raises(InfeasibleError, match=r"No plan was found on 512 devices.* only together: \w+·\w+") as error:
        _on_nine_axes(memory_bytes=1)
    assert "at least" not in str(error.value)


def test_a_bound_over_joined_axes_says_so_once_and_is_not_above_the_plan():
    certified = _on_nine_axes(search_mode="sharding_propagation").certify()
    (note,) = [note for note in certified.notes if "only together" in note]
    assert "lower bound" in note
    assert certified.gap >= 0

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
from tests.pace import paced
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


def _deep(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x.sum()


def _filtered(w, x):
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))).sum()


def _planned(function, shapes, axes, **options):
    """Plans on so many axes of size 2, in a few seconds of the processor's time; all splits on each axis alone would take hours."""
    mesh = {f"a{place}": 2 for place in range(axes)}
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    own = {"parallel_mode": "auto_parallel", "device_num": 2**axes, "mesh": mesh, "topology": "tpu-v5e", **options}
    found, turns = paced(lambda: spmdctx.plan(function, *arrays, **own))
    assert turns < 400
    assert dict(found.logical_mesh.axes) == mesh
    return found


@pytest.mark.parametrize("search_mode", ["dynamic_programming", "recursive_programming"])
@pytest.mark.parametrize(
    ("function", "shapes", "axes"),
    [
        (lambda w, x: jnp.tanh(x @ w).sum(), ((64, 64), (256, 64)), 9),
        (lambda w, x: jnp.tanh(x @ w).sum(), ((16, 8), (8, 16)), 12),
        (jax.grad(_attention), ((16, 8, 8), (64, 8, 16)), 4),
        (jax.grad(_attention), ((16, 8, 8), (64, 8, 16)), 6),
        (lambda w, x: (x.sum(0) * w).sum(), ((512,), (128, 512)), 12),
        (jax.grad(_deep), ((512, 512), (512, 512)), 8),
        (jax.grad(_filtered), ((3, 3, 16, 32), (64, 32, 32, 16)), 7),
        (lambda w, x: jnp.einsum("abcdef,abcghi->defghi", w, x).sum(), ((4,) * 6, (4,) * 6), 5),
    ],
)
def test_a_step_on_many_axes_is_planned_and_a_note_says_what_was_left_out(function, shapes, axes, search_mode):
    found = _planned(function, shapes, axes, search_mode=search_mode)
    assert type(found.logical_mesh) is LogicalMesh
    assert any(f"The mesh has {axes} axes" in note for note in found.notes)


def test_cuts_that_mem_coeff_decides_take_whole_blocks():
    own = {"search_mode": "recursive_programming", "mem_coeff": 0.05}
    found = _planned(lambda w, x: (x @ w).sum(), ((256, 128), (4096, 256)), 12, **own)
    (note,) = [note for note in found.notes if "12 axes" in note]
    used = {name for op in found.assignment.ops for names in op.axes for name in names}
    assert used
    for block in (part.split("·") for part in note.split(": ")[1].split(".")[0].split(", ")):
        assert used.issuperset(block) or used.isdisjoint(block)


def _pinned(rank):
    mesh = jax.sharding.AbstractMesh((2,) * 12, tuple(f"a{place}" for place in range(12)))
    spec = jax.sharding.PartitionSpec(*[f"a{2 * place}" for place in range(rank)])
    return lambda w, x: jnp.tanh(jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec)) @ w).sum()


def test_axes_between_those_of_a_pin_are_joined():
    found = _planned(_pinned(2), ((32, 16), (64, 32)), 12)
    assert any("only together" in note for note in found.notes)


@pytest.mark.parametrize("search_mode", ["dynamic_programming", "recursive_programming"])
def test_a_mesh_whose_many_axes_are_all_pinned_apart_is_planned_by_propagation(search_mode):
    found = _planned(_pinned(6), ((32, 16), (8, 8, 8, 8, 8, 32)), 12, search_mode=search_mode)
    (note,) = [note for note in found.notes if "too many axes" in note]
    assert search_mode in note
    assert found.gap is None
    certified = found.certify()
    assert certified.gap is None
    assert any("No lower bound" in note for note in certified.notes)


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

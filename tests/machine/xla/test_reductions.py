"""Which reduce_scatters a compiler makes, as seen in programs for v5e:2x4 and v5p:2x2x2 that each reduce one product of two matrices."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.reductions import are_scattered, is_scattered, scattered_by
from tests.road import ops, run, trace

SEEN = [
    # shape, dimension, slices, whether in bfloat16, whether in float32
    ((768, 3072), 0, 8, True, True),
    ((768, 3072), 1, 8, False, True),
    ((768, 3072), 1, 4, True, True),
    ((3072, 768), 1, 8, True, True),
    ((3072, 768), 1, 2, False, True),
    ((1024, 1024), 1, 8, False, True),
    ((1024, 1024), 1, 2, True, True),
    ((4096, 11008), 1, 8, True, True),
    ((4096, 11008), 1, 2, False, True),
    ((768, 16, 48), 0, 8, False, False),
    ((768, 16, 48), 0, 4, False, False),
    ((768, 16, 48), 0, 2, False, True),
    ((768, 16, 48), 1, 4, True, True),
    ((768, 16, 64), 0, 8, False, False),
    ((8, 48, 768), 2, 4, False, False),
]


@pytest.mark.parametrize(("shape", "dim", "slices", "in_bfloat16", "in_float32"), SEEN)
def test_a_scatter_needs_whole_words_along_the_lanes(shape, dim, slices, in_bfloat16, in_float32):
    mesh = LogicalMesh.of({"a": slices})
    natural, after = ((),) * len(shape), tuple(("a",) if place == dim else () for place in range(len(shape)))
    for num_bytes, expected in ((2, in_bfloat16), (4, in_float32)):
        kind = scattered_by(shape, num_bytes, ("a",), natural, after, mesh, PRESETS["tpu-v5e"])
        assert kind == ("reduce_scatter" if expected else "all_reduce")


def test_other_machines_scatter_any_block():
    mesh = LogicalMesh.of({"a": 8})
    assert scattered_by((1024, 1024), 2, ("a",), ((), ()), ((), ("a",)), mesh, PRESETS["h100"]) == "reduce_scatter"


@pytest.mark.parametrize(
    ("partial", "extra", "expected"),
    [
        (("a", "b"), ("a", "b"), True),
        (("a", "b"), ("b", "a"), False),
        (("b", "a"), ("b", "a"), True),
        (("a", "b"), ("b",), True),
        ((), ("b", "a"), True),
    ],
)
def test_slices_lie_in_the_order_of_the_sum(partial, extra, expected):
    mesh = LogicalMesh.of({"a": 2, "b": 4})
    kind = scattered_by((3072, 768), 2, partial, ((), ()), (extra, ()), mesh, PRESETS["tpu-v6e"])
    assert kind == ("reduce_scatter" if expected else "all_reduce")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("num_bytes", [2, 4])
def test_many_blocks_at_once_are_as_one_by_one(rank, num_bytes):
    blocks = np.array(list(itertools.product((1, 48, 96, 128, 192, 384), repeat=rank)), dtype=np.int64)
    one_by_one = [[is_scattered(tuple(block), dim, num_bytes) for dim in range(rank)] for block in blocks.tolist()]
    assert are_scattered(blocks, num_bytes).tolist() == one_by_one


@pytest.mark.parametrize("stored", [((), ("a", "b")), ((), ("a", "c"))], ids=["first of the sum", "last of the sum"])
def test_a_dimension_that_is_split_is_not_scattered_over_some_axes_of_the_sum(stored):
    """It is reduced over all of them, and sliced."""

    def function(x, w):
        return (x @ w) * 2

    arguments, mesh = (jnp.ones((16, 16)), jnp.ones((16, 16))), LogicalMesh.of({"a": 2, "b": 2, "c": 2})
    (dot,) = ops(trace(function, *arguments), "dot_general")
    found = run(function, *arguments, mesh=mesh, pins={dot: stored}, forced={dot.id: (("b", "c"), (), ("a",))})
    assert [(row.kind, row.axes, row.payload_bytes) for row in found.bill.collectives] == [("all_reduce", ("b", "c"), 16 * 8 * 4)]
    found.check()

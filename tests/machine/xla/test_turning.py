"""Gathers along inner dimensions that a GPU's compiler turns: which, what they cost, and that compiled programs hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdctx
from spmdctx.audit import peak_bytes
from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.machine.xla.collectives.turning import turned_bytes, turned_s, turned_table
from tests.audit.compile_only import need_gpu

MESH = LogicalMesh((("a", 2), ("b", 4)))


@pytest.mark.parametrize(
    ("shape", "source", "target", "expected"),
    [
        ((16, 8), (("a",), ()), ((), ()), 0),
        ((16, 8), ((), ("b",)), ((), ()), 16 * 8),
        ((16, 8), (("a",), ("b",)), ((), ()), 16 * 8),
        ((16, 8), (("a",), ("b",)), (("a",), ()), 8 * 8),
        # One row on each device: nothing lies before the dimension.
        ((2, 8), (("a",), ("b",)), (("a",), ()), 0),
        ((2, 4, 8), (("a",), ("b",), ()), ((), (), ()), 2 * 4 * 8),
        ((8, 8), ((), ("b",)), (("b",), ()), 0),
        ((16, 8), ((), ("a",)), ((), ("a",)), 0),
    ],
)
def test_what_is_gathered_along_an_inner_dimension_is_turned(shape, source, target, expected):
    assert turned_bytes(shape, 4, source, target, MESH) == 4 * expected


def test_axes_of_one_device_gather_nothing():
    assert turned_bytes((16, 8), 4, ((), ("one",)), ((), ()), LogicalMesh((("one", 1), ("b", 4)))) == 0


@pytest.mark.parametrize(("machine", "turns"), [("h100", True), ("tpu-v5p", False), ("cpu", False)])
def test_only_compilers_of_gpus_turn(machine, turns):
    one = topology(machine)
    seconds = turned_s((16, 8), 4, ((), ("b",)), ((), ()), MESH, one)
    assert seconds == (2 * 16 * 8 * 4 / one.memory_bytes_per_s if turns else 0.0)
    assert turned_table((16, 8), MESH, one).any() == turns


def test_the_table_has_all_pairs():
    one, shardings = topology("h100"), domain(MESH, (8, 8)).shardings
    table = turned_table((8, 8), MESH, one)
    found = [[turned_s((8, 8), 1, source, target, MESH, one) for target in shardings] for source in shardings]
    assert np.array_equal(table, found)
    assert table.shape == (len(shardings),) * 2


@pytest.mark.parametrize(("dim", "turns"), [(0, False), (1, True)])
def test_compiled_programs_hold_what_is_turned(dim, turns):
    """Four updates of float32[4096, 4096] on 8 devices; each gathered one takes 64 MiB until it is turned."""
    mesh = Mesh(np.array(need_gpu(8)), ("b",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(*[None] * dim, "b"))

    def update(weights, gradients):
        new = [jax.lax.with_sharding_constraint(one - 0.1 * other, split) for one, other in zip(weights, gradients, strict=True)]
        return [jax.lax.with_sharding_constraint(one, whole) for one in new]

    arrays = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    jitted = jax.jit(update, in_shardings=([whole] * 4, [split] * 4), out_shardings=[whole] * 4, donate_argnums=0)
    found = jitted.lower(arrays, arrays).compile().memory_analysis().temp_size_in_bytes
    assert (found > 3 * 2**26) == turns, found


@pytest.mark.parametrize("dim", [0, 1])
def test_plans_count_what_compiled_programs_hold(dim):
    """Each device updates its parts of four weights, and all return the whole ones."""
    mesh = Mesh(np.array(need_gpu(8)), ("b",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(*[None] * dim, "b"))

    def update(weights, gradients):
        return [jax.lax.with_sharding_constraint(one - 0.1 * other, split) for one, other in zip(weights, gradients, strict=True)]

    arrays = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    jitted = jax.jit(update, in_shardings=([whole] * 4, [split] * 4), out_shardings=[whole] * 4, donate_argnums=0)
    step = spmdctx.parallel(jitted, parallel_mode="auto_parallel", mesh=mesh)
    compiled = peak_bytes(step.lower(arrays, arrays).compile())
    assert step.plan(arrays, arrays).cost.memory_bytes == pytest.approx(compiled, rel=0.16)

"""Split convolutions with groups: XLA's partitioner gets them wrong, and spmdctx does not leave them to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.audit.collectives import parse_collectives
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.lowering.compile import jit_program
from spmdctx.trace.specs import make_mesh
from tests.audit.compile_only import need_gpu, need_tpu
from tests.road import bill_of, ops, run, spread, trace
from tests.rules.sweep import MESHES, Small, runs, traced, wrong

MESH = LogicalMesh.of({"data": 2, "model": 4})
POINTWISE = Small(lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=2), ((8, 8, 5), (8, 4, 1)))
DIMS = ("NHC", "HIO", "NHC")


def conv(groups):
    return lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=DIMS, feature_group_count=groups)


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def test_the_partitioner_splits_groups_of_one_position_wrongly():
    """When this fails, the partitioner is right: convolutions with groups need not run per block any more."""
    mesh = make_mesh(MESH, jax.devices())
    x, kernel = POINTWISE.values()
    split = NamedSharding(mesh, P(None, "data"))
    program = jax.jit(POINTWISE.function, in_shardings=(split, NamedSharding(mesh, P("data"))), out_shardings=split)
    assert np.abs(np.asarray(program(x, kernel)) - np.asarray(jax.jit(POINTWISE.function)(x, kernel))).max() > 0.1


def test_a_lowering_that_leaves_it_to_the_partitioner_is_found_out(monkeypatch):
    program, args = traced(POINTWISE)
    chosen = [one for one in runs(program, 100, MESHES[:1]) if one.axes == (("y",), ("x",), (), (), ())]
    assert len(chosen) == 1
    assert wrong([(program, args)], chosen) == []
    monkeypatch.setattr("spmdctx.lowering.rewrite.local_ops.is_grouped", lambda eqn: False)
    assert len(wrong([(program, args)], chosen)) == 1


@pytest.mark.parametrize(("groups", "features"), [(2, 8), (4, 4), (16, 1)])
def test_split_groups_cost_nothing_and_split_features_one_reduction(groups, features):
    x, kernel = normal(8, 6, 16), normal(1, features, 16, seed=1)
    split = (("data",), (), ("model",)) if groups >= 4 else (("model",), (), ("data",))
    run(conv(groups), x, kernel, pins={0: split}, mesh=MESH).check()
    if features == 8:
        (op,) = ops(trace(conv(groups), x, kernel), "conv_general_dilated")
        assert op.rule.sizes[:4] == (8, 2, 8, 8)
        made = run(conv(groups), x, kernel, pins={}, mesh=MESH, forced={op.id: ((), ("data",), ("model",), (), ())})
        made.check()
        assert sum(made.executed.values()) == 1


def with_gradients(x, kernel, cotangent):
    made, pull = jax.vjp(conv(2), x, kernel)
    return made, *pull(cotangent)


@pytest.mark.parametrize("devices", [need_tpu, need_gpu])
@pytest.mark.parametrize(
    "split", [(("data", "model"), (), (), (), ()), ((), ("data",), ("model",), (), ()), ((), ("data",), (), ("model",), ())], ids=str
)
def test_compilers_for_chips_reduce_once_and_gather_nothing(devices, split):
    shapes = ((8, 16, 64), (1, 32, 64), (8, 16, 64))
    program = trace(with_gradients, *(np.ones(shape, np.float32) for shape in shapes))
    assignment = spread(program, {}, MESH, forced={ops(program, "conv_general_dilated")[0].id: split})
    lowered = jit_program(program, assignment, MESH, devices()).jitted.lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    found = [(one.kind, one.axes) for one in parse_collectives(lowered.compile().as_text(), MESH)]
    assert found == [("all_reduce", ("data", "model") if split[0] else ("model",))]
    assert [(row.kind, row.axes) for row in bill_of(program, assignment, MESH).collectives] == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_s_gradient_is_reduced_over_the_batch_and_gathers_nothing(dtype):
    x, kernel = normal(8, 6, 16, dtype=dtype), normal(3, 4, 16, seed=1, dtype=dtype)

    def gradient(kernel, x):
        return jax.grad(lambda kernel: jnp.sum(jnp.tanh(conv(4)(x, kernel)).astype(jnp.float32) ** 2))(kernel)

    step = spmdctx.parallel(gradient, parallel_mode="semi_auto_parallel", device_num=8, batch_argnames="x")
    np.testing.assert_allclose(np.float32(step(kernel, x)), np.float32(gradient(kernel, x)), rtol=2e-2, atol=2e-2)
    plan = step.plan(kernel, x)
    assert {row.kind for row in plan.collectives} <= {"all_reduce"}
    assert step.audit(kernel, x).ok


@pytest.mark.parametrize("features", [4, 1])
def test_gradients_that_a_loop_adds_up_stay_unreduced_until_it_ends(features):
    groups = 16 // features
    x, kernel = normal(3, 8, 6, 16), normal(1, features, 16, seed=1)

    def gradient(kernel, x):
        def loss(kernel, rows):
            return jnp.sum(jnp.tanh(conv(groups)(rows, kernel)) ** 2)

        return lax.scan(lambda total, rows: (total + jax.grad(loss)(kernel, rows), None), jnp.zeros_like(kernel), x)[0]

    for split in ((("data", "model"), (), ()), (("data",), (), ("model",))):
        made = run(gradient, kernel, x, pins={0: ((), (), split[2]), 1: ((), *split)}, mesh=MESH)
        np.testing.assert_allclose(made.got[0], made.want[0], rtol=1e-4, atol=1e-4)
        reduced = {axes: count for (kind, axes, _), count in made.executed.items() if kind == "all_reduce"}
        assert reduced == {(axis,): 1 for axis in split[0]}

"""The shardings that a function of jax.jit was given are pins of the step's arguments and results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.audit import parse_collectives
from spmdctx.ir.mesh import LogicalMesh

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
PARAMS = {"down": jnp.ones((64, 16)) / 64, "up": jnp.ones((16, 64)) / 16}
BATCH = jnp.ones((32, 16))
OF_PARAMS = {"down": NamedSharding(MESH, P("model", None)), "up": NamedSharding(MESH, P(None, "model"))}


def train_step(params, batch):
    def loss_of(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda old, new: old - new, params, grads), loss


def jitted():
    return jax.jit(train_step, in_shardings=(OF_PARAMS, NamedSharding(MESH, P("data"))), out_shardings=(OF_PARAMS, None))


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("mesh", [MESH, None])
def test_arguments_and_results_are_split_as_jit_was_told(mode, mesh):
    step = spmdctx.parallel(jitted(), parallel_mode=mode, mesh=mesh)
    plan = step.plan(PARAMS, BATCH)
    assert [tensor.sharding for tensor in plan.inputs] == [(("model",), ()), ((), ("model",)), (("data",), ())]
    assert [tensor.sharding for tensor in plan.outputs[:2]] == [(("model",), ()), ((), ("model",))]
    assert {tensor.reason for tensor in plan.inputs} == {"in_shardings"}
    np.testing.assert_allclose(step(PARAMS, BATCH)[1], train_step(PARAMS, BATCH)[1], rtol=1e-5)


def test_propagation_moves_no_more_bytes_than_jit():
    def moved(step):
        text = step.lower(PARAMS, BATCH).compile().as_text()
        return sum(one.payload_bytes * one.repeats for one in parse_collectives(text, LogicalMesh.of(MESH.shape)))

    step = spmdctx.parallel(jitted(), parallel_mode="semi_auto_parallel", mesh=MESH)
    assert 0 < moved(step) <= moved(jitted())
    assert step.audit(PARAMS, BATCH).ok


def layers_step(layers, batch):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    loss, grads = jax.value_and_grad(lambda layers: jnp.mean(jax.lax.scan(layer, batch, layers)[0] ** 2))(layers)
    return jax.tree.map(lambda old, new: old - new, layers, grads), loss


def test_weights_and_a_batch_on_one_axis_are_gathered_layer_by_layer():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layers = {"down": jnp.ones((3, 64, 32)), "up": jnp.ones((3, 32, 64))}
    specs = {"down": P(None, "tensor", "fsdp"), "up": P(None, "fsdp", "tensor")}
    of_layers = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    whole = jax.jit(layers_step, in_shardings=(of_layers, NamedSharding(mesh, P("fsdp"))), out_shardings=(of_layers, None))
    step = spmdctx.parallel(whole, parallel_mode="semi_auto_parallel", mesh=mesh)
    plan = step.plan(layers, jnp.ones((8192, 32)))
    own = 32 * 64 * 4 // 2
    gathers = [(one.payload_bytes, one.repeats) for one in plan.collectives if (one.kind, one.axes) == ("all_gather", ("fsdp",))]
    assert gathers
    assert set(gathers) == {(own, 3)}
    sums = [(one.kind, one.payload_bytes, one.repeats) for one in plan.collectives if one.axes == ("fsdp",) and one.payload_bytes > 4]
    assert [one for one in sums if one[0] != "all_gather"] == [("reduce_scatter", own, 3)] * 2
    assert step.audit(layers, jnp.ones((8192, 32))).ok


def test_a_result_that_is_no_state_is_split_as_out_shardings_say():
    step = jax.jit(lambda x: x[:, :8] * 2, in_shardings=NamedSharding(MESH, P("data")), out_shardings=NamedSharding(MESH, P(None, "model")))
    plan = spmdctx.plan(step, BATCH, parallel_mode="semi_auto_parallel", mesh=MESH)
    assert (plan.inputs[0].sharding, plan.outputs[0].sharding) == ((("data",), ()), ((), ("model",)))


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_shardings_for_another_mesh_are_ignored_and_two_notes_say_so(mode):
    plan = spmdctx.plan(jitted(), PARAMS, BATCH, parallel_mode=mode, mesh={"data": 8})
    notes = [note for note in plan.notes if "ignored" in note]
    assert [note.partition(" ")[0] for note in notes] == ["in_shardings", "out_shardings"]
    assert "'params/down', 'params/up', 'batch'" in notes[0]

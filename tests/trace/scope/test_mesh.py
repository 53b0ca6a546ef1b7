"""get_mesh: the mesh that the code of a step sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import spmdctx
from spmdctx.errors import ContextError

X = np.arange(16.0, dtype=np.float32).reshape(8, 2)


def seen(**options):
    found = []

    def step(w, x):
        found.append(spmdctx.get_mesh())
        return x * w

    spmdctx.parallel(step, **options).plan(jnp.ones(2), X)
    return found[0]


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
def test_a_mode_with_one_axis_has_a_mesh_at_once(mode):
    mesh = seen(parallel_mode=mode)
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"data": 8}


def test_a_mesh_that_is_given_is_seen_in_every_mode():
    mesh = seen(parallel_mode="auto_parallel", search_mode="sharding_propagation", mesh={"data": 4, "model": 2})
    assert dict(mesh.shape) == {"data": 4, "model": 2}


def test_the_mesh_is_abstract_where_devices_are_missing():
    mesh = seen(parallel_mode="hybrid_parallel", device_num=16, batch_argnums=())
    assert isinstance(mesh, AbstractMesh)
    assert mesh.size == 16


def test_a_shard_map_of_the_user_runs_on_the_mesh():
    def step(w, x):
        mesh = spmdctx.get_mesh()
        total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
        return total(x * w)

    result = spmdctx.parallel(step, parallel_mode="hybrid_parallel")(jnp.ones(2), X)
    np.testing.assert_allclose(result, X.sum(0, keepdims=True))


def test_there_is_no_mesh_before_it_is_found():
    with pytest.raises(ContextError, match="In semi_auto_parallel the mesh is found after"):
        seen(parallel_mode="semi_auto_parallel")


def test_there_is_no_mesh_outside_of_a_step():
    with pytest.raises(ContextError, match="called outside of a step"):
        spmdctx.get_mesh()


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"])
def test_a_bare_spec_means_the_mesh_given_to_the_step(mode):
    def step(weight, x):
        return jax.lax.with_sharding_constraint(x @ weight, PartitionSpec("data", "model")).sum()

    weight, x = jnp.ones((8, 4)), jnp.arange(64.0).reshape(8, 8)
    search = {"search_mode": "sharding_propagation"} if mode == "auto_parallel" else {}
    parallel = spmdctx.parallel(step, mesh={"data": 4, "model": 2}, parallel_mode=mode, batch_argnums=1, **search)
    assert float(parallel(weight, x)) == float(step_without_constraint(weight, x))
    if mode == "auto_parallel":
        assert parallel.plan(weight, x).inputs[0].sharding == ((), ("model",))


def step_without_constraint(weight, x):
    return (x @ weight).sum()


def test_metadata_of_nnx_means_the_mesh_that_is_set():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 4, use_bias=False, kernel_metadata={"out_sharding": (None, "model")}, rngs=nnx.Rngs(0))
        plan = spmdctx.parallel(lambda model, x: model(x).sum(), parallel_mode="auto_parallel").plan(model, jnp.ones((8, 8)))
    assert plan.mesh == {"data": 4, "model": 2}
    assert plan.inputs[0].sharding == ((), ("model",))


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_a_layout_of_the_batch_over_all_devices_names_the_mesh(mode):
    layout = spmdctx.Layout((4, 2), ("rows", "columns"))

    def step(w, x):
        split = jax.NamedSharding(spmdctx.get_mesh(), jax.P("rows", "columns"))
        return jax.lax.with_sharding_constraint(jnp.tanh(x), split).sum() * w

    parallel = spmdctx.parallel(step, parallel_mode=mode, dataset_strategy=(layout("rows", "columns"),))
    arguments = np.float32(1), np.ones((8, 8), np.float32)
    assert parallel.plan(*arguments).mesh == {"rows": 4, "columns": 2}
    assert parallel.verify(*arguments).ok
    with pytest.raises(ContextError, match="a Layout over all devices"):
        parallel.with_options(dataset_strategy=((8, 1),)).plan(*arguments)

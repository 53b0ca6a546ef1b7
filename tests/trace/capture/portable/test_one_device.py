"""What a step says of one device has no effect on several: it plans, costs and computes as without it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.trace.capture.portable.step import portable

MAXTEXT = (
    *("diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_autoregressive"),
    *("tensor", "tensor_transpose", "expert", "autoregressive", "sequence"),
)
W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (32, 16))


def mesh(*names, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names, axis_types=(kind,) * len(names))


ONE = mesh("data", "model")
ABSTRACT = AbstractMesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def step(constrain, w, x):
    def loss(w):
        h = jnp.tanh(constrain(x @ w))
        return jnp.mean(constrain(h @ w.T) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def on(sharding):
    return lambda x: lax.with_sharding_constraint(x, sharding)


SPLIT = P("data", "model")


def mapped(body, spec=SPLIT, over=ONE, **options):
    return jax.shard_map(body, mesh=over, in_specs=(spec,), out_specs=spec, **options)


def plain(x):
    return x


def looped(x):
    def body(x):
        x, _ = lax.scan(lambda c, _: (lax.psum(c * 0.9, "model"), None), x, None, length=2)
        return lax.cond(lax.axis_index("data") == 0, lambda x: lax.psum(x, "model"), lambda x: x + 1, x)

    return mapped(body, check_vma=False)(x)


def collected(x):
    """Each collective over axes of one device, whole dimensions and new ones."""
    x = lax.psum(x, ("data", "model")) + lax.axis_index("model") + 0 * lax.pmin(lax.stop_gradient(x), "data")
    x = lax.all_gather(x, "data")[0] + lax.all_gather(x, ("data", "model"), tiled=True, axis=1)
    x = lax.ppermute(x, "model", [(0, 0)]) + lax.ppermute(x, "model", [])
    x = lax.psum_scatter(x[None], "data") + lax.psum_scatter(x, "model", tiled=True)
    return lax.all_to_all(lax.all_to_all(x, "data", 0, 1, tiled=True), "model", 1, 0, tiled=True) / 4


def looped_plainly(x):
    x, _ = lax.scan(lambda c, _: (c * 0.9, None), x, None, length=2)
    return lax.cond(jnp.int32(0) == 0, plain, lambda x: x + 1, x)


WRITTEN = {
    "whole": (on(NamedSharding(ONE, P())), plain),
    "split": (on(NamedSharding(ONE, P("data", "model"))), plain),
    "abstract mesh": (on(NamedSharding(ABSTRACT, P(("data", "model")))), plain),
    "free dims": (on(NamedSharding(ONE, P(P.UNCONSTRAINED, "model"))), plain),
    "single device": (on(SingleDeviceSharding(jax.devices()[0])), plain),
    "another device": (on(SingleDeviceSharding(jax.devices()[3])), plain),
    "device_put": (lambda x: jax.device_put(x, jax.devices()[0]), plain),
    "device_put to a mesh": (lambda x: jax.device_put(x, NamedSharding(ONE, P("data"))), plain),
    "jit": (jax.jit(lambda x: x * 2, in_shardings=NamedSharding(ONE, P("data")), out_shardings=NamedSharding(ONE, P())), lambda x: x * 2),
    "jit with an array": (jax.jit(lambda x: x + W[0], out_shardings=NamedSharding(ONE, P("model"))), lambda x: x + W[0]),
    "shard_map": (mapped(lambda x: x * 1.5), lambda x: x * 1.5),
    "shard_map of an abstract mesh": (mapped(jnp.tanh, over=ABSTRACT), jnp.tanh),
    "shard_map in one": (
        mapped(
            lambda x: jax.shard_map(
                lambda x: lax.psum(x, "model"), in_specs=P(None, "model"), out_specs=P(), axis_names={"model"}, check_vma=False
            )(x),
            P("data"),
            axis_names={"data"},
            check_vma=False,
        ),
        plain,
    ),
    "some axes": (mapped(lambda x: lax.psum(x, "data"), P("data"), axis_names={"data"}, check_vma=False), plain),
    "remat": (jax.checkpoint(lambda x: jnp.sin(on(NamedSharding(ONE, P()))(jnp.sin(x)))), jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))),
    "vmap": (jax.vmap(on(NamedSharding(ONE, P("data")))), plain),
}


PLAINLY = {"loops": (looped, looped_plainly), "collectives": (mapped(collected, check_vma=False), plain)}
CASES = [pytest.param(*pair, id=name) for name, pair in {**WRITTEN, **PLAINLY}.items() if name != "collectives"]
RUN = ("split", "another device", "device_put", "jit with an array", "shard_map", "shard_map in one", "some axes", "loops", "collectives")


def left_out(plan):
    return [note for note in plan.notes if note.startswith("What the step says of one device")]


def assert_close(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("constrain", "free"), CASES)
def test_the_plan_costs_what_it_costs_without(constrain, free):
    structs = [jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct((8192, 16), X.dtype)]
    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5p"}
    planned, wanted = (spmdctx.plan(partial(step, one), *structs, **options) for one in (constrain, free))
    assert planned.cost.total_s <= 1.02 * wanted.cost.total_s
    assert len(left_out(planned)) == 1
    assert not left_out(wanted)


@pytest.mark.parametrize("name", RUN)
def test_the_step_computes_what_it_computes_on_one_device(name):
    constrain, free = {**WRITTEN, **PLAINLY}[name]
    assert_close(spmdctx.parallel(partial(step, constrain), parallel_mode="auto_parallel")(W, X), jax.jit(partial(step, free))(W, X))


@pytest.mark.parametrize("constrain", [on(NamedSharding(ONE, P("data"))), mapped(plain)], ids=["constraint", "shard_map"])
@pytest.mark.parametrize("mode", ["semi_auto_parallel", "data_parallel"])
def test_other_modes_leave_it_out_too(constrain, mode):
    ready = spmdctx.parallel(partial(step, constrain), parallel_mode=mode)
    assert_close(ready(W, X), jax.jit(partial(step, plain))(W, X))
    assert ready.verify(W, X).ok
    assert len(left_out(ready.plan(W, X))) == 1


@pytest.mark.parametrize("constrain", [on(NamedSharding(ONE, P("data"))), mapped(plain)], ids=["constraint", "shard_map"])
def test_a_step_with_a_mesh_of_its_own_leaves_it_out(constrain):
    ready = spmdctx.parallel(partial(step, constrain), parallel_mode="semi_auto_parallel", mesh={"data": 8})
    assert_close(ready(W, X), jax.jit(partial(step, plain))(W, X))


@pytest.mark.parametrize("constrain", [on(NamedSharding(ONE, P("data"))), looped], ids=["constraint", "loops"])
def test_a_loss_of_each_device_leaves_it_out(constrain):
    def local(constrain, w, x):
        value, gradient = spmdctx.value_and_grad(lambda w, x: jnp.mean(constrain(jnp.tanh(constrain(x @ w))) ** 2))(w, x)
        return w - gradient, value

    ready = spmdctx.parallel(partial(local, constrain), parallel_mode="data_parallel", gradients_mean=True)
    free = looped_plainly if constrain is looped else plain
    assert_close(ready(W, X), jax.jit(partial(local, free))(W, X))
    assert len(left_out(ready.plan(W, X))) == 1
    assert ready.plan(W, X).gradients


def bare(x):
    return lax.with_sharding_constraint(x, P("data"))


def mapped_bare(x):
    return jax.shard_map(lambda x: x * 1.5, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("constrain", "free"), [(bare, plain), (mapped_bare, lambda x: x * 1.5)], ids=["constraint", "shard_map"])
def test_a_step_runs_on_eight_devices_where_a_mesh_of_one_is_set(kind, constrain, free):
    ready = spmdctx.parallel(partial(step, constrain), parallel_mode="auto_parallel", dataset_strategy="data_parallel")
    want = jax.jit(partial(step, free))(W, X)
    with jax.set_mesh(mesh("data", "model", kind=kind)):
        got = ready(W, X)
        again = ready(*got[:1], X)
        assert ready.audit(W, X).ok
    assert_close(got, want)
    assert_close(again, jax.jit(partial(step, free))(want[0], X))
    assert len(got[0].devices()) == 8


def test_on_one_device_the_step_is_as_it_was_written():
    ready = spmdctx.parallel(partial(step, looped), parallel_mode="stand_alone")
    assert_close(ready(W, X), jax.jit(partial(step, looped))(W, X))
    plan = ready.plan(W, X)
    assert not left_out(plan)
    assert "shard_map" in {op.primitive for op in plan.ops}


def test_a_mesh_of_eight_devices_keeps_its_say():
    whole = Mesh(np.array(jax.devices()), ("data",))
    plan = spmdctx.plan(partial(step, on(NamedSharding(whole, P(None, "data")))), W, X, parallel_mode="auto_parallel")
    assert not left_out(plan)
    assert "j=data" in {op.sharding for op in plan.ops if op.primitive == "sharding_constraint"}


def test_the_note_counts_and_names_the_first_line():
    (note,) = left_out(spmdctx.plan(partial(step, mapped(plain)), W, X, parallel_mode="auto_parallel", device_num=4))
    assert "no effect on 4: 4 shard_maps" in note
    assert "the first at test_one_device.py:" in note


EIGHT = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SPLITS = NamedSharding(EIGHT, SPLIT)
OF_EIGHT = {
    "constraint": on(SPLITS),
    "constraint to nothing": on(NamedSharding(EIGHT, P())),
    "map": partial(lax.map, on(NamedSharding(EIGHT, P("model")))),
    "scan": lambda x: lax.scan(lambda c, row: (on(NamedSharding(EIGHT, P("data")))(c + row), row), x[0], x)[1],
    "remat": jax.checkpoint(lambda x: jnp.sin(on(SPLITS)(jnp.sin(x)))),
    "jit": jax.jit(lambda x: x * 2, out_shardings=SPLITS),
    "device_put": lambda x: jax.device_put(jnp.sin(x), SPLITS),
}


@pytest.mark.parametrize("options", [{"parallel_mode": "stand_alone"}, {"parallel_mode": "auto_parallel", "device_num": 1}])
@pytest.mark.parametrize("constrain", OF_EIGHT.values(), ids=OF_EIGHT)
def test_what_a_step_says_of_several_devices_has_no_effect_on_one(constrain, options):
    planned = spmdctx.parallel(partial(step, constrain), **options)
    results = planned(W, X)
    assert {len(made.devices()) for made in results} == {1}
    assert_close(results, jax.jit(partial(step, constrain))(W, X))
    assert sum(note.startswith("What the step says of several devices has no effect on 1") for note in planned.plan(W, X).notes) == 1


def test_a_move_to_the_memory_of_the_host_stays_one():
    def offloaded(x):
        there = jax.device_put(x, NamedSharding(ONE, P(), memory_kind="pinned_host"))
        return jax.device_put(there, NamedSharding(ONE, P(), memory_kind="device"))

    program = jax.make_jaxpr(lambda x: offloaded(x * 2) + 1)(X)
    moved, left_out = portable(program, 8)
    assert [eqn.params["devices"][0] for eqn in moved.eqns if eqn.primitive.name == "device_put"] == list(jax.memory.Space)[1::-1]
    assert left_out.counts["placement"] == 2


def test_a_step_that_says_nothing_of_one_device_stays_the_same_object():
    program = jax.make_jaxpr(jax.grad(lambda w: step(plain, w, X)[1]))(W)
    assert portable(program, 8)[0] is program


def test_a_body_with_an_unknown_collective_is_refused_by_name():
    def ragged(x):
        sizes = jnp.full((1,), len(x))
        return lax.ragged_all_to_all(x, x * 0, sizes * 0, sizes, sizes * 0, sizes, axis_name="data")

    with pytest.raises(spmdctx.UnsupportedError, match="another mesh than the step"):
        spmdctx.plan(lambda x: mapped(ragged, P(), check_vma=False)(x) * 2, X, parallel_mode="data_parallel")


class Logical(nn.Module):
    """A model whose axes are named as flax's logical axes are, and as those of a mesh."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))(x)
        x = nn.with_logical_constraint(x, ("batch", "mlp"))
        return nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None)))(x)


RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))


def logical_step(variables, x):
    value, gradients = jax.value_and_grad(lambda variables: jnp.mean(Logical().apply(variables, x) ** 2))(variables)
    return jax.tree.map(lambda a, b: a - b, variables, gradients), value


def test_logical_axes_of_a_mesh_of_one_device_are_left_out():
    variables = Logical().init(jax.random.key(0), X)
    want = jax.jit(logical_step)(variables, X)
    ready = spmdctx.parallel(logical_step, parallel_mode="auto_parallel", mesh={"data": 2, "model": 4})
    with jax.set_mesh(ONE), nn.logical_axis_rules(RULES):
        assert_close(ready(variables, X), want)
        (note,) = left_out(ready.plan(variables, X))
    assert "2 partitioned arguments" in note


def test_partitioned_variables_of_nnx_are_left_out():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata={"out_sharding": (None, "model")})
            self.down = nnx.Linear(32, 16, rngs=rngs, kernel_metadata={"out_sharding": ("model", None)})

    @spmdctx.parallel(parallel_mode="auto_parallel")
    def nnx_step(model, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model.down(jax.nn.relu(model.up(x))) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model, nnx.Param), gradients))
        return value

    with jax.set_mesh(ONE):
        model = Model(nnx.Rngs(0))
        first, second = nnx_step(model, X), nnx_step(model, X)
        (note,) = left_out(nnx_step.plan(model, X))
    assert second < first
    assert "2 partitioned arguments" in note


def decoder(constrain, over):
    """MaxText's pattern: layers scanned and checkpointed, constraints on a mesh of twelve axes, one of its kernels in a shard_map."""
    kernel = (
        jax.shard_map(jnp.tanh, mesh=over, in_specs=P("data", None, "tensor"), out_specs=P("data", None, "tensor"))
        if constrain
        else jnp.tanh
    )
    said = on(NamedSharding(over, P(("data", "fsdp"), "context", "tensor"))) if constrain else plain

    def layer(x, w):
        up, down = w
        x = said(x + said(kernel(said(x @ up))) @ down)
        return x, None

    def loss(w, x):
        x, _ = lax.scan(jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable), said(x), w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return lambda w, x: jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w, x))


def test_a_step_written_as_those_of_maxtext_costs_what_it_costs_without_its_mesh():
    structs = (jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((8, 4096, 1024), jnp.bfloat16))
    batch = jax.ShapeDtypeStruct((16, 512, 1024), jnp.bfloat16)
    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5p"}
    planned, wanted = (spmdctx.plan(decoder(says, mesh(*MAXTEXT)), structs, batch, **options) for says in (True, False))
    assert planned.cost.total_s <= 1.01 * wanted.cost.total_s
    assert planned.cost.memory_bytes <= 1.01 * wanted.cost.memory_bytes


def test_a_step_that_cannot_be_traced_with_the_mesh_that_is_set_says_so():
    other = mesh("replica")
    ready = spmdctx.parallel(
        lambda w, x: jax.shard_map(lambda x: x * 2, mesh=other, in_specs=P(), out_specs=P())(x) @ w, parallel_mode="auto_parallel"
    )
    with jax.set_mesh(mesh("data")):
        notes = [note for note in ready.plan(W, X).notes if "without the mesh that is set (axes data)" in note]
    assert len(notes) == 1

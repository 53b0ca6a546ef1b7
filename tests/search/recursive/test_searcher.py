"""recursive_programming end to end: the guide, meshes, pins, budgets, stages, and plans as cheap as those of other searches."""

import logging
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.search.recursive.searcher import RecursiveOptions

ADAMW = optax.adamw(1e-3)
SIZES = (512, 2048, 512)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def plan(fn, *args, devices=8, mode="recursive_programming", **options):
    context = {"parallel_mode": "auto_parallel", "search_mode": mode, "device_num": devices, "topology": "tpu-v5p"}
    return spmdctx.plan(fn, *args, **{**context, **options})


def multiply(x, w):
    return x @ w


def guide(mem_coeff, **options):
    return plan(multiply, shape(128, 64), shape(64, 64), devices=2, mem_coeff=mem_coeff, **options)


def train(state, batch):
    """Two layers and AdamW."""
    params, moments = state

    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = ADAMW.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def arguments(rows=4096):
    width, hidden, out = SIZES
    params = {"up": shape(width, hidden), "down": shape(hidden, out)}
    state = (params, jax.eval_shape(ADAMW.init, params))
    return state, {"x": shape(rows, width), "y": shape(rows, out)}


@pytest.mark.parametrize("options", [{}, {"batch_argnums": 0}], ids=["guessed batch", "x is the batch"])
def test_the_example_of_the_guide_is_not_cut_at_a_small_coefficient(options):
    found = guide(0.01, **options)
    assert [tensor.sharding for tensor in (*found.inputs, *found.outputs)] == [((), ())] * 3
    assert found.assignment.ops[0].axes == ((), (), ())


@pytest.mark.parametrize("options", [{}, {"batch_argnums": 0}], ids=["guessed batch", "x is the batch"])
def test_the_example_of_the_guide_is_cut_along_the_rows_at_a_larger_one(options):
    found = guide(0.013, **options)
    assert [tensor.sharding for tensor in (*found.inputs, *found.outputs)] == [(("data",), ()), ((), ()), (("data",), ())]


def test_the_log_of_the_guide(caplog):
    caplog.set_level(logging.INFO, logger="spmdctx")
    guide(0.01)
    lines = [record.getMessage() for record in caplog.records if record.name == "spmdctx"]
    assert re.fullmatch(r"Round 1: dot_general '.*' \(test_searcher.py:\d+ \(multiply\)\), i=128, k=64, j=64", lines[0])
    assert lines[1:] == [
        "If the I-axis is cut, the op-cost is 20.48, the rest-cost is 0, and the total cost is 20.48",
        "If the J-axis is cut, the op-cost is 4096, the rest-cost is 0, and the total cost is 4096",
        "If the K-axis is cut, the op-cost is 4096, the rest-cost is 0, and the total cost is 4096",
        "If no axis is cut, the op-cost is 16.7772, the rest-cost is 0, and the total cost is 16.7772",
        "Choose NOT to cut",
    ]


def test_nothing_is_logged_unless_it_is_asked_for(caplog):
    caplog.set_level(logging.WARNING, logger="spmdctx")
    guide(0.01)
    assert not caplog.records


def test_mem_coeff_has_an_effect_and_no_warning():
    small, large = (plan(train, *arguments(), mem_coeff=coefficient) for coefficient in (0.2, 1e3))
    assert not small.notes
    paths = [tensor.path for tensor in small.inputs]
    rows = paths.index(next(path for path in paths if path.endswith("x")))
    assert small.inputs[rows].sharding[0]
    assert not large.inputs[rows].sharding[0]


@pytest.mark.parametrize(("devices", "rows"), [(8, 4096), (8, 16), (6, 96), (7, 96), (64, 4096), (3, 64)])
def test_it_is_no_dearer_than_propagation_and_data_parallelism(devices, rows):
    found = plan(train, *arguments(rows), devices=devices)
    assert found.logical_mesh.num_devices == devices
    assert len(found.logical_mesh.axes) <= 3
    propagated = plan(train, *arguments(rows), devices=devices, mode="sharding_propagation")
    assert found.cost.total_s <= propagated.cost.total_s * (1 + 1e-6)
    if rows % devices == 0:
        replicated = spmdctx.plan(train, *arguments(rows), parallel_mode="data_parallel", device_num=devices, topology="tpu-v5p")
        assert found.cost.total_s <= replicated.cost.total_s * (1 + 1e-6)


@pytest.mark.parametrize(("devices", "rows"), [(8, 16), (64, 4096)])
def test_it_is_near_the_exact_search(devices, rows):
    found = plan(train, *arguments(rows), devices=devices)
    exact = plan(train, *arguments(rows), devices=devices, mode="dynamic_programming")
    assert found.cost.total_s <= exact.cost.total_s * 1.1


def deep(state, batch):
    """Layers enough to make a large program."""
    params, moments = state

    def loss(params):
        hidden = batch["x"]
        for layer in params:
            hidden = hidden + jnp.tanh(hidden @ layer["up"]) @ layer["down"]
        return jnp.mean((hidden - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = ADAMW.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


@pytest.mark.parametrize(("devices", "mesh"), [(8, (2, 4)), (64, (8, 8)), (7, (7,))])
def test_a_large_program_is_searched_on_two_axes_of_about_one_size(devices, mesh):
    rows = 7 * 64
    params = [{"up": shape(512, 2048), "down": shape(2048, 512)} for _ in range(16)]
    given = (params, jax.eval_shape(ADAMW.init, params)), {"x": shape(rows, 512), "y": shape(rows, 512)}
    found = plan(deep, *given, devices=devices)
    assert len(found.ops) > RecursiveOptions().small_program
    assert found.logical_mesh.shape == mesh
    exact = plan(deep, *given, devices=devices, mode="dynamic_programming")
    assert found.cost.total_s <= exact.cost.total_s * 1.1


def test_optimizer_state_is_split_where_that_is_cheaper():
    found = plan(train, *arguments())
    moments = [tensor for tensor in found.inputs if tensor.role.value == "optimizer" and len(tensor.shape) == 2]
    assert moments
    assert all(any(tensor.sharding) for tensor in moments)


def test_a_mesh_of_the_user_is_kept():
    found = plan(train, *arguments(), devices=8, mesh={"a": 4, "b": 2})
    assert found.mesh == {"a": 4, "b": 2}


def test_pins_are_kept():
    def pinned(x, w):
        return spmdctx.shard(multiply, ((1, 4), (4, 1)))(x, w)

    found = plan(pinned, shape(128, 64), shape(64, 64), devices=8, batch_argnums=0)
    mesh = found.logical_mesh
    assert [[mesh.num_slices(names) for names in tensor.sharding] for tensor in found.inputs] == [[1, 4], [4, 1]]


def test_a_constraint_of_the_user_is_kept():
    mesh = jax.make_mesh((4, 2), ("p", "q"), axis_types=(AxisType.Auto, AxisType.Auto))

    def constrained(x, w):
        return jax.lax.with_sharding_constraint(x @ w, jax.NamedSharding(mesh, PartitionSpec(None, "q")))

    found = plan(constrained, shape(128, 64), shape(64, 64), batch_argnums=0)
    assert found.mesh == {"p": 4, "q": 2}
    assert found.outputs[0].sharding == ((), ("q",))


def test_it_is_deterministic():
    first, second = plan(train, *arguments()), plan(train, *arguments())
    assert first == second
    assert str(first.assignment) == str(second.assignment)


def test_the_results_are_those_of_one_device():
    key = jax.random.key(0)
    params = {"up": jax.random.normal(key, (64, 128)) / 8, "down": jax.random.normal(key, (128, 64)) / 8}
    batch = {"x": jax.random.normal(key, (32, 64)), "y": jnp.ones((32, 64))}
    state = (params, ADAMW.init(params))
    step = spmdctx.parallel(train, parallel_mode="auto_parallel", search_mode="recursive_programming")
    got, wanted = step(state, batch), jax.jit(train)(state, batch)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jnp.allclose(left, right, atol=1e-5)


def test_a_generous_budget_changes_nothing():
    assert plan(train, *arguments(), memory_bytes=2**40).assignment == plan(train, *arguments()).assignment


@pytest.mark.parametrize("share", [0.95, 0.92])
def test_a_tight_budget_is_met_and_said(share):
    free = plan(train, *arguments(512), devices=4)
    budget = int(free.safe_memory_bytes * share)
    found = plan(train, *arguments(512), devices=4, memory_bytes=budget)
    assert found.safe_memory_bytes <= budget
    assert found.cost.total_s >= free.cost.total_s * (1 - 1e-6)
    assert any(f"memory_bytes={budget}" in note for note in found.notes)


def test_a_budget_that_cannot_be_met_names_the_peak():
    with pytest.raises(
        InfeasibleError, match=r"(?s)memory_bytes=1000: the smallest peak is \d+ bytes.*values alive there.*memory_bytes >= "
    ):
        plan(train, *arguments(), memory_bytes=1000)


def test_the_budget_that_is_named_is_met():
    def two(weights, x):
        return jnp.sum(jnp.tanh(x @ weights["a"]) @ weights["b"])

    step = two, {"a": shape(64, 96), "b": shape(96, 32)}, shape(24, 64)
    with pytest.raises(InfeasibleError, match=r"(?m)where: +\w+ \(test_searcher.py") as caught:
        plan(*step, topology="cpu", memory_bytes=1)
    named = int(re.search(r"memory_bytes >= (\d+)", str(caught.value)).group(1))
    assert plan(*step, topology="cpu", memory_bytes=named).safe_memory_bytes <= named

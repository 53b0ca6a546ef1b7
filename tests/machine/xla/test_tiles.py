"""What products with batch dimensions read and make is counted in tiles on TPU, as its compiler lays it out."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.xla.memory.tiles import filled_up, in_images, in_lanes, in_rows, in_tiles, rows_filled_up
from tests.road import trace

VECTORS, WEIGHTS = jax.ShapeDtypeStruct((64, 7, 16), "float32"), jax.ShapeDtypeStruct((16, 16), "float32")


def pairs(weights, vectors):
    rows = jnp.tanh(vectors @ weights)
    return jnp.tanh(jnp.einsum("bik,bjk->bij", rows, rows)).reshape(64, -1)


@pytest.mark.parametrize(
    ("shape", "minor", "times"),
    [
        ((64, 7, 16), (1, 2), 8 * 128 / 112),
        ((64, 7, 7), (1, 2), 8 * 128 / 49),
        ((4, 512, 8, 64), (1, 3), 1.0),
        ((8, 197, 197), (1, 2), 1.0),
    ],
)
def test_the_minor_dimensions_fill_tiles(shape, minor, times):
    assert filled_up(shape, minor) == pytest.approx(times)


def test_products_with_a_batch_and_what_is_around_them_are_in_tiles():
    graph = trace(pairs, WEIGHTS, VECTORS).graph
    shapes = sorted(graph.values[value].shape for value, minor in in_tiles(graph).items() if minor == (1, 2))
    assert shapes == [(64, 7, 7), (64, 7, 7), (64, 7, 16), (64, 7, 16)]


@pytest.mark.parametrize(("topology", "is_larger"), [("tpu-v5e", True), ("h100", False)])
def test_the_peak_counts_tiles_on_tpu(topology, is_larger):
    def step(weights, vectors):
        return jnp.sum(pairs(weights, vectors) ** 2)

    large = jax.ShapeDtypeStruct((2**20, 7, 16), "float32")
    plan = spmdctx.plan(step, WEIGHTS, large, parallel_mode="data_parallel", device_num=8, topology=topology)
    assert (plan.cost.memory_bytes > 2**17 * 8 * 128 * 2) == is_larger


@pytest.mark.parametrize(("batch", "features", "times"), [(48, 64, 2.0), (256, 64, 1.0), (16, 192, 4 / 3)])
def test_batch_and_features_of_images_fill_tiles(batch, features, times):
    def convolved(kernel, images):
        dims = ("NHWC", "HWIO", "NHWC")
        return jnp.tanh(jax.lax.conv_general_dilated(jnp.tanh(images), kernel, (1, 1), "SAME", dimension_numbers=dims))

    images = jax.ShapeDtypeStruct((batch, 8, 8, features), "float32")
    graph = trace(convolved, jax.ShapeDtypeStruct((3, 3, features, features), "float32"), images).graph
    made = {graph.values[value].shape: minor for value, minor in in_images(graph).items()}
    assert made == {images.shape: (0, 3)}
    assert filled_up(images.shape, (0, 3), 1.0) == pytest.approx(times)


@pytest.mark.parametrize(("topology", "features", "counted"), [("tpu-v5p", 16, 8), ("tpu-v5p", 128, 1), ("h100", 16, 1)])
def test_rows_are_scattered_into_a_table_that_is_laid_out_by_rows(topology, features, counted):
    def step(table, rows):
        return table - 0.1 * jax.grad(lambda table: jnp.sum(table[rows] ** 2))(table)

    table = jax.ShapeDtypeStruct((2**20, features), "float32")
    rows = jax.ShapeDtypeStruct((64,), "int32")
    plan = spmdctx.plan(step, table, rows, parallel_mode="data_parallel", device_num=8, topology=topology, donate_argnums=0)
    table_bytes = 2**20 * features * 4
    most = plan.cost.memory_bytes - table_bytes
    assert (counted > 1) == (most > 4 * table_bytes)
    assert most < (counted + 2) * table_bytes


@pytest.mark.parametrize(
    ("shape", "minor", "times"),
    [((1024, 4), (1,), 32.0), ((1024, 1), (1,), 1.0), ((1024, 64), (1,), 1.0), ((1024, 1, 16), (1, 2), 8.0), ((1024, 4, 32), (1, 2), 1.0)],
)
def test_narrow_rows_fill_lanes(shape, minor, times):
    assert rows_filled_up(shape, minor) == times


def edges(weights, table, senders, receivers):
    scores = jnp.exp(jnp.tanh(table @ weights)[senders])
    return jax.ops.segment_sum(scores, receivers, table.shape[0])


def test_rows_that_are_looked_up_and_what_becomes_of_them_are_in_lanes():
    weights, table = jax.ShapeDtypeStruct((16, 4), "float32"), jax.ShapeDtypeStruct((512, 16), "float32")
    ids = jax.ShapeDtypeStruct((4096,), "int32")
    graph = trace(edges, weights, table, ids, ids).graph
    shapes = {graph.values[value].shape for value, minor in in_rows(graph).items() if minor == (1,)}
    assert shapes == {(4096, 4), (512, 4)}
    assert sum(graph.values[value].shape == (4096, 4) for value in in_rows(graph)) == 2


def test_what_an_op_scatters_and_its_result_count_once():
    def messages(weights, table, senders, receivers):
        def loss(weights):
            rows = jnp.tanh((table @ weights)[senders] @ weights)
            return jnp.sum(jax.ops.segment_sum(rows, receivers, table.shape[0]) ** 2)

        return jax.grad(loss)(weights)

    weights, table, ids = (jax.ShapeDtypeStruct(*own) for own in (((64, 64), "float32"), ((128, 64), "float32"), ((1024,), "int32")))
    graph = trace(messages, weights, table, ids, ids).graph
    scattering = [op.id for op, _ in in_lanes(graph, "tpu-v5e")]
    assert len(scattering) == len(set(scattering)) == sum(op.primitive == "scatter-add" for op in graph.ops)


@pytest.mark.parametrize(("topology", "heads", "least"), [("tpu-v5e", 4, 32.0), ("tpu-v5e", 128, 1.0), ("h100", 4, 1.0)])
def test_the_peak_counts_narrow_rows_in_lanes_on_tpu(topology, heads, least):
    ids = jax.ShapeDtypeStruct((2**20,), "int32")
    table = jax.ShapeDtypeStruct((512, 16), "float32")
    plan = spmdctx.plan(
        edges, jax.ShapeDtypeStruct((16, heads), "float32"), table, ids, ids, parallel_mode="stand_alone", topology=topology, device_num=1
    )
    taken = 2**20 * heads * 4
    assert least * taken <= plan.cost.memory_bytes < 3 * least * taken


def test_rows_of_two_dimensions_fill_tiles_while_they_are_looked_up():
    ids = jax.ShapeDtypeStruct((2**20,), "int32")
    table = jax.ShapeDtypeStruct((512, 4, 32), "float32")
    plans = [
        spmdctx.plan(lambda table, ids: jnp.tanh(table[ids]).sum(), table, ids, parallel_mode="stand_alone", device_num=1, topology=name)
        for name in ("tpu-v5e", "h100")
    ]
    assert plans[0].cost.memory_bytes > 4 * 2**29 > plans[1].cost.memory_bytes

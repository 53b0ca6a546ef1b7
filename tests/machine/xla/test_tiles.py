"""What products with batch dimensions read and make is counted in tiles on TPU, as its compiler lays it out."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.xla.memory.tiles import filled_up, in_images, in_tiles
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

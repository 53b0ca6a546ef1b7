"""Images of convolutions have more of the chip's memory on TPU v5e and v6e than other values, and arguments are copied for them."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.presets import topology
from spmdctx.machine.xla.memory.images_on_chip import images_on_chip
from spmdctx.machine.xla.memory.on_chip import OnChip
from spmdctx.machine.xla.memory.tiles import filled_up, in_images, laid_out
from tests.audit.compile_only import need_tpu
from tests.road import trace

MIB = 2**20
DIMS = ("NHWC", "HWIO", "NHWC")


def convolved(images, kernel):
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=DIMS)


def step(kernels, images):
    def loss(kernels):
        x = images.astype(jnp.bfloat16)
        for kernel in kernels:
            x = jax.nn.relu(convolved(x, kernel.astype(x.dtype)))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return jax.grad(loss)(kernels)


def arguments(batch, side, features, depth=3):
    kernels = [jax.ShapeDtypeStruct((3, 3, 3 if not layer else features, features), "float32") for layer in range(depth)]
    return kernels, jax.ShapeDtypeStruct((batch, side, side, 3), "float32")


def peaks(device, *shapes):
    plan = spmdctx.plan(step, *shapes, parallel_mode="data_parallel", device_num=8, topology=device)
    return plan.cost.memory_bytes


@pytest.mark.parametrize(("device", "has_more"), [("tpu-v5e", True), ("tpu-v6e", True), ("tpu-v5p", False), ("h100", False)])
def test_images_have_more_of_the_chip_where_that_was_seen(device, has_more):
    others = OnChip.of(topology(device).compiler.scratch_bytes, device)
    graph = trace(step, *arguments(8, 16, 128)).graph
    found = images_on_chip(graph, device, others)
    assert (found != others) == has_more
    assert found.total_bytes >= others.total_bytes
    plain = trace(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((64, 64), "float32")).graph
    assert images_on_chip(plain, device, others) == others


def test_short_lived_values_have_most_of_the_chip_on_v5e_alone():
    parts = {device: OnChip.of(96 * MIB, device) for device in ("tpu-v5e", "tpu-v5e-measured", "tpu-v6e", "tpu-v5p")}
    assert parts["tpu-v5e"] == parts["tpu-v5e-measured"] == (80 * MIB, 32 * MIB)
    assert parts["tpu-v6e"] == parts["tpu-v5p"] == (32 * MIB, 96 * MIB // 9)


@pytest.mark.parametrize("hidden", [2048, 3072])
def test_a_value_that_v5e_holds_on_the_chip_takes_no_memory_when_compiled(hidden):
    def between(x, into, out):
        return jnp.tanh(x @ into) @ out

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2048, 256), (256, hidden), (hidden, 256))]
    run = spmdctx.parallel(between, devices=need_tpu("v5e:2x4")[:1], parallel_mode="stand_alone")
    compiled, plan = run.lower(*shapes).compile().memory_analysis(), run.plan(*shapes)
    assert 4 * 2048 * hidden > 12 * MIB
    assert compiled.temp_size_in_bytes < MIB
    assert plan.cost.memory_bytes - compiled.argument_size_in_bytes - compiled.output_size_in_bytes < MIB


def test_a_chip_that_holds_more_lowers_the_peak_by_what_it_holds():
    shapes = arguments(256, 64, 128)  # an image takes 32 MiB a device
    assert 0 < peaks("tpu-v5p", *shapes) - peaks("tpu-v5e", *shapes) <= 80 * MIB


def test_images_larger_than_the_chip_stay_in_memory():
    shapes = arguments(2048, 64, 128)
    assert abs(peaks("tpu-v5p", *shapes) - peaks("tpu-v5e", *shapes)) < 40 * MIB


def test_peaks_are_never_below_the_arguments():
    shapes = arguments(8, 16, 128)
    plan = spmdctx.plan(step, *shapes, parallel_mode="data_parallel", device_num=8, topology="tpu-v5e")
    assert plan.cost.memory_bytes >= sum(leaf.local_bytes(plan.logical_mesh) for leaf in plan.inputs)


def test_arguments_are_copied_for_the_convolutions_that_read_them():
    program = trace(step, *arguments(128, 64, 64))
    copied = [program.graph.ops[index] for index in laid_out(program.graph)]
    assert [op.primitive for op in copied] == ["conv_general_dilated"] * 2
    assert len({op.operands[0] for op in copied}) == 1
    assert filled_up((16, 192, 192, 3), (0, 3), 1.0) * 16 * 192 * 192 * 3 * 2 == 36 * MIB


def test_what_is_repeated_reshaped_or_summed_keeps_the_layout_of_images():
    def grown(kernel, images):
        x = jnp.repeat(jnp.repeat(convolved(images, kernel), 2, 1), 2, 2)
        return jnp.sum(convolved(x, kernel))

    images = jax.ShapeDtypeStruct((16, 8, 8, 48), "float32")
    graph = trace(jax.grad(grown), jax.ShapeDtypeStruct((3, 3, 48, 48), "float32"), images).graph
    found = {graph.values[value].shape: minor for value, minor in in_images(graph).items()}
    assert found[(16, 16, 8, 2, 48)] == (0, 4)
    assert found[(16, 8, 2, 8, 48)] == (0, 4)

"""Seconds of one op on one device: the matrix unit, the vector unit and the memory."""

import dataclasses

import pytest
from jax.lax import ConvDimensionNumbers

from spmdctx.cost.roofline import compute_time_s
from spmdctx.ir.graph import Work
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.rules import rule_for
from spmdctx.rules.builder import identity
from spmdctx.rules.flops import op_flops
from tests.search.graphs import GraphMaker

MESH = LogicalMesh.of({"data": 4, "model": 2})
V5E = PRESETS["tpu-v5e"]
FAST = dataclasses.replace(V5E, memory_bytes_per_s=1e18)
"""The same with a memory that is never waited for."""

CHANNELS_LAST = ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
PRODUCT = {"dimension_numbers": (((1,), (0,)), ((), ()))}


def product(rows, inner, columns, dtype="bfloat16"):
    """A matrix product, and its factors by what they are."""
    shapes = (rows, inner), (inner, columns)
    make = GraphMaker()
    rule = rule_for("dot_general", shapes, ((rows, columns),), PRODUCT)
    make.op("dot_general", rule, *(make.input(*shape, dtype=dtype) for shape in shapes), shape=(rows, columns), dtype=dtype)
    graph = make.graph()
    op = graph.ops[0]._replace(flops=op_flops("dot_general", rule, shapes, ((rows, columns),)))
    return graph, op, {"i": rule.operands[0][0][0], "k": rule.operands[0][1][0], "j": rule.operands[1][1][0]}


def time_s(made, machine=FAST, **axes):
    graph, op, factors = made
    own = [()] * 3
    for name, names in axes.items():
        own[factors[name]] = names
    return compute_time_s(graph, op, tuple(own), MESH, machine)


def unary(primitive, fused=0, flops=1024 * 1024):
    make = GraphMaker()
    make.op(primitive, identity((1024, 1024)), make.input(1024, 1024), shape=(1024, 1024))
    graph = make.graph()
    return graph, graph.ops[0]._replace(flops=flops, fused=fused)


def test_a_large_product_runs_at_the_peak_and_splits_evenly():
    made = product(4096, 4096, 4096)
    assert time_s(made) == pytest.approx(2 * 4096**3 / V5E.peak_flops_per_s)
    assert time_s(made, i=("data",), j=("model",)) == pytest.approx(time_s(made) / 8)


def test_a_narrow_slice_is_padded_to_the_matrix_unit():
    # 128 columns over 8 devices leave 16 of 128 lanes.
    made = product(2**18, 4096, 128)
    assert time_s(made, j=("data", "model")) == pytest.approx(time_s(made))
    assert time_s(made, i=("data", "model")) == pytest.approx(time_s(made) / 8)


def test_a_product_of_small_operands_waits_for_the_memory():
    made = product(8, 4096, 4096)
    assert time_s(made, V5E) == pytest.approx(2 * (2 * 8 * 4096 + 4096**2) / V5E.memory_bytes_per_s)


def test_the_longer_free_dimension_streams_and_is_not_padded():
    assert time_s(product(136, 4096, 4096)) == pytest.approx(time_s(product(128, 4096, 4096)) * 256 / 128, rel=1e-6)
    assert time_s(product(2**16 + 8, 4096, 4096)) == pytest.approx(time_s(product(2**16, 4096, 4096)) * (1 + 2**-13))


@pytest.mark.parametrize(("preset", "ratio"), [("tpu-v5e", 1.0), ("h100", 989 / 494), ("a100", 312 / 156)])
def test_float32_products_run_at_the_default_precision_of_the_machine(preset, ratio):
    sizes, machine = (8192,) * 3, dataclasses.replace(PRESETS[preset], kernel_s=0.0)
    assert time_s(product(*sizes, dtype="float32"), machine) == pytest.approx(ratio * time_s(product(*sizes), machine))


def test_a_convolution_of_few_channels_contracts_over_its_window():
    shapes, out = ((64, 224, 224, 3), (16, 16, 3, 1024)), (64, 14, 14, 1024)
    params = {"dimension_numbers": CHANNELS_LAST, "feature_group_count": 1, "batch_group_count": 1}
    rule = rule_for("conv_general_dilated", shapes, (out,), params)
    make = GraphMaker()
    make.op("conv_general_dilated", rule, *(make.input(*shape, dtype="bfloat16") for shape in shapes), shape=out, dtype="bfloat16")
    graph = make.graph()
    flops = op_flops("conv_general_dilated", rule, shapes, (out,))
    found = compute_time_s(graph, graph.ops[0]._replace(flops=flops), ((),) * len(rule.sizes), MESH, FAST)
    assert found == pytest.approx(flops / V5E.peak_flops_per_s, rel=0.01)


def test_what_is_fused_is_neither_read_nor_written():
    axes, size = ((), ()), 1024 * 1024 * 4
    times = [compute_time_s(*unary("neg", fused), axes, MESH, V5E) * V5E.memory_bytes_per_s for fused in (0, 1, 2)]
    assert times == pytest.approx([2 * size, size, size])


def test_what_is_wholly_fused_still_takes_its_arithmetic():
    axes = ((), ())
    plain, costly = (compute_time_s(*unary(name, 3), axes, MESH, V5E) for name in ("neg", "tanh"))
    assert 0 < plain < costly
    assert compute_time_s(*unary("tanh", 3), (("data",), ()), MESH, V5E) == pytest.approx(costly / 4)


def test_new_names_of_a_tensor_take_no_time():
    assert compute_time_s(*unary("sharding_constraint"), ((), ()), MESH, V5E) == 0.0


def test_a_machine_without_a_vector_rate_computes_at_its_peak():
    own = dataclasses.replace(PRESETS["cpu"], vector_flops_per_s=0.0, float32_flops_per_s=0.0)
    assert own.vector_flops_per_s == own.float32_flops_per_s == own.peak_flops_per_s


H100 = PRESETS["h100"]


@pytest.mark.parametrize(("primitive", "share"), [("exp", 1.0), ("reduce_sum", H100.gathered_share)])
def test_a_kernel_takes_time_besides_its_bytes(primitive, share):
    graph, op = unary(primitive)
    moved = 2 * 1024 * 1024 * 4
    assert compute_time_s(graph, op, ((), ()), MESH, H100) == pytest.approx(moved / (share * H100.memory_bytes_per_s) + H100.kernel_s)


def test_an_op_inside_a_fusion_has_no_kernel_of_its_own():
    graph, op = unary("exp")
    assert compute_time_s(graph, op._replace(work=Work((), 64.0)), ((), ()), MESH, H100) == pytest.approx(64.0 / H100.vector_flops_per_s)


def test_a_product_whose_rows_are_no_multiple_of_16_bytes_reads_them_slowly():
    odd, even = (time_s(product(64, size, 2**16), H100) - 2.5 * H100.kernel_s for size in (197, 200))
    assert odd / even == pytest.approx(197 / 200 / H100.unaligned_share, rel=1e-2)
    assert time_s(product(64, 197, 2**16), V5E) == pytest.approx(time_s(product(64, 200, 2**16), V5E) * 197 / 200, rel=1e-2)


def test_a_product_of_float32_that_sums_the_rows_of_both_operands_is_slower():
    turned = {"dimension_numbers": (((0,), (0,)), ((), ()))}
    seconds = []
    for left, parameters in (((4096, 4096), PRODUCT), ((4096, 4096), turned)):
        make = GraphMaker()
        rule = rule_for("dot_general", (left, (4096, 4096)), ((4096, 4096),), parameters)
        make.op("dot_general", rule, make.input(*left), make.input(4096, 4096), shape=(4096, 4096))
        graph = make.graph()
        op = graph.ops[0]._replace(flops=2 * 4096**3)
        seconds.append(compute_time_s(graph, op, ((),) * 3, MESH, dataclasses.replace(H100, kernel_s=0.0)))
    assert seconds[1] == pytest.approx(seconds[0] / 0.6)


def test_a_convolution_of_few_channels_reads_them_slowly():
    three, eight = (convolution_s((3, 3, channels, 8), channels, flops=1) for channels in (3, 8))
    assert three / eight == pytest.approx((3 + 8) / (8 + 8) / H100.unaligned_share, rel=1e-2)


def test_a_convolution_of_each_channel_by_itself_is_no_product():
    seconds = convolution_s((3, 3, 1, 256), 256, groups=256, flops=10**11)
    assert seconds == pytest.approx(10**11 / H100.vector_flops_per_s / H100.unaligned_share)


def test_a_product_with_a_vector_is_multiplications_and_sums_on_tpu():
    params = {"dimension_numbers": (((2,), (1,)), ((0,), (0,)))}
    shapes, out = ((4096, 256, 2), (4096, 2)), (4096, 256)
    make = GraphMaker()
    rule = rule_for("dot_general", shapes, (out,), params)
    make.op("dot_general", rule, *(make.input(*shape) for shape in shapes), shape=out)
    graph = make.graph()
    op = graph.ops[0]._replace(flops=op_flops("dot_general", rule, shapes, (out,)))
    assert compute_time_s(graph, op, ((),) * len(rule.sizes), MESH, FAST) == pytest.approx(op.flops / V5E.vector_flops_per_s)


@pytest.mark.parametrize(("channels", "lanes"), [(256, 256), (160, 256), (96, 128)])
def test_convolutions_of_single_channels_take_whole_lanes_of_the_vector_unit_on_tpu(channels, lanes):
    seconds = convolution_s((7, 7, 1, channels), channels, channels, machine=FAST)
    flops = 2 * 64**3 * 49 * lanes
    assert seconds == pytest.approx(flops / V5E.vector_flops_per_s / 0.24)


@pytest.mark.parametrize("size", [7, 14])  # as large as the kernel, and larger
def test_gradients_of_kernels_of_single_channels_run_faster(size):
    flops = 2 * 32 * 49 * size**2 * 384
    assert kernel_gradient_s(size) == pytest.approx(flops / V5E.vector_flops_per_s / 0.85)


def test_convolutions_of_few_channels_at_a_time_are_products():
    alone, pairs = (convolution_s((3, 3, each, 256), 256, 256 // each, machine=FAST) for each in (1, 2))
    assert alone < pairs / 2  # tiles of the matrix unit that hold one feature


def kernel_gradient_s(size):
    """Seconds of the gradient of a kernel of 7 x 7 by 32 pictures of 384 channels, as JAX writes it, on a v5e without a memory."""
    numbers = ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
    shapes, result = ((32, size, size, 384),) * 2, (7, 7, 1, 384)
    make = GraphMaker()
    parameters = {"dimension_numbers": numbers, "feature_group_count": 1, "batch_group_count": 384}
    rule = rule_for("conv_general_dilated", shapes, (result,), parameters)
    make.op("conv_general_dilated", rule, *(make.input(*shape, dtype="bfloat16") for shape in shapes), shape=result, dtype="bfloat16")
    graph = make.graph()
    op = graph.ops[0]._replace(flops=op_flops("conv_general_dilated", rule, shapes, (result,)))
    return compute_time_s(graph, op, ((),) * len(rule.sizes), MESH, FAST)


def convolution_s(kernel, channels, groups=1, flops=0, machine=H100):
    """Seconds of a convolution, without those of its kernel."""
    shapes, result = ((64, 64, 64, channels), kernel), (64, 64, 64, kernel[-1])
    make = GraphMaker()
    parameters = {"dimension_numbers": CHANNELS_LAST, "feature_group_count": groups, "batch_group_count": 1}
    parameters |= {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
    rule = rule_for("conv_general_dilated", shapes, (result,), parameters)
    make.op("conv_general_dilated", rule, *(make.input(*shape, dtype="bfloat16") for shape in shapes), shape=result, dtype="bfloat16")
    graph = make.graph()
    op = graph.ops[0]._replace(flops=flops or op_flops("conv_general_dilated", rule, shapes, (result,)))
    return compute_time_s(graph, op, ((),) * len(rule.sizes), MESH, machine) - 2.5 * machine.kernel_s


@pytest.mark.parametrize(("machine", "times"), [(FAST, 2.0), (H100, 1.0)], ids=["tpu", "gpu"])
def test_a_convolution_that_puts_elements_apart_multiplies_some_zeros(machine, times):
    shapes, result = ((64, 32, 32, 256), (3, 3, 256, 256)), (64, 64, 64, 256)
    parameters = {"dimension_numbers": CHANNELS_LAST, "feature_group_count": 1, "batch_group_count": 1, "lhs_dilation": (2, 2)}
    make = GraphMaker()
    rule = rule_for("conv_general_dilated", shapes, (result,), parameters)
    make.op("conv_general_dilated", rule, *(make.input(*shape, dtype="bfloat16") for shape in shapes), shape=result, dtype="bfloat16")
    graph = make.graph()
    op = graph.ops[0]._replace(flops=op_flops("conv_general_dilated", rule, shapes, (result,), parameters))
    seconds = compute_time_s(graph, op, ((),) * len(rule.sizes), MESH, machine) - 2.5 * machine.kernel_s
    assert seconds == pytest.approx(times * 2 * 64 * 64 * 64 * 256 * 256 * 9 / 4 / machine.peak_flops_per_s, rel=0.02)

"""Times one device's share of an op by a roofline: the bytes that it moves, and the seconds that it computes.

An op takes the longest of three times. The matrix unit multiplies, on operands padded to whole tiles. The vector unit does all other
arithmetic. The memory is read and written; tensors that exist only inside a fusion (`Op.fused`) are neither read nor written. A fusion's
time counts as a whole (`Op.work`), at the op that the fusion is built around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spmdctx.ir.analysis.incidence import ends
from spmdctx.ir.analysis.kinds import op_kinds
from spmdctx.ir.graph import LITERAL, Graph, Op, Value, Work, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CONTRACTIONS, KERNELS, MATRIX_PRODUCTS, PICKING, Boundary
from spmdctx.ir.projection import FactorAxes, local_bytes
from spmdctx.ir.rule import DimFactors, FactorKind, window_flops
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.fusion_work import NAMING, vector_flops
from spmdctx.machine.xla.memory.on_chip import ChipShare, held
from spmdctx.machine.xla.partitioner.ragged_products import RAGGED, groups_of

Slices = Sequence[int]
"""The number of slices of each factor of an op's rule."""


def compute_time_s(graph: Graph, op: Op, axes: FactorAxes, mesh: LogicalMesh, topology: Topology) -> float:
    """Returns the seconds of one execution of an op whose factors are split along `axes`."""
    return sliced_time_s(graph, op, [mesh.num_slices(own) if own else 1 for own in axes], topology)


def sliced_time_s(graph: Graph, op: Op, slices: Slices, topology: Topology) -> float:
    """Returns the seconds of one execution of an op whose factors are split into `slices`.

    They depend on the op's rule, primitive, `fused`, `work` and dtypes, on `slices`, and on nothing else.
    """
    if op.primitive in NAMING:
        return 0.0
    longest = _without_matrix_unit_s(graph, op, slices, topology, held(topology.scratch_bytes, topology.device))
    if op.primitive in KERNELS:
        return max(longest, op.flops / math.prod(slices) / _matrix_rate(graph, op, topology))
    if op.primitive in MATRIX_PRODUCTS:
        if topology.unaligned_share < 1:
            longest = _unaligned_s(graph, op, slices, topology, longest)
        by_lanes = _lanes_time_s(graph, op, slices, topology)
        longest = max(longest, by_lanes or _product_time_s(graph, op, slices, topology))
    if op.primitive == RAGGED and topology.compiler.masks_groups:
        longest = _masked_s(graph, op, slices, topology, longest)
    return longest + _kernel_s(op, topology) if topology.kernel_s and longest else longest


_COPIES = 3
"""How often the masked rows of all groups are written or read before a product reads them: they are made, then turned."""


def _masked_s(graph: Graph, op: Op, slices: Slices, topology: Topology, ragged_s: float) -> float:
    """Returns the seconds of a ragged product for which all rows are masked and multiplied once for each group; `ragged_s` are its own.

    One that contracts the rows counts the operations of all groups already, and reads what others masked.
    """
    left, right = (_block_bytes(graph, op.operands[place], op.rule.operands[place], slices) for place in (0, 1))
    groups, is_summed = groups_of(op.rule)
    moved_s = groups * left / topology.memory_bytes_per_s
    if is_summed:
        return max(ragged_s, moved_s + groups * right / topology.memory_bytes_per_s)
    return max(groups * _product_time_s(graph, op, slices, topology), moved_s) + _COPIES * moved_s


_LONG_KERNELS = 2.5
"""How much longer than others a product's kernel takes to begin and to end.

Measured on: one H200, products of 1 to 10 us (jax 0.11.2): they take 4 us more than their operations or bytes, fusions 1.5 us.
Checked by: benchmarks/device_kinds.py
"""


def _kernel_s(op: Op, topology: Topology) -> float:
    """Returns the seconds that the kernel of a fusion takes besides its work, at the op that the fusion is built around."""
    if op.work is not None and not op.work.moved:
        return 0.0
    return topology.kernel_s * (_LONG_KERNELS if op.primitive in MATRIX_PRODUCTS else 1.0)


_ROW_BYTES = 16
"""GPUs read and write rows in pieces of so many bytes."""


def _unaligned_s(graph: Graph, op: Op, slices: Slices, topology: Topology, memory_s: float) -> float:
    """Returns the seconds in which a GPU moves a product's tensors, which take `memory_s` if their rows are multiples of 16 bytes.

    A convolution of each channel by itself is no matrix product there.
    """
    if op.primitive != "conv_general_dilated":
        tensors = zip((*op.operands[:2], op.results[0]), (*op.rule.operands[:2], op.rule.results[0]), strict=True)
        rows = [(graph.values[value], dims[-1:]) for value, dims in tensors if value != LITERAL and dims]
        uneven = any(_elements(known.shape[-1:], last, slices) * item_bytes(known.dtype) % _ROW_BYTES for known, last in rows)
        return memory_s / topology.unaligned_share if uneven else memory_s
    made = {factor for dim in op.rule.results[0] for factor in dim}
    summed = {factor for dim in op.rule.operands[1] for factor in dim} - made
    channels = math.prod(-(-op.rule.sizes[factor] // slices[factor]) for factor in summed)
    if channels * item_bytes(graph.values[op.results[0]].dtype) % _ROW_BYTES == 0:
        return memory_s
    vector_s = op.flops / math.prod(slices) / topology.vector_flops_per_s if channels == 1 else 0.0
    return max(memory_s, vector_s) / topology.unaligned_share


def least_device_s(graph: Graph, op: Op, topology: Topology) -> float:
    """Returns the least seconds of devices for one execution of an op: n devices that share it take at least an n-th of them each.

    Axes of a mesh split different factors, so a device has no less than an n-th of the operations, and of each tensor whose dimensions
    have different factors. Uneven blocks and tiles that are not full only add.
    """
    if op.primitive in NAMING:
        return 0.0
    tensors = (*op.rule.operands, *op.rule.results)
    is_plain = all(len(own) == len(set(own)) for own in ([factor for dim in dims for factor in dim] for dims in tensors))
    # However small a block is, the chip does not hold more than that.
    chip = held(topology.scratch_bytes, topology.device)._replace(limit_bytes=math.inf)
    whole = _without_matrix_unit_s(graph, op, [1] * len(op.rule.sizes), topology, chip) if is_plain else 0.0
    return max(whole, least_matrix_s(graph, op, topology))


def least_matrix_s(graph: Graph, op: Op, topology: Topology) -> float:
    """Returns those of `least_device_s` that the matrix unit takes, which depend on no other op; 0 for ops that do not need it."""
    return op.flops / _matrix_rate(graph, op, topology) if op.primitive in MATRIX_PRODUCTS or op.primitive in KERNELS else 0.0


def _without_matrix_unit_s(graph: Graph, op: Op, slices: Slices, topology: Topology, chip: ChipShare) -> float:
    """Returns the seconds of the memory, or of the vector unit if that takes longer."""
    work = op.work
    vector = work.vector_flops if work is not None else vector_flops(op)
    if work is None:
        moved: float = _moved_bytes(graph, op, slices)
    else:
        moved = _moved_by_fusion(graph, op, work, slices, chip)
    rate = topology.memory_bytes_per_s * (topology.gathered_share if op.primitive.startswith(_GATHERED) else 1.0)
    return max(moved / rate, vector / math.prod(slices) / topology.vector_flops_per_s)


_GATHERED = ("reduce_", "arg", "cum", "gather", "scatter")
"""Prefixes of the names of ops that reduce, gather or scatter."""


def passing_values(graph: Graph) -> bytearray:
    """Returns 1 for each value that exists only inside its readers' fusions, which compute it by their element-wise ops, else 0."""
    known: bytearray | None = graph.facts.get(passing_values)
    if known is None:
        found = np.zeros(len(graph.values), dtype=np.uint8)
        found[ends(graph).first_results[op_kinds(graph).flags(_hands_on)]] = 1
        known = graph.facts[passing_values] = bytearray(found.tobytes())
    return known


def _hands_on(op: Op) -> bool:
    return op.work is not None and not op.work.moved and op.primitive in CHAINED and bool(op.fused >> len(op.operands) & 1)


def written_s(value: Value, sharding: TensorSharding, mesh: LogicalMesh, topology: Topology) -> float:
    """Returns the seconds to write a value that exists only inside fusions, and to read it again, as a change of its sharding takes."""
    return 2 * local_bytes(value, sharding, mesh) / topology.memory_bytes_per_s


def _moved_by_fusion(graph: Graph, op: Op, work: Work, slices: Slices, chip: ChipShare) -> float:
    tensors = zip(op.operands + op.results, op.rule.operands + op.rule.results, strict=True)
    if not (work.passing or work.again):
        return sum(
            [
                rate * _elements(graph.values[value].shape, dims, slices)
                for rate, (value, dims) in zip(work.moved, tensors, strict=False)
                if rate
            ]
        )
    counts = [_elements(graph.values[value].shape, dims, slices) if value != LITERAL else 0 for value, dims in tensors]
    total = sum([rate * count for rate, count in zip(work.moved, counts, strict=False) if rate])
    for place, rate in work.passing:
        size = rate * counts[place]
        total += chip.moved(size) - size
    return total + sum([chip.moved(rate * counts[place]) for place, rate in work.again])


def _elements(shape: Sequence[int], dims: Sequence[DimFactors], slices: Slices) -> int:
    """Returns the number of elements of one device's block of a tensor of the op."""
    count = 1
    for size, factors in zip(shape, dims, strict=True):
        ways = 1
        for factor in factors:
            ways *= slices[factor]
        count *= -(-size // ways)
    return count


def _block_bytes(graph: Graph, value: int, dims: Sequence[DimFactors], slices: Slices) -> int:
    """Returns the bytes of one device's block of a tensor of the op."""
    known = graph.values[value]
    return item_bytes(known.dtype) * _elements(known.shape, dims, slices)


def _moved_bytes(graph: Graph, op: Op, slices: Slices) -> int:
    """Returns the bytes that the op reads and writes in memory."""
    count, rule = len(op.operands), op.rule
    written = read = 0
    for position, (value, dims) in enumerate(zip(op.results, rule.results, strict=True), count):
        if not op.fused >> position & 1:
            written += _block_bytes(graph, value, dims, slices)
    if op.boundary is Boundary.EXIT:
        # A slice that is in memory already is copied into its stack.
        return written if op.fused & 1 else 2 * written
    if op.boundary is Boundary.ENTER:
        # The ops inside a loop count what each iteration reads, but each slice of a stack is read only once.
        stacked = len(rule.operands[0]) > len(rule.results[0])
        return _block_bytes(graph, op.operands[0], rule.operands[0], slices) if stacked and op.operands[0] >= 0 else 0
    for position, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
        if value != LITERAL and not op.fused >> position & 1:
            read += _block_bytes(graph, value, dims, slices)
    if op.primitive in PICKING:
        read = min(read, sum(_block_bytes(graph, value, dims, slices) for value, dims in zip(op.results, rule.results, strict=True)))
    elif op.primitive == "dynamic_update_slice" and op.operands[1] != LITERAL:
        return 2 * _block_bytes(graph, op.operands[1], rule.operands[1], slices)
    return read + written


def _product_time_s(graph: Graph, op: Op, slices: Slices, topology: Topology) -> float:
    """Returns the seconds of a matrix product on tiles.

    The unit holds the smaller of the product's two free dimensions, and the contracted one.
    """
    rule = op.rule
    left, right, out = ({factor for dim in dims for factor in dim} for dims in (*rule.operands[:2], rule.results[0]))
    rows = columns = inner = 1
    for factor, (size, ways) in enumerate(zip(rule.sizes, slices, strict=True)):
        local = -(-size // ways)
        if factor in left and factor in right:
            inner *= 1 if factor in out else local
        elif factor in left:
            rows *= local
        elif factor in right:
            columns *= local
    if op.primitive == "conv_general_dilated":
        inner *= _apart(graph, op, 1)
        rows *= _apart(graph, op, 2)
    narrow, wide = sorted((rows, columns))
    used = _filled(narrow, topology.matrix_tile) * _filled(inner, topology.matrix_tile) * _filled(wide, _SUBLANES)
    flops = op.flops / math.prod(slices)
    if op.primitive == "conv_general_dilated" and topology.compiler.fuses_into_products:
        flops *= min(_BESIDE_ZEROS, _dense_flops(graph, op) / max(1, op.flops))
    product_s = flops / _matrix_rate(graph, op, topology) / used
    if topology.compiler.fuses_into_products and op.primitive in CONTRACTIONS and min(narrow, inner) == 1 and topology.vector_flops_per_s:
        # XLA on TPU writes a product with a vector, or of vectors, as multiplications and sums.
        return min(product_s, flops / topology.vector_flops_per_s)
    return product_s


_BESIDE_ZEROS = 2.0
"""How often TPU multiplies what meets no zero, where a convolution puts elements apart, as the gradient of an image behind a stride does.

Measured on: the compiler's cycles of 18 shapes (strides of 2 to 4, kernels of 2 to 7, 128 to 512 channels; v5e, v6e): 1.2 to 2.6, half
    of them 2.0 to 2.2, four for 8 images of 32 x 32; all zeros would make it 4 to 16.
Checked by: benchmarks/fidelity_plans.py
"""


def _dense_flops(graph: Graph, op: Op) -> int:
    """Returns the operations of a convolution with all the zeros that it puts between elements."""
    return window_flops(op.rule, [graph.values[value].shape for value in op.operands[:2]], [graph.values[op.results[0]].shape])


_LANES, _CHANNEL_RATE, _KERNEL_RATE = 128, 0.24, 0.85
"""The vector unit's lanes, and the parts of its rate that convolutions of each channel by itself reach on TPU: those of images, as in
the forward pass and in the gradient of the image, and those of images with images, which make the gradient of the kernel.

Measured on: the compiler's cycles of kernels of 3 to 7, 7 to 56 pixels a side, 96 to 768 channels: v5e, v5p and v6e 0.20 to 0.25, and
0.73 to 0.96 (kernels of 3: 0.4 to 1.08), with channels in whole lanes. With strides about 0.1, which does not count here.
Checked by: benchmarks/fidelity_plans.py
"""


def _lanes_time_s(graph: Graph, op: Op, slices: Slices, topology: Topology) -> float:
    """Returns the seconds of a convolution of each channel by itself on TPU's vector unit, 0 of any other product."""
    if op.primitive != "conv_general_dilated" or not topology.compiler.fuses_into_products or not topology.vector_flops_per_s:
        return 0.0
    space = {factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.PERMUTATION}
    left, right, out = ({factor for dim in dims for factor in dim} - space for dims in (*op.rule.operands[:2], op.rule.results[0]))
    sizes, channels = op.rule.sizes, left & right & out
    count = math.prod(sizes[factor] for factor in channels)
    images, features, summed = (math.prod(sizes[factor] for factor in own) for own in (left - right, right - left, left & right - out))
    if count == 1 or (summed > 1 and (images > 1 or features > 1)):
        return 0.0
    lanes = math.prod(-(-sizes[factor] // slices[factor]) for factor in channels)
    rate = topology.vector_flops_per_s * (_KERNEL_RATE if summed > 1 else _CHANNEL_RATE) * _filled(lanes, _LANES)
    return max(op.flops, _dense_flops(graph, op)) / math.prod(slices) / rate


def _matrix_rate(graph: Graph, op: Op, topology: Topology) -> float:
    """Returns the operations per second of the matrix unit on numbers of the op's types."""
    exact = graph.values[op.results[0]].dtype in ("float64", "complex64", "complex128")
    wide_items = bool(op.operands) and op.operands[0] != LITERAL and item_bytes(graph.values[op.operands[0]].dtype) > 2
    if not (wide_items or exact):
        return topology.peak_flops_per_s
    is_slower = topology.float32_flops_per_s < topology.peak_flops_per_s
    return topology.float32_flops_per_s * (_SUMMED_ROWS if is_slower and op.primitive in CONTRACTIONS and _sums_rows(op) else 1.0)


_SUMMED_ROWS = 0.6
"""The part of its rate that a GPU's matrix unit reaches on float32 if both operands are summed over another dimension than their last,
as gradients of weights are: the unit turns no such operands.

Measured on: one H200, products of 9 to 280 us (jax 0.11.2): 140 to 265 of 398 TFLOP/s.
Checked by: benchmarks/device_kinds.py
"""


def _sums_rows(op: Op) -> bool:
    left, right, out = op.rule.operands[0], op.rule.operands[1], {factor for dim in op.rule.results[0] for factor in dim}
    return bool(left and right) and all(set(own[-1]) & out for own in (left, right))


def _apart(graph: Graph, op: Op, place: int) -> int:
    """Returns the elements of a convolution's kernel (1) or result (2) along dimensions that are no factors: its window, its pixels."""
    value, dims = ((op.operands[1], op.rule.operands[1]), (op.results[0], op.rule.results[0]))[place - 1]
    return math.prod(size for size, factors in zip(graph.values[value].shape, dims, strict=True) if not factors)


_SUBLANES = 8


def _filled(size: int, tile: int) -> float:
    """Returns the share of whole tiles that a dimension fills."""
    return size / (math.ceil(size / tile) * tile) if size else 1.0

"""One device's share of an op: its bytes, and the seconds it computes.

An op takes the longest of three times: its multiplications on the matrix unit, with what pads them to whole tiles; its other
arithmetic on the vector unit; and what it reads and writes in memory. Tensors that exist only inside a fusion (`Op.fused`) are
neither read nor written, but the arithmetic that makes them takes its time.
"""

from __future__ import annotations

import math

from spmdctx.cost.topology import Topology
from spmdctx.ir import LITERAL, Graph, Op, TensorSharding, Value, item_bytes
from spmdctx.mesh import LogicalMesh, local_shape
from spmdctx.search.transfer import FactorAxes, project

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "scaled_dot"})
_NOTHING = frozenset({"spmdctx_shard", "sharding_constraint", "name", "scan.next", "while.enter", "while.next"})
"""Ops that only name a tensor anew."""

_PICKING = ("slice", "dynamic_slice", "gather", "split")
"""Ops that read no more of their operand than they return."""

_COSTLY = frozenset(
    {
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
    }
)
_COSTLY_FLOPS = 10
"""Vector operations that one of them takes: a polynomial and what comes before and after it."""


def local_bytes(value: Value, sharding: TensorSharding, mesh: LogicalMesh) -> int:
    """Bytes of one device's block of a value."""
    count = item_bytes(value.dtype)
    for size in local_shape(value.shape, sharding, mesh):
        count *= size
    return count


def compute_time_s(graph: Graph, op: Op, axes: FactorAxes, mesh: LogicalMesh, topology: Topology) -> float:
    """Seconds of one execution. Depends on the op's rule, primitive, `fused` and dtypes, on `axes`, and on nothing else."""
    if op.primitive in _NOTHING:
        return 0.0
    memory_s = _moved_bytes(graph, op, axes, mesh) / topology.memory_bytes_per_s
    if op.primitive in _PRODUCTS:
        return max(memory_s, _product_time_s(graph, op, axes, mesh, topology))
    slices = mesh.num_slices(name for own in axes for name in own)
    weight = _COSTLY_FLOPS if op.primitive in _COSTLY else 1
    return max(memory_s, op.flops * weight / slices / topology.vector_flops_per_s)


def _moved_bytes(graph: Graph, op: Op, axes: FactorAxes, mesh: LogicalMesh) -> int:
    """Bytes that the op reads and writes in memory."""
    count, rule = len(op.operands), op.rule
    written = read = 0
    for position, (value, dims) in enumerate(zip(op.results, rule.results, strict=True), count):
        if not op.fused >> position & 1:
            written += local_bytes(graph.values[value], project(dims, axes), mesh)
    if op.primitive == "scan.exit":
        # A slice that is in memory already is copied into its stack.
        return written if op.fused & 1 else 2 * written
    if op.primitive == "scan.enter":
        # What each turn reads is counted where it is read, but a stack's slices are read once each.
        stacked = len(rule.operands[0]) > len(rule.results[0])
        return local_bytes(graph.values[op.operands[0]], project(rule.operands[0], axes), mesh) if stacked and op.operands[0] >= 0 else 0
    for position, (value, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
        if value != LITERAL and not op.fused >> position & 1:
            read += local_bytes(graph.values[value], project(dims, axes), mesh)
    if op.primitive in _PICKING:
        picked = sum(
            local_bytes(graph.values[value], project(dims, axes), mesh) for value, dims in zip(op.results, rule.results, strict=True)
        )
        read = min(read, picked)
    elif op.primitive == "dynamic_update_slice" and op.operands[1] != LITERAL:
        return 2 * local_bytes(graph.values[op.operands[1]], project(rule.operands[1], axes), mesh)
    return read + written


def _product_time_s(graph: Graph, op: Op, axes: FactorAxes, mesh: LogicalMesh, topology: Topology) -> float:
    """A matrix product on tiles: of its two free dimensions the smaller is held in the unit with the contracted one."""
    rule = op.rule
    left, right, out = ({factor for dim in dims for factor in dim} for dims in (*rule.operands[:2], rule.results[0]))
    rows = columns = inner = 1
    for factor, (size, own) in enumerate(zip(rule.sizes, axes, strict=True)):
        local = -(-size // mesh.num_slices(own)) if own else size
        if factor in left and factor in right:
            inner *= 1 if factor in out else local
        elif factor in left:
            rows *= local
        elif factor in right:
            columns *= local
    if op.primitive == "conv_general_dilated":
        inner *= _apart(graph, op, 1)
        rows *= _apart(graph, op, 2)
    slices = mesh.num_slices(name for own in axes for name in own)
    narrow, wide = sorted((rows, columns))
    used = _filled(narrow, topology.matrix_tile) * _filled(inner, topology.matrix_tile) * _filled(wide, _SUBLANES)
    exact = graph.values[op.results[0]].dtype in ("float64", "complex64", "complex128")
    wide_items = op.operands[0] != LITERAL and item_bytes(graph.values[op.operands[0]].dtype) > 2
    rate = topology.float32_flops_per_s if wide_items or exact else topology.peak_flops_per_s
    return op.flops / slices / rate / used


def _apart(graph: Graph, op: Op, place: int) -> int:
    """Elements of a convolution's kernel (1) or result (2) along dimensions that are no factors: its window, its pixels."""
    value, dims = ((op.operands[1], op.rule.operands[1]), (op.results[0], op.rule.results[0]))[place - 1]
    return math.prod(size for size, factors in zip(graph.values[value].shape, dims, strict=True) if not factors)


_SUBLANES = 8


def _filled(size: int, tile: int) -> float:
    """Share of whole tiles that a dimension fills."""
    return size / (math.ceil(size / tile) * tile) if size else 1.0

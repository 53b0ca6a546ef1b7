"""Rules of reductions over whole dimensions and over windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.control_flow import opened
from spmdctx.rules.registry import ALL_REDUCED, rule

_COMBINER_OF_REDUCTION = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}

_IDEMPOTENT = frozenset({"max", "min", "and", "or"})
"""Combiners that may take an initial value once or once per device."""


def _reduce_axes(combiner: str, operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    return _reduction(operands[:1], params["axes"], 1, combiner)


for _name, _combiner in _COMBINER_OF_REDUCTION.items():
    rule(_name)(partial(_reduce_axes, _combiner))


@rule("reduce")
def reduce(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Reduces several operands at once by any reducer; its initial values are scalars.

    XLA's partitioner lets every device start with the initial value (jax 0.10.2, on CPU), so sums and products stay whole. Those that
    start with 0 and 1 are other primitives.
    """
    combiner = _combiner_of(params["jaxpr"])
    return _reduction(operands, params["dimensions"], len(results), combiner if combiner in _IDEMPOTENT else "custom")


def _reduction(operands: tuple[Shape, ...], axes: Sequence[int], num_results: int, combiner: str) -> OpRule:
    builder = RuleBuilder()
    whole = combiner not in ALL_REDUCED
    dims: list[DimFactors] = []
    for dim, size in enumerate(operands[0]):
        reduced = dim in axes
        dims.append(builder.factor(size, FactorKind.REDUCTION if reduced else FactorKind.PASS_THROUGH, blocked=reduced and whole))
    kept = [factors for dim, factors in enumerate(dims) if dim not in axes]
    return builder.build([dims if shape else [] for shape in operands], [kept] * num_results, combiner=combiner)


def _combiner_of(reducer: Any) -> str:
    """Returns the name of the combiner if the reducer is one known equation, else `custom`."""
    equations = opened(reducer).eqns
    name = equations[0].primitive.name if len(equations) == 1 else ""
    return name if name in _COMBINER_OF_REDUCTION.values() else "custom"


@rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def reduce_window(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Lets dimensions pass through whose windows have one element; keeps the others whole."""
    builder = RuleBuilder()
    dims, result = _window_dims(builder, operands[0], results[0], _trivial_windows(params))
    return builder.build([dims if shape else [] for shape in operands], [result] * len(results))


@rule("select_and_scatter_add")
def select_and_scatter_add(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Computes the gradient of a max pool, from (source, operand) to the operand's shape; the source has the windows' shape."""
    builder = RuleBuilder()
    dims, windows = _window_dims(builder, operands[1], operands[0], _trivial_windows(params))
    return builder.build([windows, dims], [dims])


@rule("select_and_gather_add")
def select_and_gather_add(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Computes the tangent of a max pool, from (tangents, operand) of one shape to the windows' shape."""
    builder = RuleBuilder()
    dims, windows = _window_dims(builder, operands[1], results[0], _trivial_windows(params))
    return builder.build([dims, dims], [windows])


@rule("select_and_scatter")
def select_and_scatter(operands: tuple[Shape, ...], _results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Selects and scatters, from (operand, source, initial value) to the operand's shape."""
    builder = RuleBuilder()
    dims, windows = _window_dims(builder, operands[0], operands[1], _trivial_windows(params))
    return builder.build([dims, windows, []], [dims])


def _trivial_windows(params: Mapping[str, Any]) -> list[bool]:
    sizes = params["window_dimensions"]
    ones = (1,) * len(sizes)
    columns = (sizes, params["window_strides"], params.get("base_dilation") or ones, params.get("window_dilation") or ones)
    padding = params["padding"]
    return [all(column[dim] == 1 for column in columns) and tuple(padding[dim]) == (0, 0) for dim in range(len(sizes))]


def _window_dims(builder: RuleBuilder, full: Shape, windows: Shape, trivial: list[bool]) -> tuple[list[DimFactors], list[DimFactors]]:
    full_dims: list[DimFactors] = []
    window_dims: list[DimFactors] = []
    for size, count, free in zip(full, windows, trivial, strict=True):
        kind = FactorKind.PASS_THROUGH if free else FactorKind.PERMUTATION
        factors = builder.factor(size, kind) if size == count else ()
        full_dims.append(factors)
        window_dims.append(factors)
    return full_dims, window_dims

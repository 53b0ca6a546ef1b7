"""Rules of primitives that annotate a value and leave its elements as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, identity
from spmdctx.rules.registry import rule


@rule(
    *("sharding_constraint", "reshard", "layout_constraint", "with_memory_space_constraint", "device_put"),
    *("name", "relayout", "stage", "xla_metadata_value", "zeros_like"),
)
def annotate(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Lets each operand pass through to its own result."""
    builder = RuleBuilder()
    dims = [builder.factors(shape) for shape in operands]
    return builder.build(dims, dims[: len(results)])


@rule("shard_alike")
def alike(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Splits two values of one shape in the same way."""
    return identity(operands[0], num_operands=2, num_results=len(results))


@rule("tie")
def tie(operands: tuple[Shape, ...], _results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Relates the result to the second operand, and to nothing of the first."""
    builder = RuleBuilder()
    dims = [builder.factors(shape) for shape in operands]
    return builder.build(dims, dims[1:])


@rule("dce_sink")
def sink(operands: tuple[Shape, ...], _results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Lets a value that is only kept alive split in any way."""
    builder = RuleBuilder()
    return builder.build([builder.factors(shape) for shape in operands], [])


@rule("to_edtype", "from_edtype")
def reinterpret(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Relates an extended dtype to its representation. The words of one element, the last dimensions of one side, stay together."""
    builder = RuleBuilder()
    operand, result = operands[0], results[0]
    shared = builder.factors(operand if len(operand) < len(result) else result)
    sides = [[*shared, *[()] * (len(shape) - len(shared))] for shape in (operand, result)]
    return builder.build(sides[:1], sides[1:])

"""The table of sharding rules, keyed by primitive name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import Shape, replicate

RuleFn = Callable[[tuple[Shape, ...], tuple[Shape, ...], Mapping[str, Any]], OpRule]
"""Makes the rule of an equation from its operand shapes (literals have rank 0), its result shapes and its parameters."""

RULES: dict[str, RuleFn] = {}

_KEEPING = frozenset(
    {
        *("concatenate", "dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        "split",
    }
)
"""Primitives whose result is what it was where one of several operands has no elements, and which XLA splits itself; or whose results
are parts of their operand, each by itself."""

ALL_REDUCED = frozenset({"add", "max", "min", "mul", "and", "or", "argmax", "argmin"})
"""Combiners that XLA can apply across devices: it has no all-reduce for xor or for a reducer that the user wrote."""

_ORDERING = frozenset({"max", "min"})
"""Combiners that compare numbers."""

_LOGICAL = frozenset({"and", "or"})
"""Combiners that XLA's all-reduce applies to booleans, but not to the bits of integers."""


def rule(*primitives: str) -> Callable[[RuleFn], RuleFn]:
    """Registers the decorated function as the rule of `primitives`; a primitive has one rule."""

    def register(function: RuleFn) -> RuleFn:
        for name in primitives:
            if name in RULES:
                raise ValueError(f"primitive {name!r} already has a rule")
            RULES[name] = function
        return function

    return register


def has_rule(primitive: str) -> bool:
    """Returns whether a rule is registered for a primitive."""
    return primitive in RULES


def missing_all_reduces(primitive: str, dtype: str) -> frozenset[str]:
    """Returns the combiners of a primitive's results that no all-reduce of XLA applies to numbers of this type (jax 0.10.2)."""
    if dtype in ("int2", "uint2"):
        return ALL_REDUCED
    if dtype.startswith("complex"):
        return _ORDERING
    return _LOGICAL if primitive in ("reduce", "reduce_and", "reduce_or") and dtype != "bool" else frozenset()


def rule_for(
    primitive: str,
    operands: tuple[Shape, ...],
    results: tuple[Shape, ...],
    params: Mapping[str, Any],
    missing: frozenset[str] = frozenset(),
) -> OpRule:
    """Returns the rule of one equation; a primitive without one is kept whole, and the rule's `reason` says so.

    Args:
        primitive: its name.
        operands: the shape of each operand; literals have rank 0.
        results: the shape of each result.
        params: of the equation.
        missing: combiners for which there is no all-reduce; what they reduce stays whole.
    """
    function = RULES.get(primitive)
    if function is None:
        return replicate(operands, results, f"no rule for primitive '{primitive}'")
    found = function(operands, results, params).without_empty(operands, results, blocks=primitive not in _KEEPING)
    return found.without_reductions() if found.combiner in missing else found

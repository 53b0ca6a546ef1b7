"""The table of sharding rules, keyed by primitive name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import Shape, replicate

RuleFn = Callable[[tuple[Shape, ...], tuple[Shape, ...], Mapping[str, Any]], OpRule]
"""Makes the rule of an equation from its operand shapes (literals have rank 0), its result shapes and its parameters."""

RULES: dict[str, RuleFn] = {}


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


def rule_for(primitive: str, operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Returns the rule of one equation; a primitive without one is kept whole, and the rule's `reason` says so."""
    function = RULES.get(primitive)
    if function is None:
        return replicate(operands, results, f"no rule for primitive '{primitive}'")
    return function(operands, results, params)

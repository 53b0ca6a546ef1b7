"""Sharding rules: for each primitive, which dimensions of its operands and results belong together."""

from spmdctx.rules import contraction, convolution, elementwise, linalg, ordering, random, reduction
from spmdctx.rules.builder import RuleBuilder, Shape, identity, replicate
from spmdctx.rules.registry import RULES, RuleFn, rule, rule_for

__all__ = [
    "RULES",
    "RuleBuilder",
    "RuleFn",
    "Shape",
    "contraction",
    "convolution",
    "elementwise",
    "identity",
    "linalg",
    "ordering",
    "random",
    "reduction",
    "replicate",
    "rule",
    "rule_for",
]

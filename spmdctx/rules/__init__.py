"""Sharding rules: for each primitive, which dimensions of its operands and results belong together."""

from spmdctx.rules import (
    annotation,
    collective,
    contraction,
    control_flow,
    convolution,
    elementwise,
    indexing,
    kernels,
    linalg,
    opaque,
    ordering,
    random,
    reduction,
    reshape,
    shape,
)
from spmdctx.rules.builder import RuleBuilder, Shape, identity, replicate
from spmdctx.rules.registry import RULES, RuleFn, has_rule, missing_all_reduces, rule, rule_for

__all__ = [
    "RULES",
    "RuleBuilder",
    "RuleFn",
    "Shape",
    "annotation",
    "collective",
    "contraction",
    "control_flow",
    "convolution",
    "elementwise",
    "has_rule",
    "identity",
    "indexing",
    "kernels",
    "linalg",
    "missing_all_reduces",
    "opaque",
    "ordering",
    "random",
    "reduction",
    "replicate",
    "reshape",
    "rule",
    "rule_for",
    "shape",
]

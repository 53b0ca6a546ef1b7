"""Asks Shardy, inside jaxlib, for its own sharding rule of an op, and compares it with ours factor by factor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir as mlir
from jaxlib.mlir import passmanager

from spmdctx.ir.rule import FactorKind, OpRule
from tests.rules.numeric_oracle import Equation, assert_fits, equation

_PASSES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_SPLIT = (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)

Place = tuple[str, int, int, int]
"""Side, tensor, dimension, and elements of the dimension per step of the factor."""


def shardy_rule(function: Callable[..., Any], *args: Any, op: str, platform: str = "cpu") -> OpRule:
    """Shardy's rule of the one StableHLO op named `op` (`stablehlo.dot_general`, say) that `platform` lowers `function(*args)` to."""
    module = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    found: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name == op and "sdy.sharding_rule" in operation.attributes:
            found.append(str(operation.attributes["sdy.sharding_rule"]))
        return mlir.WalkResult.ADVANCE

    with module.context:
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        module.operation.walk(visit)
    assert len(found) == 1, f"{len(found)} ops {op} with a rule"
    return parse_rule(found[0])


def parse_rule(text: str) -> OpRule:
    """Reads `#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=32, k=16} reduction={k}>`."""
    sides, _, rest = text.partition("<")[2].removesuffix(">").partition("{")
    sizes_text, _, kinds_text = rest.partition("}")
    sizes = {name: int(size) for name, size in (pair.split("=") for pair in sizes_text.split(", ") if pair)}
    number = {name: index for index, name in enumerate(sizes)}
    operands, results = (
        tuple(
            tuple(tuple(number[name] for name in _FACTOR.findall(dim)) for dim in tensor.split(",") if dim.strip())
            for tensor in re.findall(r"\[([^\]]*)\]", side)
        )
        for side in sides.split("->")
    )
    kinds = [FactorKind.PASS_THROUGH] * len(sizes)
    for kind in (FactorKind.REDUCTION, FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION):
        members = re.search(kind.value + r"=\{([^}]*)\}", kinds_text)
        for name in _FACTOR.findall(members.group(1)) if members else ():
            kinds[number[name]] = kind
    return OpRule(operands, results, tuple(sizes.values()), tuple(kinds))


def disagreements(
    function: Callable[..., Any],
    *args: Any,
    primitive: str,
    op: str,
    operands: Sequence[int] | None = None,
    results: Sequence[int] | None = None,
    platform: str = "cpu",
) -> list[str]:
    """What only one of the two rules splits, as sentences; none when they agree.

    Tensors of rank 0 are left out on both sides. Where the lowering adds some (an argmax's indices), `operands` and `results`
    select those of the StableHLO op that our equation has, in our order.
    """
    eqn = equation(function, *args, primitive=primitive)
    assert_fits(eqn)
    shardy = shardy_rule(function, *args, op=op, platform=platform)
    selected = [
        side if chosen is None else tuple(side[index] for index in chosen)
        for side, chosen in ((shardy.operands, operands), (shardy.results, results))
    ]
    shardy = OpRule(selected[0], selected[1], shardy.sizes, shardy.kinds)
    return compare(eqn, shardy)


def compare(eqn: Equation, shardy: OpRule) -> list[str]:
    """Compares the factors that may be split, up to their names; those of size 1 say nothing."""
    ours_split, ours_whole = _factors(eqn.rule, eqn)
    shardy_split, shardy_whole = _factors(shardy, eqn)
    messages = [
        f"we split {_text(key)} {kind}, Shardy {_verdict(key, shardy_split, shardy_whole)}"
        for key, kind in ours_split.items()
        if shardy_split.get(key) != kind
    ]
    messages += [f"Shardy splits {_text(key)} {kind}, we don't" for key, kind in shardy_split.items() if key not in ours_split]
    messages += [
        f"we call {_text(key)} {kind}, Shardy {shardy_whole[key]}"
        for key, kind in ours_whole.items()
        if key in shardy_whole and kind not in ("blocked", shardy_whole[key])
    ]
    return sorted(messages)


def _verdict(key: frozenset[Place], split: dict[frozenset[Place], str], whole: dict[frozenset[Place], str]) -> str:
    return split.get(key) or whole.get(key) or "doesn't relate them"


def _factors(rule: OpRule, eqn: Equation) -> tuple[dict[frozenset[Place], str], dict[frozenset[Place], str]]:
    """Where each factor occurs and its kind: those that may be split, and the others."""
    places: dict[int, set[Place]] = {}
    for side, tensors, shapes in (("operand", rule.operands, eqn.operands), ("result", rule.results, eqn.results)):
        ranked = zip([dims for dims in tensors if dims], [shape for shape in shapes if shape], strict=True)
        for tensor, (dims, shape) in enumerate(ranked):
            for dim, (factors, size) in enumerate(zip(dims, shape, strict=True)):
                steps = size
                for factor in factors:
                    # Counted from the major side: Shardy's whole minor factors may be larger or smaller than what is left.
                    steps = 1 if factor == factors[-1] else max(steps // rule.sizes[factor], 1)
                    places.setdefault(factor, set()).add((side, tensor, dim, steps))
    split: dict[frozenset[Place], str] = {}
    whole: dict[frozenset[Place], str] = {}
    for factor, own in places.items():
        if rule.sizes[factor] == 1:
            continue
        free = rule.kinds[factor] in _SPLIT and factor not in rule.blocked
        (split if free else whole)[frozenset(own)] = "blocked" if factor in rule.blocked else rule.kinds[factor].value
    return split, whole


def _text(key: frozenset[Place]) -> str:
    return " = ".join(f"{side} {tensor} dim {dim}" + (f" / {stride}" if stride > 1 else "") for side, tensor, dim, stride in sorted(key))

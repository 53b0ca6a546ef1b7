"""The rule of reshape: the common refinement of the two factorisations of one element order.

The rule walks both shapes from the major end and takes out greatest common divisors, as Shardy does:

    [8, 4, 16] -> [32, 16]    ([i, j, k])->([(i j), k])             {i=8, j=4, k=16}
    [32, 16]   -> [8, 64]     ([(i j), k])->([i, (j k)])            {i=8, j=4, k=16}
    [6, 4]     -> [4, 6]      ([(i j), m])->([(i k), l])            {i=2, j=3, k=2, l=6, m=4}, only i can be split

A split of a major factor cuts the elements in the same place on both sides, so it passes. Where the remainders share no
divisor, the two sides have no cut in common until their products meet again. Those dimensions get blocked factors of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from spmdctx.ir.rule import DimFactors, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, replicate
from spmdctx.rules.registry import rule


class _Walk:
    """A walk over one shape from its major dimension; `left` is the part of the current dimension that has no factor yet."""

    def __init__(self, shape: Shape) -> None:
        self.dims: list[DimFactors] = [()] * len(shape)
        self._rest = [(dim, size) for dim, size in enumerate(shape) if size > 1][::-1]
        self._dim = 0
        self.left = 1

    def advance(self) -> bool:
        """Goes to the next dimension if the current one is used up; returns False at the end."""
        if self.left == 1:
            if not self._rest:
                return False
            self._dim, self.left = self._rest.pop()
        return True

    def take(self, factor: DimFactors, size: int) -> None:
        self.dims[self._dim] += factor
        self.left //= size

    def block(self, builder: RuleBuilder) -> int:
        """Gives the rest of the dimension a factor of its own that is never split; returns its size."""
        size = self.left
        self.take(builder.factor(size, blocked=True), size)
        return size


@rule("reshape")
def reshape(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Relates the leading factors that compound dimensions of both sides share."""
    operand, result = operands[0], results[0]
    if 0 in operand:
        return replicate(operands, results, "a tensor without elements has nothing to split")
    order = params.get("dimensions") or range(len(operand))
    builder = RuleBuilder()
    source, target = _Walk(tuple([operand[dim] for dim in order])), _Walk(result)
    while source.advance() and target.advance():
        _step(builder, source, target)
    dims: list[DimFactors] = [()] * len(operand)
    for dim, factors in zip(order, source.dims, strict=True):
        dims[dim] = factors
    return builder.build([dims, *[()] * (len(operands) - 1)], [target.dims])


def _step(builder: RuleBuilder, source: _Walk, target: _Walk) -> None:
    """Takes the common divisor of both rests; if neither side is then used up, blocks both until their products meet."""
    size = gcd(source.left, target.left)
    factor = builder.factor(size)
    source.take(factor, size)
    target.take(factor, size)
    if source.left == 1 or target.left == 1:
        return
    done, wanted = source.block(builder), target.block(builder)
    while done != wanted:
        behind = source if done < wanted else target
        behind.advance()
        size = behind.block(builder)
        if behind is source:
            done *= size
        else:
            wanted *= size

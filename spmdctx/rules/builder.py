"""The small language in which sharding rules are written: factors, and the dimensions that they make up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule

Shape = tuple[int, ...]

Dims = Iterable[DimFactors]
"""The factors of each dimension of one tensor."""


class RuleBuilder:
    """Collects factors, then builds the rule.

    A dimension is a tuple of factors, so a compound dimension is written `i + j` and a dimension without a factor `()`:

        b = RuleBuilder()
        i, k, j = b.factor(8), b.factor(16, FactorKind.REDUCTION), b.factor(32)
        b.build([(i, k), (k, j)], [(i, j)])
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._kinds: list[FactorKind] = []
        self._blocked: set[int] = set()

    def factor(self, size: int, kind: FactorKind = FactorKind.PASS_THROUGH, *, blocked: bool = False) -> DimFactors:
        """Returns a new factor as a dimension of its own, or `()` for sizes 0 and 1, which nothing can split."""
        if size <= 1:
            return ()
        index = len(self._sizes)
        self._sizes.append(size)
        self._kinds.append(kind)
        if blocked:
            self._blocked.add(index)
        return (index,)

    def factors(self, shape: Iterable[int], kind: FactorKind = FactorKind.PASS_THROUGH, *, blocked: bool = False) -> list[DimFactors]:
        """Returns a new factor for each dimension of `shape`."""
        return [self.factor(size, kind, blocked=blocked) for size in shape]

    def build(self, operands: Iterable[Dims], results: Iterable[Dims], *, combiner: str = "add", reason: str = "") -> OpRule:
        """Returns the rule that relates `operands` and `results`, both given as the factors of each dimension."""
        return OpRule(
            operands=tuple(tuple(dims) for dims in operands),
            results=tuple(tuple(dims) for dims in results),
            sizes=tuple(self._sizes),
            kinds=tuple(self._kinds),
            blocked=frozenset(self._blocked),
            combiner=combiner,
            reason=reason,
        )


def identity(shape: Shape, *, num_operands: int = 1, num_results: int = 1) -> OpRule:
    """Returns a rule that lets every dimension pass through, from operands to results that all have `shape`."""
    builder = RuleBuilder()
    dims = builder.factors(shape)
    return builder.build([dims] * num_operands, [dims] * num_results)


def broadcast_dims(dims: Sequence[DimFactors], shape: Shape, full: Shape) -> list[DimFactors]:
    """Returns the dimensions of an operand that broadcasts to `full`, whose factors are `dims`.

    The operand has rank 0, or size 1 where `full` has more.
    """
    if not shape:
        return []
    return [factors if size == whole else () for factors, size, whole in zip(dims, shape, full, strict=True)]


def replicate(operands: Sequence[Shape], results: Sequence[Shape], reason: str) -> OpRule:
    """Returns a rule that keeps every dimension whole; `reason` says why."""
    return RuleBuilder().build([((),) * len(shape) for shape in operands], [((),) * len(shape) for shape in results], reason=reason)

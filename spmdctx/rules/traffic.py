"""What each fusion of a step reads, writes and computes, charged to the op that it is built around.

The compiler computes chains of element-wise ops on the way into the matrix product, the reduction or the stored result that
needs them, in one kernel: what the chain reads and computes hides behind the product's multiplications, or they behind it. So a
fusion takes the longest of three times, and all of it is told of its one main op. A chain that leads to several is told of the
first: how the others read it too is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmdctx.ir import Op, Value, Work, item_bytes
from spmdctx.rules.fusion import CHAINED, elements_of

_COSTLY = frozenset(
    {
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
    }
)
_COSTLY_FLOPS = 10
"""Vector operations that one of them takes: a polynomial and what comes before and after it."""

_PICKING = ("slice", "dynamic_slice", "gather", "split")
"""Ops that read no more of their operand than they return."""

NAMING = frozenset({"spmdctx_shard", "sharding_constraint", "name", "scan.next", "while.enter", "while.next"})
"""Ops that only name a tensor anew."""

_APART = frozenset({"scan.enter", "scan.exit", "dynamic_update_slice", "gather", "shard_map"})
"""Ops priced on their own: they take parts of what they read, write in place, or are whole programs."""

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "scaled_dot"})

_ALONE, _NO_ARITHMETIC = _APART | NAMING, _PRODUCTS | NAMING

_HIDDEN = 1 / 64
"""What is left of the price of arithmetic that hides in a fusion, so that splitting it is better than not."""

_Place = tuple[int, int]
"""A main op, and which of its operands or results, counted together."""


def fusion_works(values: Sequence[Value], ops: Sequence[Op], fused: Sequence[int], scopes: Sequence[int]) -> list[Work | None]:
    """`Op.work` of every op, whose number is its place; `fused` holds their `Op.fused`, `scopes` the computation of each."""
    elements = elements_of(values)
    homes = _Homes(elements, ops, fused, scopes).found
    sizes = [*[item_bytes(value.dtype) * count for value, count in zip(values, elements, strict=False)], 0]
    moved: dict[_Place, int] = {}
    arithmetic = [0] * len(ops)
    seen: set[_Place] = set()
    for op, bits, home in zip(ops, fused, homes, strict=True):
        main = home[0] if home else op.id
        if op.flops:
            arithmetic[main] += vector_flops(op)
        tensors = op.operands + op.results
        if bits == (1 << len(tensors)) - 1:
            continue
        for position, value in enumerate(tensors):
            if not bits >> position & 1 and (main, value) not in seen:
                seen.add((main, value))
                place = home or (main, position)
                size = sizes[value]
                if op.primitive in _PICKING and position < len(op.operands):
                    size = min(size, sum(sizes[made] for made in op.results))
                moved[place] = moved.get(place, 0) + size
    return _works(elements, ops, homes, moved, arithmetic)


def vector_flops(op: Op) -> int:
    """Operations of an op on the vector unit: none of matrix products, nor of ops that only name a tensor."""
    if op.primitive in _NO_ARITHMETIC:
        return 0
    return op.flops * _COSTLY_FLOPS if op.primitive in _COSTLY else op.flops


class _Homes:
    """Where in which fusion an op is computed; None for main ops and those that are priced on their own."""

    def __init__(self, elements: Sequence[int], ops: Sequence[Op], fused: Sequence[int], scopes: Sequence[int]) -> None:
        self.found: list[_Place | None] = [None] * len(ops)
        self._elements, self._ops, self._scopes = elements, ops, scopes
        self._inside = bytearray(len(op.results) == 1 and bits >> len(op.operands) & 1 for op, bits in zip(ops, fused, strict=True))
        self._maker = [-1] * len(elements)
        self._after_main_ops()
        self._before_main_ops()

    def _after_main_ops(self) -> None:
        """Chains that begin with a main op, and reductions of what they end in."""
        ops, found, maker = self._ops, self.found, self._maker
        ahead: dict[int, _Place] = {}
        for op in ops:
            number = op.id
            for value in op.results:
                maker[value] = number
            if op.primitive in CHAINED:
                for value in op.operands:
                    if value in ahead and ops[ahead[value][0]].repeats == op.repeats:
                        found[number] = ahead[value]
            elif op.primitive in _APART:
                continue
            elif op.primitive.startswith("reduce_"):
                found[number] = self._joined(op)
            if self._inside[number] and (found[number] or op.primitive not in CHAINED):
                ahead[op.results[0]] = found[number] or (number, len(op.operands))

    def _before_main_ops(self) -> None:
        """Chains that lead to a main op; the first of several."""
        ops, found, inside = self._ops, self.found, self._inside
        first: list[_Place | None] = [None] * len(self._elements)
        for op in reversed(ops):
            home = found[op.id]
            alone = op.primitive in _ALONE
            if home is None and inside[op.id] and op.primitive in CHAINED and op.primitive not in _APART:
                home = first[op.results[0]]
                if home is not None and ops[home[0]].repeats != op.repeats:
                    home = None
                found[op.id] = home
            for position, value in enumerate(op.operands):
                first[value] = home or (None if alone else (op.id, position))

    def _joined(self, op: Op) -> _Place | None:
        """The fusion that makes the one tensor which a reduction reads, if the reduction needs nothing that comes later."""
        source, last = self._origin(op, max((self._elements[value] for value in op.operands), default=0))
        maker = self._ops[self._maker[source]] if source >= 0 and self._maker[source] >= 0 else None
        if maker is None or maker.primitive not in CHAINED or maker.primitive in _ALONE:
            return None
        home = self.found[maker.id] or (maker.id, len(maker.operands))
        main = self._ops[home[0]]
        fits = last < main.id and main.repeats == op.repeats and self._scopes[main.id] == self._scopes[op.id]
        return home if fits else None

    def _origin(self, op: Op, elements: int) -> tuple[int, int]:
        """The one tensor in memory of that many elements that an op's chain starts from, -1 where there is none, and the last op
        that makes anything else of what it needs; a number past all ops where there are several such tensors.
        """
        source, last = -1, -1
        for value in op.operands:
            number = self._maker[value]
            if number >= 0 and self._inside[number] and self._ops[number].primitive in CHAINED:
                one, late = self._origin(self._ops[number], min(elements, self._elements[value]))
            else:
                one, late = (value, -1) if self._elements[value] >= elements else (-1, number)
            if one >= 0 and source >= 0 and one != source:
                late = len(self._ops)
            source, last = max(source, one), max(last, late)
        return source, last


def _works(
    elements: Sequence[int], ops: Sequence[Op], homes: Sequence[_Place | None], moved: dict[_Place, int], arithmetic: Sequence[int]
) -> list[Work | None]:
    inside: dict[int, Work] = {}
    known: dict[Work, Work] = {}
    found: list[Work | None] = []
    for op, home in zip(ops, homes, strict=True):
        work = None
        if home is not None:
            flops = vector_flops(op)
            work = inside.get(flops)
            if work is None:
                work = inside[flops] = Work((), flops * _HIDDEN)
        elif op.primitive not in _ALONE:
            rates = [moved.get((op.id, place), 0) / max(1, elements[value]) for place, value in enumerate(op.operands + op.results)]
            work = Work(tuple(rates), float(arithmetic[op.id]))
            work = known.setdefault(work, work)
        found.append(work)
    return found

"""What each fusion of a step reads, writes and computes, charged to the op that it is built around.

The compiler computes chains of element-wise ops on the way into the matrix product, the reduction or the stored result that
needs them, in one kernel: what the chain reads and computes hides behind the product's multiplications, or they behind it. So a
fusion takes the longest of three times, and all of it is told of its one main op. A chain that leads to several is told of the
first: how the others read it too is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmdctx.ir import LITERAL, Op, Value, Work, item_bytes
from spmdctx.rules.fusion import CHAINED

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

_HIDDEN = 1 / 64
"""What is left of the price of arithmetic that hides in a fusion, so that splitting it is better than not."""

_Place = tuple[int, int]
"""A main op, and which of its operands or results, counted together."""

_Origin = tuple[int, int]
"""The one large tensor that a value is computed from, -1 where there is none, and the last op that makes anything else."""


def fusion_works(values: Sequence[Value], ops: Sequence[Op], fused: Sequence[int], scopes: Sequence[int]) -> list[Work | None]:
    """`Op.work` of every op, whose number is its place; `fused` holds their `Op.fused`, `scopes` the computation of each."""
    sizes = _sizes(values)
    homes = _homes(values, ops, fused, scopes)
    moved: dict[_Place, int] = {}
    arithmetic = [0] * len(ops)
    seen: set[_Place] = set()
    for op, bits, home in zip(ops, fused, homes, strict=True):
        main = home[0] if home else op.id
        if op.primitive not in _PRODUCTS and op.primitive not in NAMING:
            arithmetic[main] += vector_flops(op)
        if bits + 1 == 1 << len(op.operands) + len(op.results):
            continue  # nothing of it is in memory
        for position, value in enumerate((*op.operands, *op.results)):
            if not bits >> position & 1 and (main, value) not in seen:
                seen.add((main, value))
                place = home or (main, position)
                size = sizes[value]
                if op.primitive in _PICKING and position < len(op.operands):
                    size = min(size, sum(sizes[made] for made in op.results))
                moved[place] = moved.get(place, 0) + size
    return _works(values, ops, homes, moved, arithmetic)


def vector_flops(op: Op) -> int:
    """Operations of an op outside of matrix products, on the vector unit."""
    return op.flops * (_COSTLY_FLOPS if op.primitive in _COSTLY else 1)


def _homes(values: Sequence[Value], ops: Sequence[Op], fused: Sequence[int], scopes: Sequence[int]) -> list[_Place | None]:
    """Where in which fusion an op is computed; None for main ops and those that are priced on their own."""
    homes = _Forward(values, ops, fused, scopes).homes
    first: dict[int, _Place | None] = {}
    for op in reversed(ops):
        home = homes[op.id]
        if home is None and op.primitive in CHAINED and op.primitive not in _APART and _is_inside(op, fused[op.id]):
            home = first.get(op.results[0])
            if home is not None and ops[home[0]].repeats == op.repeats:
                homes[op.id] = home
            else:
                home = None
        for position, value in enumerate(op.operands):
            if value != LITERAL:
                first[value] = home or (None if op.primitive in _APART or op.primitive in NAMING else (op.id, position))
    return homes


class _Forward:
    """The homes of what a fusion computes after its main op: chains that begin with it, and reductions of what they end in."""

    def __init__(self, values: Sequence[Value], ops: Sequence[Op], fused: Sequence[int], scopes: Sequence[int]) -> None:
        self.homes: list[_Place | None] = [None] * len(ops)
        self._ops, self._scopes = ops, scopes
        self._elements = [*[math.prod(value.shape) for value in values], 0]
        # The op that makes each value, and of values never in memory what they are computed from.
        self._maker: list[int] = [-1] * (len(values) + 1)
        self._origin: dict[int, _Origin] = {}
        ahead: dict[int, _Place] = {}
        for op in ops:
            inside = _is_inside(op, fused[op.id])
            if op.primitive in CHAINED:
                self._follow(op, ahead, inside)
            elif op.primitive not in _APART:
                if op.primitive.startswith("reduce_"):
                    self._join(op)
                if inside:
                    ahead[op.results[0]] = self.homes[op.id] or (op.id, len(op.operands))
            for value in op.results:
                self._maker[value] = op.id

    def _follow(self, op: Op, ahead: dict[int, _Place], inside: bool) -> None:
        for value in op.operands:
            home = ahead.get(value)
            if home is not None and self._ops[home[0]].repeats == op.repeats:
                self.homes[op.id] = home
                if inside:
                    ahead[op.results[0]] = home
        if inside:
            self._origin[op.results[0]] = self._origin_of(op, self._elements[op.results[0]])

    def _origin_of(self, op: Op, elements: int) -> _Origin:
        """Of what an op computes: the one tensor of that many elements, and the last op that makes anything else it needs."""
        source, last = -1, -1
        for value in op.operands:
            known = self._origin.get(value)
            if known is None:
                known = (value, -1) if self._elements[value] >= elements else (-1, self._maker[value])
            if known[0] >= 0 and source >= 0 and known[0] != source:
                last = len(self._ops)
            source, last = max(source, known[0]), max(last, known[1])
        return source, last

    def _join(self, op: Op) -> None:
        """A reduction of one tensor that a fusion makes is computed by that fusion, if it needs nothing that comes later."""
        source, last = self._origin_of(op, max((self._elements[value] for value in op.operands), default=0))
        maker = self._maker[source] if source >= 0 else -1
        if (
            maker < 0
            or self._ops[maker].primitive not in CHAINED
            or self._ops[maker].primitive in _APART
            or self._ops[maker].primitive in NAMING
        ):
            return
        home = self.homes[maker] or (maker, len(self._ops[maker].operands))
        main = self._ops[home[0]]
        if last < main.id and main.repeats == op.repeats and self._scopes[main.id] == self._scopes[op.id]:
            self.homes[op.id] = home


def _is_inside(op: Op, bits: int) -> bool:
    """Whether the op's one result is never in memory."""
    return len(op.results) == 1 and bool(bits >> len(op.operands) & 1)


def _works(
    values: Sequence[Value], ops: Sequence[Op], homes: Sequence[_Place | None], moved: dict[_Place, int], arithmetic: Sequence[int]
) -> list[Work | None]:
    known: dict[tuple[tuple[float, ...], float], Work] = {}
    elements = [math.prod(value.shape) for value in values]
    found: list[Work | None] = []
    for op, home in zip(ops, homes, strict=True):
        if home is not None:
            key: tuple[tuple[float, ...], float] = ((), 0 if op.primitive in NAMING else vector_flops(op) * _HIDDEN)
        elif op.primitive in _APART or op.primitive in NAMING:
            found.append(None)
            continue
        else:
            places = enumerate((*op.operands, *op.results))
            key = (tuple([moved.get((op.id, place), 0) / max(1, elements[value]) for place, value in places]), float(arithmetic[op.id]))
        work = known.get(key)
        if work is None:
            work = known[key] = Work(*key)
        found.append(work)
    return found


def _sizes(values: Sequence[Value]) -> list[int]:
    """Bytes of each value; a last 0 stands for literals."""
    return [*[item_bytes(value.dtype) * math.prod(value.shape) for value in values], 0]

"""Follows the rows of a batch from its leaves to the loss, and tells whether the loss is a sum over them.

    rows         each row is computed from one row of every leaf; `dims` holds the rows
    sum          a sum over all rows, or linear in one: a loss of which devices can compute their parts
    statistic    any other function of all rows, such as a maximum or the square of a mean

A sum or rows may be *impure*: computed with a statistic, such as the mean and variance of BatchNorm, or the number of rows that a mask
leaves. What is `lost` cannot be followed, and what is `wrong` shows that the dimension is not that of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import ADDITIONS, BOUNDARY_OF, CASTS, COND_EXIT, LAYOUT, LOOKED_UP, MATRIX_PRODUCTS, SCAN_ENTER, WHILE_NEXT
from spmdctx.ir.rule import DimFactors, FactorKind


class FlowKind(StrEnum):
    """What a value is to the batch; the later kinds prevail where loops and branches join."""

    ROWS = "rows"
    SUM = "sum"
    STATISTIC = "statistic"
    LOST = "lost"
    WRONG = "wrong"


_ORDER = tuple(FlowKind)


class Flow(NamedTuple):
    """How a value depends on the batch.

    `dims` maps the dimensions that hold rows to the number of rows in each, in pairs. `is_partial` marks rows of which some were
    already summed. `is_product` marks a statistic that is a product of sums, as in losses that balance experts. `is_scaled` marks
    what is, as a linear function, multiplied or divided by something that is not of the batch: the number of its rows, maybe.
    `divisor` is what it is divided by in numbers that are known. `why` says in words what is lost or wrong.
    """

    kind: FlowKind
    dims: tuple[tuple[int, int], ...] = ()
    is_impure: bool = False
    is_partial: bool = False
    is_product: bool = False
    why: str = ""
    is_scaled: bool = False
    divisor: float = 1.0

    @property
    def is_sum(self) -> bool:
        """True if devices can compute the value from their own rows each."""
        return self.kind in (FlowKind.SUM, FlowKind.ROWS)

    @property
    def rank(self) -> int:
        """The place of the kind in the order in which kinds prevail."""
        return _ORDER.index(self.kind)


Flows = dict[int, Flow]

_JOINTLY_LINEAR = (
    ADDITIONS
    | CASTS
    | LAYOUT
    | {
        *(
            "sub",
            "neg",
            "real",
            "imag",
            "broadcast_in_dim",
            "reduce_sum",
            "slice",
            "split",
            "rev",
            "concatenate",
            "stack",
            "unstack",
            "pad",
        ),
        *("cumsum", "select_n", "optimization_barrier", "dynamic_slice", "stop_gradient", "pvary", *BOUNDARY_OF),
    }
)
_MULTILINEAR = MATRIX_PRODUCTS | {"mul"}
_SCALING = _MULTILINEAR | {"div"}
_MOST = 2.0**60
UNKNOWN: Mapping[int, float] = {}
"""Divisors where none is known."""

_EXACT_SUMS = ("float", "bfloat", "complex")
_INDEXED = frozenset({LOOKED_UP, "dynamic_slice"})
NUMBERING = frozenset({"iota", "broadcast_in_dim", "reshape", "convert_element_type", "lt", "add", "select_n"})
"""The ops that make the indices 0, 1, 2, ... of all rows."""


def follow(graph: Graph, ops: Sequence[Op], leaves: Mapping[int, int], divisors: Mapping[int, float] = UNKNOWN) -> Flows:
    """Follows some leaves through ops in execution order, around loops until nothing changes.

    Args:
        graph: the step, whose loss is over the whole batch.
        ops: those to follow.
        leaves: the dimension of each leaf that holds the rows.
        divisors: the number by which an op divides, where it is known.
    """
    follower = _Follower(graph, divisors)
    return follower.run(ops, {value: Flow(FlowKind.ROWS, ((dim, graph.values[value].shape[dim]),)) for value, dim in leaves.items()})


class _Follower:
    def __init__(self, graph: Graph, divisors: Mapping[int, float]) -> None:
        self._graph, self._divisors = graph, divisors
        self._tied: dict[int, list[int]] = {}
        inputs = frozenset(graph.inputs)
        for left, right in graph.ties:
            if left not in inputs:
                self._tied.setdefault(right, []).append(left)

    def run(self, ops: Sequence[Op], flows: Flows) -> Flows:
        again, carried = True, dict[int, Flow]()
        while again:
            again = False
            for op in ops:
                if flows.keys().isdisjoint(op.operands):
                    continue
                for value, flow in zip(op.results, self._scaled(op, flows), strict=True):
                    if flow is None:
                        continue
                    # A carry keeps what earlier passes found, so it changes a few times at most.
                    flows[value] = _joined(carried.get(value), flow)
                    for start in self._tied.get(value, ()):
                        joined = _joined(flows.get(start), flows[value])
                        if joined != flows.get(start):
                            flows[start], carried[start], again = joined, joined, True
        return flows

    def _scaled(self, op: Op, flows: Flows) -> Sequence[Flow | None]:
        """Returns the results of an op, with what is known of their scale; only sums of rows as they are have none."""
        given = [flows.get(value) for value in op.operands if value != LITERAL]
        known = [flow for flow in given if flow is not None]
        is_scaled, divisor = False, 1.0
        if op.primitive in _SCALING:
            is_scaled = any(flow.is_scaled for flow in known) or (len(known) < len(op.operands) and op.id not in self._divisors)
            divisor = min(prod(flow.divisor for flow in known) * self._divisors.get(op.id, 1.0), _MOST)
        elif op.primitive in _JOINTLY_LINEAR:
            is_scaled = all(flow.is_scaled for flow in known)
            divisor = min((flow.divisor for flow in known if not flow.is_scaled), default=1.0)
        return [flow and flow._replace(is_scaled=is_scaled, divisor=divisor) for flow in self._results(op, flows)]

    def _results(self, op: Op, flows: Flows) -> Sequence[Flow | None]:
        given = [flows.get(value) if value != LITERAL else None for value in op.operands]
        known = [flow for flow in given if flow is not None]
        worst = max(known, key=lambda flow: flow.rank)
        if worst.kind in (FlowKind.LOST, FlowKind.WRONG):
            return [worst] * len(op.results)
        impure = any(flow.is_impure for flow in known)
        if op.primitive in (COND_EXIT, WHILE_NEXT) and given[-1] is not None:  # the batch decides what runs
            given[-1], impure = None, True
        if any(flow is not None and flow.kind is FlowKind.ROWS for flow in given):
            return self._of_rows(op, given, impure)
        if op.primitive == "convert_element_type" and not self._graph.values[op.results[0]].dtype.startswith(_EXACT_SUMS):
            return [Flow(FlowKind.STATISTIC)]  # it rounds the sum
        return [_of_sums(op, given, impure)] * len(op.results)

    def _of_rows(self, op: Op, given: Sequence[Flow | None], impure: bool) -> Sequence[Flow]:
        """Returns the results of an op that reads rows."""
        split: dict[int, int] | None = None
        for position, flow in enumerate(given):
            if flow is None or flow.kind is not FlowKind.ROWS:
                impure = impure or flow is not None
                continue
            own = self._factors(op, position, flow)
            if own is None:
                return self._lost(op)
            if split is not None and own != split:
                return self._wrong(op, f"{self._named(op)} brings each of its rows together with every row")
            split = own
        assert split is not None, "one operand has rows"
        rows = [flow for flow in given if flow is not None and flow.kind is FlowKind.ROWS]
        is_partial = any(flow.is_partial for flow in rows)
        if is_partial and op.primitive not in _JOINTLY_LINEAR:
            return self._lost(op)
        if op.primitive == LOOKED_UP and any(op.rule.kinds[factor] is FactorKind.REDUCTION for factor in split):
            return self._wrong(op, f"{self._named(op)} looks its rows up by index")
        if op.primitive.startswith("scatter") and given[0] is not None and not _are_windows(op, split):
            return self._lost(op)
        if op.primitive == "ragged_dot_general" and given[2] is None and _are_grouped(op, split):
            return self._lost(op)  # its sizes count all rows: which group has a row depends on the rows before it
        return self._through(op, split, impure, is_partial)

    def _through(self, op: Op, split: Mapping[int, int], impure: bool, is_partial: bool) -> Sequence[Flow]:
        """Returns the results of an op whose factors `split` are rows."""
        rule, kept, reduced = op.rule, dict(split), False
        for factor in split:
            if rule.kinds[factor] is FactorKind.REDUCTION and factor not in rule.blocked:
                del kept[factor]
                reduced = True
            elif op.primitive == SCAN_ENTER and factor in rule.blocked:
                del kept[factor]  # the loop takes one part of the rows after the other
                if not kept:
                    return self._lost(op)
            elif rule.kinds[factor] is not FactorKind.PASS_THROUGH or factor in rule.blocked:
                return self._lost(op)
        if reduced and rule.combiner != "add":
            return self._lost(op) if kept else [Flow(FlowKind.STATISTIC)] * len(op.results)
        if not kept:
            return [Flow(FlowKind.SUM, is_impure=impure)] * len(op.results)
        found = [_dims_of_rows(dims, kept, rule.sizes) for dims in rule.results]
        if any(dims is None for dims in found):
            return self._lost(op)
        return [Flow(FlowKind.ROWS, dims or (), impure, is_partial or reduced) for dims in found]

    def _factors(self, op: Op, position: int, flow: Flow) -> dict[int, int] | None:
        """Returns the factors of an op that are rows of one operand; rows looked up by their own numbers are those of the numbers."""
        if op.primitive == LOOKED_UP and position == 0 and len(flow.dims) == 1 and numbered_dim(self._graph, op) == flow.dims[0][0]:
            return dict.fromkeys(op.rule.operands[1][0], flow.dims[0][1])
        return _factors_of_rows(op, position, flow)

    def _named(self, op: Op) -> str:
        source = self._graph.origins[op.id].source
        return f"{op.primitive} ({source})" if source else op.primitive

    def _lost(self, op: Op) -> Sequence[Flow]:
        return [Flow(FlowKind.LOST, why=f"its rows cannot be followed through {self._named(op)}")] * len(op.results)

    def _wrong(self, op: Op, why: str) -> Sequence[Flow]:
        return [Flow(FlowKind.WRONG, why=why)] * len(op.results)


def numbered_dim(graph: Graph, op: Op) -> int | None:
    """Returns the dimension that a look-up reads at 0, 1, 2, ..., one for each row of indices, as in `x[jnp.arange(n), labels]`."""
    if op.primitive != LOOKED_UP or op.operands[1] == LITERAL or op.operands[0] == LITERAL:
        return None
    rule, (table, indices) = op.rule, op.operands[:2]
    places = [dim for dim, own in enumerate(rule.operands[0]) if own and rule.kinds[own[0]] is FactorKind.REDUCTION]
    shape, maker = graph.values[indices].shape, _maker(graph, indices)
    parts = [indices]
    if maker is not None and maker.primitive == "concatenate":
        parts = list(maker.operands)
    if len(parts) != len(places) or len(shape) < 2 or prod(shape[1:-1]) != 1:
        return None
    for dim, part in zip(places, parts, strict=True):
        if graph.values[table].shape[dim] == shape[0] and part != LITERAL and _is_numbered(graph, part):
            return dim
    return None


def _is_numbered(graph: Graph, value: int) -> bool:
    """Returns whether a value is made by an iota, without any input."""
    waiting, has_iota = [value], False
    while waiting:
        maker = _maker(graph, waiting.pop())
        if maker is None or maker.primitive not in NUMBERING:
            return False
        has_iota = has_iota or maker.primitive == "iota"
        waiting += [operand for operand in maker.operands if operand != LITERAL]
    return has_iota


def _maker(graph: Graph, value: int) -> Op | None:
    producer = graph.producers.get(value)
    return None if producer is None else graph.ops[producer]


def _of_sums(op: Op, given: Sequence[Flow | None], impure: bool) -> Flow:
    """Returns the result of an op that reads sums and statistics, but no rows."""
    flows = {position: flow for position, flow in enumerate(given) if flow is not None}
    sums = [position for position, flow in flows.items() if flow.kind is FlowKind.SUM]
    rest = [flow for flow in flows.values() if flow.kind is not FlowKind.SUM]
    total, product = Flow(FlowKind.SUM, is_impure=impure or bool(rest)), Flow(FlowKind.STATISTIC, is_product=True)
    if op.primitive in _INDEXED:
        return total if sums == [0] == list(flows) else Flow(FlowKind.STATISTIC)
    if op.primitive == "div" and 0 in sums:
        return total._replace(is_impure=impure or len(flows) > 1)
    if op.primitive == "select_n" and sums and set(flows) - set(sums) <= {0}:
        return total
    if op.primitive in _MULTILINEAR and (sums or any(flow.is_product for flow in rest)):
        return total if len(sums) == 1 and not rest else product
    if op.primitive in ("square", "integer_pow") and sums:
        return product
    if op.primitive in _JOINTLY_LINEAR and all(flow.is_product for flow in rest):
        return total if sums else product
    return Flow(FlowKind.STATISTIC)


def _joined(old: Flow | None, new: Flow) -> Flow:
    """Returns what a loop's carry is that starts as `old` and is `new` in the next iteration."""
    if old is None or old == new:
        return new
    later = max(old, new, key=lambda flow: flow.rank)
    is_scaled = old.is_scaled or new.is_scaled or old.divisor != new.divisor
    divisor = new.divisor if old.divisor == new.divisor else 1.0
    if FlowKind.ROWS in (old.kind, new.kind) and later.kind not in (FlowKind.LOST, FlowKind.WRONG):
        if old.dims != new.dims:
            return Flow(FlowKind.LOST, why="a loop carries its rows in another dimension than before")
        return new._replace(
            is_impure=old.is_impure or new.is_impure,
            is_partial=old.is_partial or new.is_partial,
            is_scaled=is_scaled,
            divisor=divisor,
        )
    is_product = later.is_product and (old.kind is not new.kind or (old.is_product and new.is_product))
    is_impure = old.is_impure or new.is_impure
    return later._replace(is_impure=is_impure, is_product=is_product, is_scaled=is_scaled, divisor=divisor)


def _factors_of_rows(op: Op, position: int, flow: Flow) -> dict[int, int] | None:
    """Returns the factors of an op that are rows of one operand, with the rows in each; None if they are no factors of their own."""
    found: dict[int, int] = {}
    for dim, rows in flow.dims:
        factors = op.rule.operands[position][dim]
        if len(factors) == 1:
            found[factors[0]] = rows
            continue
        left = rows
        for factor in factors:
            if left == 1:
                break
            if left % op.rule.sizes[factor]:
                return None
            found[factor] = op.rule.sizes[factor]
            left //= op.rule.sizes[factor]
        if left != 1:
            return None
    return found


def _dims_of_rows(dims: Sequence[DimFactors], rows: Mapping[int, int], sizes: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Returns the dimensions of a result that hold rows; None if something else is major to rows there, or rows are missing."""
    found, seen = [], 0
    for dim, factors in enumerate(dims):
        leading = next((count for count, factor in enumerate(factors) if factor not in rows), len(factors))
        if any(factor in rows for factor in factors[leading:]):
            return None
        if any(rows[factor] != sizes[factor] for factor in factors[: max(leading - 1, 0)]):
            return None
        if leading:
            found.append((dim, prod(rows[factor] for factor in factors[:leading])))
        seen += leading
    return tuple(found) if seen == len(rows) else None


def _are_grouped(op: Op, rows: Mapping[int, int]) -> bool:
    """Returns whether rows may be what a ragged product cuts into groups: a dimension of its left operand alone, or contracted."""
    left, right = ({factor for factors in op.rule.operands[place] for factor in factors} for place in (0, 1))
    return any(factor in left and (factor not in right or op.rule.kinds[factor] is FactorKind.REDUCTION) for factor in rows)


def _are_windows(op: Op, rows: Mapping[int, int]) -> bool:
    """Returns whether a scatter writes whole rows: whether they are also rows of its updates."""
    updates = {factor for factors in op.rule.operands[2] for factor in factors}
    return rows.keys() <= updates

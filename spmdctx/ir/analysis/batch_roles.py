"""Tells which leaves that were taken for a batch are one, by what the step does with their dimension 0.

Leaves belong together if their dimensions 0 meet as one dimension on the way to the loss. Such a *family* is a batch if the loss is
a sum over it (`batch_flow`). It is none if its dimension 0 is also a dimension of something whole, such as a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from spmdctx.ir.analysis.batch_flow import NUMBERING, UNKNOWN, Flow, FlowKind, follow, numbered_dim
from spmdctx.ir.graph import LITERAL, Graph, Op, Role, Value
from spmdctx.ir.primitives import LOOKED_UP

_Node = tuple[int, int]
"""A dimension of a value."""

_SHAPED = frozenset({"broadcast_in_dim", "broadcast_to", "random_bits", "random_split", "rng_bit_generator", "iota"})
"""Ops whose results have dimensions of any size that the step asks for."""

_RANDOM = frozenset({"random_bits", "rng_bit_generator"})

_ROUNDED = 0.99
"""The share of the number of rows by which a mean divides at least: 1/n in bfloat16 is off by 0.4 %."""


class Verdict(NamedTuple):
    """What the uses of some guessed leaves say.

    `batch` holds the leaves that are a batch, `others` those that are none or not surely one, with the reason. `impure` holds the
    leaves of `batch` over which the loss is a sum only within a whole batch: it reads a mean over it, for example. `repeated` holds the
    ops that draw a random number for each row of the batch by a key that is part of the program: devices draw the same ones. `added`
    holds the leaves of `batch` whose rows a loss adds up, and does not divide by their number, so that it is no mean over them. `divided`
    holds, for each loss, those whose sum it divides by a number of the program that is not smaller.
    """

    batch: frozenset[int]
    others: Mapping[int, str]
    wrong: frozenset[int]
    impure: frozenset[int]
    repeated: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()
    divided: Mapping[int, frozenset[int]] = {}


class _Family(NamedTuple):
    """Leaves with one dimension 0, and state that has it too; `foreign` says what else has it, and `is_certain` that this is whole."""

    leaves: tuple[int, ...]
    carried: tuple[int, ...]
    foreign: str = ""
    is_certain: bool = False

    @property
    def sources(self) -> dict[int, int]:
        """The leaves to follow, all along dimension 0."""
        return dict.fromkeys((*self.leaves, *self.carried), 0)


class _Judged(NamedTuple):
    """A family with the worst and the best way in which a loss depends on it, None where none does, and whether one adds up its rows.

    `divided` holds the losses whose sum a known number divides that is as large as the number of rows.
    """

    family: _Family
    worst: Flow | None
    best: Flow | None
    is_added: bool = False
    divided: frozenset[int] = frozenset()


def judge(
    graph: Graph,
    leaves: Sequence[int],
    losses: Collection[int],
    differentiated: Set[int],
    divisors: Mapping[int, float] = UNKNOWN,
    *,
    strictly: bool,
) -> Verdict:
    """Judges guessed leaves of a batch by what the losses do with them.

    Args:
        graph: the step, with losses over the whole batch.
        leaves: the guessed leaves, inputs with a dimension.
        losses: the values that are judged by.
        differentiated: inputs by which a loss is differentiated, or that an optimizer updates.
        divisors: the number by which an op divides, where it is known.
        strictly: whether every loss must be a sum over a batch; else one of them is enough.
    """
    ops = _ops_before(graph, losses)
    differentiated = {*differentiated, *_sources(graph, _ops_before(graph, differentiated), ())}
    families = _families(graph, ops, leaves, differentiated)
    judged = [_judged(graph, ops, family, losses, divisors) for family in families]
    found = [one for one in judged if _is_batch(one, strictly=strictly)]
    chosen, met = _together(graph, ops, found, losses, strictly=strictly)
    batch = frozenset(leaf for one in chosen for leaf in one.family.leaves)
    impure = frozenset(leaf for one in chosen if one.worst is not None and one.worst.is_impure for leaf in one.family.leaves)
    unread = frozenset(leaf for one in judged if one.worst is None and not one.family.foreign for leaf in one.family.leaves)
    batch |= _like(graph, unread, batch)
    others: dict[int, str] = {}
    wrong: set[int] = set()
    for one in judged:
        rest = [leaf for leaf in one.family.leaves if leaf not in batch]
        others.update(dict.fromkeys(rest, met if one in found else _reason(one)))
        if one.family.is_certain or (one.best is not None and one.best.kind in (FlowKind.WRONG, FlowKind.STATISTIC)):
            wrong.update(rest)
    added = frozenset(leaf for one in chosen if one.is_added for leaf in one.family.leaves)
    divided = {loss: frozenset(leaf for one in chosen if loss in one.divided for leaf in one.family.leaves) for loss in losses}
    return Verdict(batch, others, frozenset(wrong), impure, _repeated(graph, ops, batch), added, divided)


def _repeated(graph: Graph, ops: Sequence[Op], batch: Set[int]) -> frozenset[int]:
    """Returns the ops that draw random numbers for the rows of a batch, without any input of the step."""
    reached, drawn = set(graph.inputs), []
    for op in ops:
        if not reached.isdisjoint(op.operands):
            reached.update(op.results)
        elif op.primitive in _RANDOM:
            drawn.append(op)
    if not drawn or not batch:
        return frozenset()
    classes = _classes(graph, ops)
    rows = {classes.find((leaf, 0)) for leaf in batch}
    return frozenset(
        op.id
        for op in drawn
        if any(classes.find((value, dim)) in rows for value in op.results for dim in range(len(graph.values[value].shape)))
    )


def _is_batch(one: _Judged, *, strictly: bool) -> bool:
    flow = one.worst if strictly else one.best
    return not one.family.foreign and flow is not None and flow.is_sum


def _together(
    graph: Graph, ops: Sequence[Op], found: list[_Judged], losses: Collection[int], *, strictly: bool
) -> tuple[list[_Judged], str]:
    """Returns the families that can be split at once, and why others that could be split alone are not among them."""
    if len(found) < 2:
        return found, ""
    leaves = tuple(leaf for one in found for leaf in one.family.leaves)
    carried = tuple(leaf for one in found for leaf in one.family.carried)
    whole = _judged(graph, ops, _Family(leaves, carried), losses)
    if _is_batch(whole, strictly=strictly):
        return found, ""
    pure = [one for one in found if one.worst is not None and not one.worst.is_impure]
    candidates = pure or ([] if strictly else found)
    if not strictly and len(candidates) > 1:
        return found, ""
    if not candidates:
        return [], "the loss is a sum over its rows and over those of another argument too"
    first = max(candidates, key=lambda one: (len(one.family.leaves), one.family.leaves))  # batches come last among arguments
    met = graph.values[first.family.leaves[0]].path
    return [first], f"the loss is a sum over its rows, but they meet all rows of '{met}'"


def _reason(one: _Judged) -> str:
    """Returns why a family is no batch, or not surely one."""
    if one.family.foreign:
        return one.family.foreign
    flow = one.worst
    if flow is None:
        return "the loss does not depend on it"
    return flow.why or "the loss is no sum and no mean over its rows"


def _judged(graph: Graph, ops: Sequence[Op], family: _Family, losses: Collection[int], divisors: Mapping[int, float] = UNKNOWN) -> _Judged:
    if family.foreign:
        return _Judged(family, None, None)
    flows = follow(graph, ops, family.sources, divisors)
    reached = {value: flows[value] for value in sorted(losses) if value in flows}

    def badness(flow: Flow) -> tuple[int, bool]:
        return (0 if flow.is_sum else flow.rank), flow.is_impure

    rows = min((graph.values[leaf].shape[0] for leaf in family.leaves), default=0)
    plain = {value: flow for value, flow in reached.items() if flow.kind is FlowKind.SUM and not (flow.is_impure or flow.is_scaled)}
    divided = frozenset(value for value, flow in plain.items() if flow.divisor >= _ROUNDED * rows)
    worst, best = max(reached.values(), key=badness, default=None), min(reached.values(), key=badness, default=None)
    return _Judged(family, worst, best, is_added=len(divided) < len(plain), divided=divided)


def _like(graph: Graph, leaves: Set[int], batch: Set[int]) -> frozenset[int]:
    """Returns those leaves that no loss depends on, but have the rows of a batch: in what else the step computes, or read by nothing."""
    if not leaves or not batch:
        return frozenset()
    classes, sizes = _classes(graph, graph.ops), {graph.values[leaf].shape[0] for leaf in batch}
    roots = {classes.find((leaf, 0)) for leaf in batch}
    unused = {leaf for leaf in leaves if not graph.readers[leaf] and graph.values[leaf].shape[0] in sizes}
    return frozenset(leaf for leaf in leaves if leaf in unused or classes.find((leaf, 0)) in roots)


def _ops_before(graph: Graph, values: Iterable[int]) -> list[Op]:
    """Returns the ops from which some values are computed, in execution order; a loop's carry is computed from its next value."""
    inputs = frozenset(graph.inputs)
    after: dict[int, list[int]] = {}
    for before, later in graph.ties:
        if before not in inputs:
            after.setdefault(before, []).append(later)
    needed, waiting, ops = set(values), list(values), set()
    while waiting:
        value = waiting.pop()
        producer = graph.producers.get(value)
        reached = list(after.get(value, ()))
        if producer is not None and producer not in ops:
            ops.add(producer)
            reached += graph.ops[producer].operands
        for other in reached:
            if other != LITERAL and other not in needed:
                needed.add(other)
                waiting.append(other)
    return [graph.ops[number] for number in sorted(ops)]


def _families(graph: Graph, ops: Sequence[Op], leaves: Sequence[int], differentiated: Set[int]) -> list[_Family]:
    """Groups leaves by the dimension that their dimensions 0 are, in the order of the leaves."""
    classes = _classes(graph, ops)
    dims_of: dict[_Node, list[_Node]] = {}
    for value in _sources(graph, ops, leaves):
        for dim in range(len(graph.values[value].shape)):
            dims_of.setdefault(classes.find((value, dim)), []).append((value, dim))
    made = {classes.find(node): op for node, op in _made_of_something(graph, ops)}
    carried = {before for before, _ in graph.ties} - differentiated
    families: list[_Family] = []
    done: set[int] = set()
    for leaf in leaves:
        if leaf in done:
            continue
        root = classes.find((leaf, 0))
        members = dims_of[root]
        group = tuple(value for value, dim in members if value in leaves and dim == 0)
        done.update(group)
        state = tuple(value for value, dim in members if value in carried and value not in leaves and dim == 0)
        other = next(((value, dim) for value, dim in members if dim > 0 or value not in {*group, *state}), None)
        if other is not None:
            families.append(_Family(group, state, _foreign(graph.values[other[0]], other[1]), is_certain=True))
        elif root in made:
            op = made[root]
            why = f"its rows meet those that {op.primitive} makes ({graph.origins[op.id].source}), which cannot be followed"
            families.append(_Family(group, state, why))
        else:
            families.append(_Family(group, state))
    return families


def _classes(graph: Graph, ops: Sequence[Op]) -> _Classes:
    """Returns the dimensions that are one in some ops."""
    inputs, classes = frozenset(graph.inputs), _Classes()
    for op in ops:
        classes.unite(op)
        numbered = numbered_dim(graph, op)
        if numbered is not None:
            classes.join((op.operands[0], numbered), (op.operands[1], 0))
    for before, after in graph.ties:
        if before not in inputs:
            for dim in range(len(graph.values[before].shape)):
                classes.join((before, dim), (after, dim))
    return classes


def _made_of_something(graph: Graph, ops: Sequence[Op]) -> Iterator[tuple[_Node, Op]]:
    """Yields the dimensions that ops make out of others, so that nobody knows whose rows they hold.

    Broadcasts and random numbers have the shape that the step asks for, and so has what is made of literals. Numbers of rows are
    others on each device, and may only look up the rows that they number.
    """
    depends, known = set(graph.inputs), {op.id for op in ops}
    for op in ops:
        if op.primitive == "iota" and not _only_numbers_rows(graph, known, op.results[0]):
            yield from (((op.results[0], dim), op) for dim in range(len(graph.values[op.results[0]].shape)))
        sources = [value for value in op.operands if value != LITERAL]
        if all(value in graph.producers and value not in depends for value in sources):
            continue
        depends.update(op.results)
        if op.primitive in _SHAPED:
            continue
        led = {factors[0] for dims in op.rule.operands for factors in dims if factors}
        for value, dims in zip(op.results, op.rule.results, strict=True):
            for dim, size in enumerate(graph.values[value].shape):
                if size > 1 and (not dims[dim] or dims[dim][0] not in led):
                    yield (value, dim), op


def _only_numbers_rows(graph: Graph, ops: Set[int], iota: int) -> bool:
    """Returns whether, of some ops, only look-ups of the rows that they number read the numbers 0, 1, 2, ..."""
    waiting = [iota]
    while waiting:
        value = waiting.pop()
        for op in graph.readers[value]:
            if op.id not in ops:
                continue
            if op.primitive == LOOKED_UP and op.operands[1] == value:
                if numbered_dim(graph, op) is None:
                    return False
            elif op.primitive in NUMBERING or op.primitive == "concatenate":
                waiting += op.results
            else:
                return False
    return True


def _foreign(value: Value, dim: int) -> str:
    named = f"dimension {dim} of '{value.path}'" if value.role is not Role.CONSTANT else "a dimension of a constant array"
    return f"its dimension 0 is also {named}"


def _sources(graph: Graph, ops: Sequence[Op], leaves: Sequence[int]) -> list[int]:
    """Returns the leaves, and the inputs and constants that ops read."""
    read = {value for op in ops for value in op.operands if value != LITERAL and value not in graph.producers}
    return sorted(read | set(leaves))


class _Classes:
    """Dimensions that are one: those that share a factor of an op."""

    def __init__(self) -> None:
        self._parent: dict[_Node, _Node] = {}

    def find(self, node: _Node) -> _Node:
        root = node
        while (above := self._parent.get(root, root)) != root:
            root = above
        while node != root:
            self._parent[node], node = root, self._parent.get(node, root)
        return root

    def join(self, one: _Node, other: _Node) -> None:
        """Makes two dimensions one."""
        first, second = self.find(one), self.find(other)
        if first != second:
            self._parent[second] = first

    def unite(self, op: Op) -> None:
        """Makes the dimensions of an op one whose leading factor is one."""
        leaders: dict[int, _Node] = {}
        for values, sides in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for value, dims in zip(values, sides, strict=False):
                if value == LITERAL:
                    continue
                for dim, factors in enumerate(dims):
                    if factors:
                        self.join(leaders.setdefault(factors[0], (value, dim)), (value, dim))

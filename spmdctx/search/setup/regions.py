"""The classes of dimensions that belong together on a `shard()` region's boundary, joined by the rules of the ops between the marks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from spmdctx.ir.graph import LITERAL, Graph, Mark, Op
from spmdctx.ir.layout import FREE, Layout
from spmdctx.ir.rule import OpRule

Node = int
"""A value and the number of one of its dimensions."""

_MAX_RANK = 256


def node(value: int, dim: int) -> Node:
    """Returns the node of a value's dimension."""
    return value * _MAX_RANK + dim


_GRAD = "_grad"


def base_side(mark: Mark) -> str:
    """Returns the side of the forward pass that a mark belongs to: a cotangent is split like its primal."""
    return mark.side.removesuffix(_GRAD)


def spoken_dims(mark: Mark) -> list[int]:
    """Lists the dimensions that the mark's strategy names; those that vmap added are left out."""
    if isinstance(mark.strategy, Layout):
        slices: Sequence[int] = mark.strategy.strategy
    elif isinstance(mark.strategy, tuple):
        slices = mark.strategy
    else:
        return []
    return [dim for dim, number in enumerate(slices) if number != FREE]


class Links:
    """The facts of the graph that all regions need: readers and ties of values, and the op that each mark belongs to."""

    def __init__(self, graph: Graph, marks: Iterable[Mark]) -> None:
        self.graph = graph
        self.mark_of_op = {mark.op: mark for mark in marks}
        self._joints: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {}

    def joints(self, rule: OpRule) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Groups the (tensor, dimension) pairs that belong together in an op; a compound dimension counts by its major factor."""
        known = self._joints.get(id(rule))
        if known is None:
            groups: dict[int, list[tuple[int, int]]] = {}
            for position, dims in enumerate((*rule.operands, *rule.results)):
                for dim, factors in enumerate(dims):
                    if factors:
                        groups.setdefault(factors[0], []).append((position, dim))
            known = self._joints[id(rule)] = tuple(tuple(group) for group in groups.values() if len(group) > 1)
        return known

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The ids of the ops that read a value, by value id."""
        readers: dict[int, list[int]] = defaultdict(list)
        for op in self.graph.ops:
            for value in op.operands:
                if value != LITERAL:
                    readers[value].append(op.id)
        return readers

    @cached_property
    def ties(self) -> dict[int, list[int]]:
        """The values tied to a value, by value id."""
        ties: dict[int, list[int]] = defaultdict(list)
        for first, second in self.graph.ties:
            ties[first].append(second)
            ties[second].append(first)
        return ties

    def reader(self, mark: Mark) -> Op | None:
        """Returns the op that the marked value goes into, or for a result the op that makes it; None if there is none."""
        if base_side(mark) == "out":
            maker = self.graph.producers.get(self.graph.ops[mark.op].operands[0])
            return None if maker is None else self.graph.ops[maker]
        return next((self.graph.ops[op] for op in self.readers[mark.value] if op not in self.mark_of_op), None)


class DimClasses:
    """Union-find over the dimensions of one region's values."""

    def __init__(self, links: Links, marks: Sequence[Mark]) -> None:
        self._parents: dict[Node, Node] = {}
        self._links = links
        if len({(base_side(mark), mark.position) for mark in marks if mark.strategy is not None}) > 1:
            self._walk(marks)
        # The copies of one region (recomputation, tangents, a cached trace) carry the same strategies.
        first: dict[tuple[str, int], Mark] = {}
        for mark in marks:
            other = first.setdefault((base_side(mark), mark.position), mark)
            for own, theirs in zip(spoken_dims(mark), spoken_dims(other), strict=False):
                self._join(node(mark.value, own), node(other.value, theirs))

    def find(self, item: Node) -> Node:
        """Returns the root of a dimension's class."""
        parents = self._parents
        parent = parents.get(item, item)
        while parent != item:
            parents[item] = item = parents.get(parent, parent)
            parent = parents.get(item, item)
        return item

    def _join(self, a: Node, b: Node) -> None:
        self._unite(self.find(a), self.find(b))

    def _unite(self, a: Node, b: Node) -> Node:
        """Makes one class of two, given by their roots, and returns its root."""
        if a < b:
            self._parents[b] = a
            return a
        if b < a:
            self._parents[a] = b
        return b

    def _walk(self, marks: Sequence[Mark]) -> None:
        """Joins dimensions along all ops that depend on the region's arguments, up to its results and all cotangents."""
        region = marks[0].region
        values, ops = self._links.graph.values, self._links.graph.ops
        pending = [mark.value for mark in marks if mark.side in ("in", "parameter")]
        seen, done = set(pending), set()
        while pending:
            value = pending.pop()
            following = []
            for tied in self._links.ties.get(value, ()):
                for dim in range(len(values[value].shape)):
                    self._join(node(value, dim), node(tied, dim))
                following.append(tied)
            for index in self._links.readers.get(value, ()):
                if index in done:
                    continue
                done.add(index)
                mark = self._links.mark_of_op.get(index)
                if mark is not None and mark.side.endswith(_GRAD):
                    continue
                self._join_op(ops[index])
                if mark is None or mark.region != region or mark.side != "out":
                    following.extend(ops[index].results)
            for result in following:
                if result not in seen and values[result].shape:
                    seen.add(result)
                    pending.append(result)

    def _join_op(self, op: Op) -> None:
        """Joins dimensions through the op's factors."""
        tensors = (*op.operands, *op.results)
        for (first, dim), *others in self._links.joints(op.rule):
            root = self.find(node(tensors[first], dim))
            for position, other in others:
                root = self._unite(root, self.find(node(tensors[position], other)))


def single_op(links: Links, marks: Sequence[Mark]) -> Op | None:
    """Returns the op that is the whole region: it reads marked arguments only and makes the marked result. None if there is none."""
    arguments = {mark.value for mark in marks if mark.side == "in"}
    makers = {links.graph.producers.get(links.graph.ops[mark.op].operands[0], -1) for mark in marks if mark.side == "out"}
    if len(makers) != 1 or -1 in makers:
        return None
    op = links.graph.ops[makers.pop()]
    operands = [value for value in op.operands if value != LITERAL]
    return op if operands and arguments.issuperset(operands) and op.id not in links.mark_of_op else None

"""Evaluates the objective of all searches op by op, in plain code that knows no search and no candidates.

    sum over ops that are not free to place, times their repeats:
        compute + reshards of the operands + reductions of partial results + reshards of the results

Matrix products of one computation that read the same value get it through one sharding `u`. They cost the minimum over u of R(stored ->
u) + sum R(u -> wanted). If the compiler merges partial sums, an addition that alone reads two unreduced terms adds them first, and their
sum is reduced once. If all readers of a sum take slices of it, it may be scattered to them. Seconds of weight gathers and gradient
reductions that hide behind compute (`machine.xla.overlap`) do not count. A value that exists only inside its readers' fusions is written
where its sharding changes. If the compiler narrows operands of matrix products, float32 values that move for products alone move as
bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from spmdctx.cost.roofline import compute_time_s, passing_values, written_s
from spmdctx.ir.analysis.loop_sums import AT_ONCE, later_reductions, loop_sums
from spmdctx.ir.analysis.repeats import made_repeats, read_repeats
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import ADDITIONS, BROUGHT_IN, LOOKED_UP, MATRIX_PRODUCTS, REARRANGED
from spmdctx.ir.projection import local_bytes, partial_axes, project
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.collectives.turning import turned_s
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.reductions import reduction_plan, scattered_by


class Seconds(NamedTuple):
    """The predicted seconds of one step, without those that hide behind compute."""

    compute_s: float
    reshard_s: float
    reduction_s: float

    @property
    def total_s(self) -> float:
        """The sum of all three, which run one after the other."""
        return self.compute_s + self.reshard_s + self.reduction_s


class _Read(NamedTuple):
    """A read by an op that wants a value in a sharding, `repeats` times a step; products of one `scope` share what they read."""

    wanted: TensorSharding
    repeats: int
    scope: int | None
    bytes: int


class _Partial(NamedTuple):
    """A result before its reduction: its sharding, and the axes over which its terms are spread."""

    natural: TensorSharding
    axes: AxisNames


def evaluate(
    graph: Graph,
    scopes: Sequence[int],
    from_literals: frozenset[int],
    assignment: Assignment,
    mesh: LogicalMesh,
    topology: Topology,
    pinned: frozenset[int] = frozenset(),
) -> Seconds:
    """Returns the predicted seconds of an assignment.

    Args:
        graph: the step.
        scopes: per op the computation that it belongs to.
        from_literals: values that depend on no input; they and the ops that make only such cost nothing.
        assignment: a split per op and a stored sharding per value, equal ones for tied values.
        mesh: the mesh.
        topology: the machine.
        pinned: values whose sharding the user fixed; they are reduced where they are made.
    """
    return _Evaluator(graph, scopes, from_literals, assignment, mesh, topology, pinned).seconds()


@lru_cache(maxsize=4096)
def all_shardings(shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[TensorSharding, ...]:
    """Returns every sharding of a shape that divides it, with the axes of a dimension in every order."""
    found: list[TensorSharding] = [()]
    for size in shape:
        found = [(*known, own) for known in found for own in _choices(size, mesh) if not {*own} & {name for dim in known for name in dim}]
    return tuple(found)


def _choices(size: int, mesh: LogicalMesh) -> list[AxisNames]:
    names = [name for name, number in mesh.axes if number > 1]
    every = [own for count in range(len(names) + 1) for own in permutations(names, count)]
    return [own for own in every if size % mesh.num_slices(own) == 0]


def reductions(
    op: Op, shape: tuple[int, ...], natural: TensorSharding, partial: AxisNames, mesh: LogicalMesh
) -> Iterator[tuple[TensorSharding, AxisNames, AxisNames]]:
    """Gives the ways to reduce a partial result: the sharding after it, the axes that scatter it, and those that all-reduce it."""
    yield natural, (), partial
    for dim, own in enumerate(natural):
        for count in range(1, len(partial) + 1):
            for extra in permutations(partial, count):
                after = (*natural[:dim], own + extra, *natural[dim + 1 :])
                plan = reduction_plan(op, natural, after, partial)
                if plan.scattered == extra and plan.after == after and shape[dim] % mesh.num_slices(own + extra) == 0:
                    yield after, plan.scattered, plan.reduced


def candidates_gather_s(graph: Graph, op: Op, value: int, payload: int, axes: AxisNames, mesh: LogicalMesh, topology: Topology) -> float:
    """Returns the seconds of an argmax over a split dimension.

    XLA gathers every device's best value and its index, and compares them.
    """
    result = item_bytes(graph.values[value].dtype)
    count = payload // result * mesh.num_slices(axes)
    sizes = (item_bytes(graph.values[op.operands[0]].dtype), result)
    return sum(collective_time_s("all_gather", count * size, axes, mesh, topology) for size in sizes)


def _readers(graph: Graph) -> dict[int, list[Op]]:
    """Returns the ops that read each value."""
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in op.operands:
            readers.setdefault(value, []).append(op)
    return readers


def sharing_ids(graph: Graph) -> frozenset[int]:
    """Returns the ops that share copies of what they read: matrix products, and transposes and the like that lead only to these."""
    readers = _readers(graph)

    def shares(op: Op) -> bool:
        if op.primitive not in REARRANGED:
            return op.primitive in MATRIX_PRODUCTS
        return op.results[0] not in graph.outputs and all(map(shares, readers.get(op.results[0], ())))

    return frozenset([op.id for op in graph.ops if shares(op)])


def moved_bytes(graph: Graph, topology: Topology) -> dict[tuple[int, int], int]:
    """Returns the bytes per element in which a value reaches an op, or leaves it; the keys are pairs of op and value."""
    readers = _readers(graph)

    def is_for_products(op: Op) -> bool:
        if op.primitive in BROUGHT_IN or (op.primitive == LOOKED_UP and len(readers[op.operands[0]]) == 1):
            after = [reader for result in op.results for reader in readers.get(result, ())]
            return not any(result in graph.outputs for result in op.results) and all(map(is_for_products, after))
        return op.primitive in MATRIX_PRODUCTS

    def size(value: int, *, is_narrow: bool) -> int:
        dtype = graph.values[value].dtype
        return item_bytes("bfloat16" if is_narrow and dtype == "float32" and topology.compiler.narrows_matrix_operands else dtype)

    found = {}
    for op in graph.ops:
        for value in op.operands:
            if value != LITERAL:
                found[op.id, value] = size(value, is_narrow=is_for_products(op))
        for value in op.results:
            after = readers.get(value, ())
            found[op.id, value] = size(value, is_narrow=bool(after) and value not in graph.outputs and all(map(is_for_products, after)))
    return found


def leads_to(op: Op, own: AxisNames, natural: TensorSharding, after: TensorSharding, stored: TensorSharding) -> bool:
    """Returns whether lowering reduces a result that it stores as `stored` into the sharding `after`.

    The op leaves the result partial over its `own` axes. If there are none, the result is a sum of unreduced terms, which the compiler
    scatters into the split that the result is to have.
    """
    if own:
        return reduction_plan(op, natural, stored, own).after == after
    return all(own == new or new == kept for own, new, kept in zip(natural, after, stored, strict=True))


class Eligible:
    """The values of a graph that can be passed on unreduced: one op alone reads them; none is tied, pinned or from literals."""

    def __init__(self, graph: Graph, from_literals: frozenset[int], pinned: frozenset[int]) -> None:
        reads = [0] * len(graph.values)
        for op in graph.ops:
            for value in op.operands:
                if value != LITERAL:
                    reads[value] += 1
        for value in graph.outputs:
            if value != LITERAL:
                reads[value] += 1
        tied = {value for pair in graph.ties for value in pair}
        self.values = [count == 1 and value not in tied | pinned | from_literals for value, count in enumerate(reads)]


class _Evaluator:
    def __init__(
        self,
        graph: Graph,
        scopes: Sequence[int],
        from_literals: frozenset[int],
        assignment: Assignment,
        mesh: LogicalMesh,
        topology: Topology,
        pinned: frozenset[int],
    ) -> None:
        self.graph, self.assignment, self.mesh, self.topology = graph, assignment, mesh, topology
        self.free = tied_with(graph, from_literals)
        self.ops = [op for op in graph.ops if not op.results or any(value not in self.free for value in op.results)]
        self.eligible = Eligible(graph, self.free, pinned).values
        self.returned = frozenset(graph.outputs)
        self.decided = {value for pair in graph.ties for value in pair} | pinned | self.returned
        self.overlap, self.passing = overlap_candidates(graph), passing_values(graph)
        self.later = later_reductions(graph, loop_sums(graph))
        self.sizes = moved_bytes(graph, topology)
        self.reads = self._reads(scopes)
        self.memo: dict[tuple[object, ...], float] = {}

    def seconds(self) -> Seconds:
        compute_s = sum(
            compute_time_s(self.graph, op, self.assignment.ops[op.id].axes, self.mesh, self.topology) * op.repeats for op in self.ops
        )
        moved_s = reduced_s = 0.0
        partial = self._partial_results()
        made = set()
        for op in self.ops:
            for value, dims in zip(op.results, op.rule.results, strict=True):
                made.add(value)
                stored = self.assignment.values[value]
                natural = project(dims, self.assignment.ops[op.id].axes)
                if value not in partial:
                    if value not in self.free:
                        moved_s += self._made(op, value, natural, stored) + self._read(value, stored)
                    continue
                known = partial[value]
                if known is not None:
                    less, more = self._reduce(op, value, known)
                    reduced_s, moved_s = reduced_s + less, moved_s + more
        moved_s += sum(self._read(value, self.assignment.values[value]) for value in self.reads if value not in made)
        return Seconds(compute_s, moved_s, reduced_s)

    def _reads(self, scopes: Sequence[int]) -> dict[int, list[_Read]]:
        reads: dict[int, list[_Read]] = {}
        sharing = sharing_ids(self.graph)
        for op in self.ops:
            axes = self.assignment.ops[op.id].axes
            scope = scopes[op.id] if op.id in sharing else None
            for value, dims in zip(op.operands, op.rule.operands, strict=True):
                if value != LITERAL and value not in self.free:
                    reads.setdefault(value, []).append(
                        _Read(project(dims, axes), read_repeats(self.graph, op), scope, self.sizes[op.id, value])
                    )
        return reads

    def _partial_results(self) -> dict[int, _Partial | None]:
        """Returns the results that are partial where they are made, with None for those that an addition takes unreduced."""
        found: dict[int, _Partial | None] = {}
        kept: dict[int, _Partial] = {}
        for op in self.ops:
            axes = self.assignment.ops[op.id].axes
            partial = partial_axes(op.rule, axes)
            joined = self._joined(op, kept) if self.topology.compiler.merges_partial_sums else ()
            for value in op.operands if joined else ():
                found[value] = None
            for value, dims in zip(op.results, op.rule.results, strict=True):
                if partial or joined:
                    known = found[value] = _Partial(project(dims, axes), joined or partial)
                    direct = op.primitive != "gather" or self.topology.compiler.sinks_slices
                    alone = len(op.results) == 1 and op.rule.combiner == "add" and self.eligible[value]
                    if direct and alone and self.assignment.values[value] == known.natural:
                        kept[value] = known
        return found

    def _joined(self, op: Op, kept: dict[int, _Partial]) -> AxisNames:
        """Returns the axes over which both terms of an addition are unreduced, if the addition takes both as they are; else ()."""
        if op.primitive not in ADDITIONS or op.operands[0] == op.operands[1] or any(value not in kept for value in op.operands):
            return ()
        first, second = (kept[value] for value in op.operands)
        axes = self.assignment.ops[op.id].axes
        taken = [project(dims, axes) for dims in op.rule.operands]
        own = {name for names in axes for name in names}
        same = {*first.axes} == {*second.axes} and taken == [first.natural, second.natural]
        return first.axes if same and not own & {*first.axes} else ()

    def _reduce(self, op: Op, value: int, partial: _Partial) -> tuple[float, float]:
        """Returns the seconds of the cheapest way to reduce a result, and of the moves that follow it."""
        stored = self.assignment.values[value]
        from_literals = value in self.free
        as_made = self.topology.compiler.merges_partial_sums and stored == partial.natural and value not in self.decided
        own = partial_axes(op.rule, self.assignment.ops[op.id].axes)
        ways = []
        for after, seconds in self._ways(op, value, partial):
            if from_literals:
                moved_s = 0.0
            elif as_made:
                moved_s = self._read(value, after)
            elif leads_to(op, own, partial.natural, after, stored):
                moved_s = self._made(op, value, after, stored) + self._read(value, stored)
            else:
                continue
            exposed = 1.0 - self.overlap.reduction_share(value, self.topology)
            ways.append((seconds * op.repeats * exposed, moved_s))
        return min(ways, key=sum)

    def _ways(self, op: Op, value: int, partial: _Partial) -> Iterator[tuple[TensorSharding, float]]:
        known = self.graph.values[value]
        payload = local_bytes(known, partial.natural, self.mesh)
        if op.rule.combiner in ("argmax", "argmin"):
            yield partial.natural, candidates_gather_s(self.graph, op, value, payload, partial.axes, self.mesh, self.topology)
            return
        machine = self.overlap.reduction_machine(value, self.topology)
        own = partial_axes(op.rule, self.assignment.ops[op.id].axes)
        wide = self.overlap.widening(op, value, known.dtype, self.topology)
        payload, size = payload * wide, item_bytes(known.dtype) * wide
        for after, scattered, reduced in reductions(op, known.shape, partial.natural, partial.axes, self.mesh):
            kind = scattered_by(known.shape, size, own, partial.natural, after, self.mesh, self.topology) if scattered else ""
            seconds = self._collective(kind, payload, scattered, machine)
            left = payload // self.mesh.num_slices(scattered)
            later = AT_ONCE if scattered else self.later.get(value, AT_ONCE)
            yield after, seconds + self._collective("all_reduce", round(left * later.size), reduced, machine) * later.times

    def _collective(self, kind: str, payload: int, axes: AxisNames, machine: Topology) -> float:
        return collective_time_s(kind, payload, axes, self.mesh, machine) if axes else 0.0

    def _read(self, value: int, source: TensorSharding) -> float:
        """Returns the seconds in which all readers of a value get it from `source`."""
        reads = self.reads.get(value, [])
        products: dict[int, list[_Read]] = {}
        seconds = 0.0
        for read in reads:
            if read.scope is None:
                seconds += self._reshard(value, source, read.wanted, read.bytes) * read.repeats
            else:
                products.setdefault(read.scope, []).append(read)
        return seconds + sum(self._shared(value, source, own) for own in products.values())

    def _shared(self, value: int, source: TensorSharding, reads: list[_Read]) -> float:
        """Returns the seconds in which products of one computation get a value through the one sharding that is cheapest for all."""
        if all(read.wanted == source for read in reads):
            return 0.0
        if len(reads) == 1:
            return self._reshard(value, source, reads[0].wanted, reads[0].bytes) * reads[0].repeats
        known = self.graph.values[value]
        key = (known.shape, known.dtype, self.overlap.weights[value], self.passing[value], source, *reads)
        if key not in self.memo:
            self.memo[key] = min(
                self._reshard(value, source, use, reads[0].bytes) * reads[0].repeats
                + sum(self._reshard(value, use, read.wanted, read.bytes) * read.repeats for read in reads)
                for use in all_shardings(known.shape, self.mesh)
            )
        return self.memo[key]

    def _made(self, op: Op, value: int, source: TensorSharding, stored: TensorSharding) -> float:
        """Returns the seconds in which what `op` makes gets where it is stored."""
        seconds = self._reshard(value, source, stored, self.sizes[op.id, value])
        if value in self.returned:
            known = self.graph.values[value]
            seconds += turned_s(known.shape, item_bytes(known.dtype), source, stored, self.mesh, self.topology)
        return seconds * made_repeats(self.graph, op)

    def _reshard(self, value: int, source: TensorSharding, target: TensorSharding, size: int = 0) -> float:
        if source == target:
            return 0.0
        known = self.graph.values[value]
        exposed = 1.0 - self.overlap.gather_share(value, self.topology)
        seconds = exposed * reshard_time_s(known.shape, size or item_bytes(known.dtype), source, target, self.mesh, self.topology)
        # Writing is no communication: none of it hides.
        return seconds + written_s(known, source, self.mesh, self.topology) if self.passing[value] else seconds


def tied_with(graph: Graph, values: frozenset[int]) -> frozenset[int]:
    """Returns the values and all values that are tied to them, directly or through others."""
    found, grown = values, values
    while grown:
        grown = frozenset(other for a, b in graph.ties for one, other in ((a, b), (b, a)) if one in found and other not in found)
        found |= grown
    return found

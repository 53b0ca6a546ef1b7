"""XLA adds partial results before it reduces them, and reduce-scatters sums that are sliced afterwards.

What XLA does: it reduces a sum of partial results once. If every device keeps only its slice of a sum, XLA reduce-scatters the sum, even if
    the slice is then moved to another sharding. On TPU element-wise ops may stand between the sum and the slice. On CPU XLA reduces each
    partial result, and slices the result of an all_reduce.
Seen in: jax 0.10.2, v5e:2x4 (libtpu 0.0.42), 8 x H100 (CUDA plugin 0.10.2) and CPU: the input gradients of q, k and v cost one
    all_reduce, on CPU three. Before the price counted this, 27 % of the planned bytes of a tensor-parallel Llama were not found on TPU;
    now 100 % are, on TPU and GPU (docs/decisions/0005-plans-know-the-compiler.md, benchmarks/RESULTS.md).
Switch: `Compiler.merges_partial_sums`, `Compiler.sinks_slices`
Priced by: cost.price.reductions, cost.evaluate, search.problem.network
Written or prevented by: lowering.rewrite.rewriter constrains such a result whole first, then scattered.
Checked by: tests/machine/xla/test_partial_sums.py, tests/audit/test_collectives_tpu.py, tests/audit/test_collectives_gpu.py,
    benchmarks/fidelity.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from spmdctx.ir.analysis.chains import Walk
from spmdctx.ir.graph import Graph, Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh, axes_of
from spmdctx.ir.primitives import ANNOTATIONS, BROUGHT_IN, LOOKED_UP, MATRIX_PRODUCTS
from spmdctx.ir.projection import Splits
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.machine.reshard import reshard_steps
from spmdctx.machine.topology import Topology


class Readers:
    """The readers of each value of a graph, and the shardings in which they take it."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.splits = graph, Splits(assignment)
        self._of = graph.readers
        self._are_products: dict[tuple[int, TensorSharding | None], bool] = {}
        self.outputs = frozenset(graph.outputs)

    def of(self, value: int) -> tuple[Op, ...]:
        """Returns the ops that read a value; an op that reads it twice is there twice."""
        return self._of[value]

    def taken(self, op: Op, position: int) -> TensorSharding:
        """Returns the sharding in which an op takes an operand."""
        return self.splits.taken(op).operands[position]

    def _takes(self, op: Op, value: int, sharding: TensorSharding) -> bool:
        for operand, taken in zip(op.operands, self.splits.taken(op).operands, strict=True):
            if operand == value and taken == sharding:
                return True
        return False

    def are_matrix_products(self, value: int, sharding: TensorSharding | None = None) -> bool:
        """Returns whether only matrix products read a float32 value, be it in another layout.

        If a sharding is given, only readers that take the value in it count.
        """
        key = (value, sharding)
        known = self._are_products.get(key)
        if known is None:
            known = self._are_products[key] = self._find_products(value, sharding)
        return known

    def _find_products(self, value: int, sharding: TensorSharding | None) -> bool:
        if self.graph.values[value].dtype != "float32" or (value in self.outputs and sharding is None):
            return False
        found = False
        for op in self._of[value]:
            if sharding is not None and not self._takes(op, value, sharding):
                continue
            found = True
            passes = op.primitive in BROUGHT_IN or (op.primitive == LOOKED_UP and len(self._of[value]) == 1)
            if op.primitive not in MATRIX_PRODUCTS and not (passes and all(map(self.are_matrix_products, op.results))):
                return False
        return found


class Cut(NamedTuple):
    """An all_reduce of whose result only a slice is kept.

    The one at `place` makes `value` in the sharding `whole`. The slice has the sharding `kept`, which splits it over `axes` too.
    """

    place: int
    axes: AxisNames
    value: int
    whole: TensorSharding
    kept: TensorSharding


class _Reading(NamedTuple):
    """What readers keep of a value: the slice of those that take one, and the results whose readers decide instead.

    Where it `is_whole`, a reader takes the whole value, or readers differ.
    """

    kept: TensorSharding | None
    onwards: tuple[int, ...] = ()
    is_whole: bool = False


_WHOLE = _Reading(None, is_whole=True)

_SAME_VALUE = frozenset({"transpose", "convert_element_type"})
"""Ops through which a reduced value is still the same."""


class Sums:
    """The all_reduces of a bill by their place in it: those that are joined to others, and those that end as reduce_scatters.

    Args:
        readers: The readers of the traced step.
        assignment: The shardings of the step.
        mesh: The mesh.
        topology: The machine, whose compiler may move slices up through element-wise ops.
        widened: The values of low precision that are reduced in float32.
    """

    def __init__(
        self, readers: Readers, assignment: Assignment, mesh: LogicalMesh, topology: Topology, widened: Collection[int] = ()
    ) -> None:
        self._readers, self._assignment, self._mesh, self._topology, self._widened = readers, assignment, mesh, topology, widened
        self._places: dict[int, int] = {}
        self._cut: dict[int, Cut] = {}
        self._read: dict[int, _Reading] = {}
        self.joined: set[int] = set()
        self.added: set[int] = set()

    def reduced(self, value: int, place: int, natural: TensorSharding) -> None:
        """Notes that the all_reduce at `place` makes `value` in the sharding `natural`, with no other collective before it."""
        self._made(value, place, natural)

    def _made(self, value: int, place: int, natural: TensorSharding) -> None:
        stored = self._assignment.values[value]
        if natural == stored:
            self._places[value] = place
        else:
            kept = self._sliced(value, natural, stored)
            if kept is not None:
                self._cut[place] = Cut(place, self._extension(natural, kept), value, natural, kept)

    def is_read_once(self, value: int) -> bool:
        """Returns whether one op reads the value, and the step does not return it."""
        return len(self._readers.of(value)) == 1 and value not in self._readers.outputs

    def terms(self, op: Op) -> tuple[int, int] | None:
        """Returns the places of the two all_reduces whose results an op adds, None if another op reads one of them."""
        first, second = map(self._reduced_as, op.operands)
        if first == second or first not in self._places or second not in self._places:
            return None
        if not self.is_read_once(first) or not self.is_read_once(second):
            return None
        return self._places[first], self._places[second]

    def join(self, op: Op, first: int, second: int) -> None:
        """Lets the all_reduce at `first` reduce the op's sum, and drops the one at `second`."""
        self.joined.add(second)
        self.added.add(first)
        for value in op.operands:
            del self._places[self._reduced_as(value)]
        self._made(op.results[0], first, self._readers.splits.taken(op).results[0])

    def _reduced_as(self, value: int) -> int:
        """Returns the reduced value that an addend is: one turned in place, which is reduced behind the transpose, or cast to float32."""
        graph, stored, own = self._readers.graph, self._assignment.values, value
        turns = casts = False
        while own not in self._places and self.is_read_once(own) and own in graph.producers:
            op = graph.ops[graph.producers[own]]
            if op.primitive not in _SAME_VALUE or self._readers.splits.taken(op) != ((stored[op.operands[0]],), (stored[own],)):
                return value
            turns, casts, own = turns or op.primitive == "transpose", casts or op.primitive != "transpose", op.operands[0]
        if own not in self._places or (casts and own not in self._widened):
            return value
        return value if turns and graph.ops[graph.producers[own]].primitive != "dot_general" else own

    def slices(self) -> Iterator[Cut]:
        """Yields the all_reduces of whose result only a slice is kept."""
        yield from self._cut.values()
        for value, place in self._places.items():
            kept, whole = self._kept(value), self._assignment.values[value]
            if kept is not None:
                yield Cut(place, self._extension(whole, kept), value, whole, kept)

    def _kept(self, start: int) -> TensorSharding | None:
        """Returns the one slice that all readers keep of a value, None if they differ or one takes the whole value."""
        agreed: TensorSharding | None = None
        walk = Walk([start])
        for value in walk:
            read = self._read.get(value) or self._read.setdefault(value, self._found_read(value))
            if read.is_whole or (agreed is not None and read.kept is not None and read.kept != agreed):
                return None
            agreed = agreed if read.kept is None else read.kept
            walk.reach(read.onwards)
        return None if walk.is_cut else agreed

    def _found_read(self, value: int) -> _Reading:
        """Finds what the readers of a value keep of it."""
        if value in self._readers.outputs or not self._readers.of(value):
            return _WHOLE
        kept, onwards = None, list[int]()
        for op, position in self._readings(value):
            if self._hands_on(op, position):
                onwards += op.results
                continue
            taken = self._taken(op, position)
            if taken is None or (kept is not None and taken != kept):
                return _WHOLE
            kept = taken
        return _Reading(kept, tuple(onwards))

    def _readings(self, value: int) -> Iterator[tuple[Op, int]]:
        """Yields the ops that read a value, each with the place of the operand."""
        for op in self._readers.of(value):
            for position, operand in enumerate(op.operands):
                if operand == value:
                    yield op, position

    def _hands_on(self, op: Op, position: int) -> bool:
        """Returns whether the readers of an op's result decide which slice it keeps of an operand."""
        stored = self._assignment.values
        if self._readers.taken(op, position) != stored[op.operands[position]] or not self._lets_pass(op, position):
            return False
        return self._readers.splits.taken(op).results[0] == stored[op.results[0]]

    def _taken(self, op: Op, position: int) -> TensorSharding | None:
        """Returns the slice that an op keeps of an operand, or of the result that it computes from it."""
        stored = self._assignment.values
        value, wanted = op.operands[position], self._readers.taken(op, position)
        if wanted != stored[value]:
            return self._sliced(value, stored[value], wanted)
        if not self._lets_pass(op, position):
            return None
        return self._sliced(op.results[0], self._readers.splits.taken(op).results[0], stored[op.results[0]])

    def _sliced(self, value: int, source: TensorSharding, target: TensorSharding) -> TensorSharding | None:
        """Returns the slice with which the way from one sharding to another begins, None if it begins otherwise."""
        known = self._readers.graph.values[value]
        steps = reshard_steps(
            known.shape, item_bytes(known.dtype), source, target, self._mesh, self._topology.preferences.allows_all_to_all
        )
        return steps[0].sharding if steps and steps[0].kind == "slice" else None

    def _lets_pass(self, op: Op, position: int) -> bool:
        """Returns whether the op on slices of its operands gives a slice of its result, and the compiler computes it so."""
        if op.primitive in ANNOTATIONS:
            return True
        rule = op.rule
        return (
            self._topology.compiler.sinks_slices
            and len(op.results) == 1
            and op.boundary is None
            and op.primitive != "optimization_barrier"
            and all(kind is FactorKind.PASS_THROUGH for kind in rule.kinds)
            and rule.operands[position] == rule.results[0]
            and all(own in ((), whole) for dims in rule.operands for own, whole in zip(dims, rule.results[0], strict=False))
        )

    def _extension(self, stored: TensorSharding, kept: TensorSharding) -> AxisNames:
        """Returns the axes by which `kept` splits one dimension further than `stored`; none if the two differ otherwise."""
        sizes = self._mesh.sizes
        pairs = [[tuple(name for name in dim if sizes[name] > 1) for dim in dims] for dims in zip(stored, kept, strict=True)]
        changed = [(own, new) for own, new in pairs if own != new]
        if len(changed) != 1 or changed[0][1][: len(changed[0][0])] != changed[0][0]:
            return ()
        extra = changed[0][1][len(changed[0][0]) :]
        return () if set(extra) & set(axes_of(stored)) else extra

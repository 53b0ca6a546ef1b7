"""Small random graphs of everything that the search must tell apart, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from spmdctx.cost.evaluate import all_shardings
from spmdctx.ir.analysis.columns import Columns, Kind, Tensor
from spmdctx.ir.graph import LITERAL, Graph, Op, Origin, Role, Value
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.fusion import fused_bits, fused_slots, in_memory
from spmdctx.rules import rule_for
from spmdctx.rules.builder import identity
from spmdctx.rules.flops import op_flops
from spmdctx.search.setup.request import Setup

SIZES = (3, 8, 16, 64, 256)


@dataclass(frozen=True)
class RandomStep:
    """A graph, the computation that each of its ops belongs to, and the values that depend on no input."""

    graph: Graph
    scopes: tuple[int, ...]
    from_literals: frozenset[int]


class StepMaker:
    """Collects values and ops with their true rules and FLOPs."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.scopes: list[int] = []
        self.inputs: list[int] = []
        self.ties: list[tuple[int, int]] = []
        self.repeats, self.scope = 1, 0

    def input(self, *shape: int, role: Role = Role.ARGUMENT) -> int:
        value = self._value(shape, role, f"leaf{len(self.inputs)}")
        self.inputs.append(value)
        return value

    def shape(self, value: int) -> tuple[int, ...]:
        return () if value == LITERAL else self.values[value].shape

    def op(self, primitive: str, *operands: int, shape: tuple[int, ...], dtype: str | None = None, **params: object) -> int:
        return self.several(primitive, *operands, shapes=(shape,), dtype=dtype, **params)[0]

    def several(
        self, primitive: str, *operands: int, shapes: tuple[tuple[int, ...], ...], dtype: str | None = None, **params: object
    ) -> tuple[int, ...]:
        """The results of an op, of the type of its operands if no other is given."""
        taken = tuple(self.shape(value) for value in operands)
        rule = identity(shapes[0]) if "." in primitive else rule_for(primitive, taken, shapes, params)
        count = 0 if "." in primitive else op_flops(primitive, rule, taken, shapes)
        known = next((self.values[value].dtype for value in operands if value != LITERAL), "float32")
        results = tuple(self._value(shape, Role.INTERMEDIATE, "", dtype or known) for shape in shapes)
        self.ops.append(Op(len(self.ops), primitive, operands, results, rule, count, self.repeats))
        self.scopes.append(self.scope)
        return results

    def dot(self, left: int, right: int, contract: tuple[int, int] = (1, 0)) -> int:
        a, b = self.shape(left), self.shape(right)
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return self.op("dot_general", left, right, shape=(a[1 - contract[0]], b[1 - contract[1]]), dimension_numbers=dims)

    def same(self, primitive: str, *operands: int) -> int:
        return self.op(primitive, *operands, shape=self.shape(operands[0]))

    def transpose(self, value: int) -> int:
        return self.op("transpose", value, shape=self.shape(value)[::-1], permutation=(1, 0))

    def reduce(self, primitive: str, value: int, axis: int) -> int:
        shape = self.shape(value)
        return self.op(primitive, value, shape=(*shape[:axis], *shape[axis + 1 :]), axes=(axis,))

    def reshape(self, value: int, *shape: int) -> int:
        return self.op("reshape", value, shape=shape, new_sizes=shape, dimensions=None)

    def finish(self, *outputs: int) -> RandomStep:
        origins = [Origin(op.primitive, f"made.py:{op.id}") for op in self.ops]
        graph = Graph(tuple(self.values), tuple(self.ops), tuple(self.inputs), outputs, tuple(self.ties), origins, "made")
        return RandomStep(graph, tuple(self.scopes), self._from_literals())

    def _from_literals(self) -> frozenset[int]:
        from_literals: set[int] = set()
        for op in self.ops:
            if "." not in op.primitive and from_literals.issuperset(op.operands):
                from_literals.update(op.results)
        return frozenset(from_literals)

    def _value(self, shape: tuple[int, ...], role: Role, path: str, dtype: str = "float32") -> int:
        self.values.append(Value(len(self.values), shape, dtype, role, path))
        return len(self.values) - 1


def random_step(seed: int, num_ops: int = 6) -> RandomStep:
    """A step of about `num_ops` ops: products, sums of products, element-wise ops, reductions, reshapes, loops, carried state."""
    return Walk(seed, num_ops).run()


class Walk:
    """Adds one random move after the other."""

    def __init__(self, seed: int, num_ops: int) -> None:
        self.random = random.Random(seed)
        self.make = StepMaker()
        self.num_ops = num_ops
        self.matrices: list[int] = []
        self.outer: list[int] | None = None
        self.entered: dict[int, int] = {}

    def run(self) -> RandomStep:
        make = self.make
        for role in (Role.BATCH, Role.PARAMETER):
            self.matrices.append(make.input(self._size(), self._size(), role=role))
        moves = self._moves()
        loop_at = self.random.randrange(self.num_ops) if self.random.random() < 0.3 else -1
        while len(make.ops) < self.num_ops:
            if loop_at >= 0 and len(make.ops) >= loop_at and self.outer is None:
                self._loop()
                loop_at = -1
            else:
                self.random.choice(moves)()
        self._close()
        read = {value for op in make.ops for value in op.operands}
        outputs = [value for op in make.ops for value in op.results if value not in read]
        if self.random.random() < 0.4:
            self._carry(outputs)
        return make.finish(*outputs)

    def _moves(self) -> list[Callable[[], None]]:
        return [
            self._mask,
            self._product,
            self._product,
            self._gradient,
            self._elementwise,
            self._residual,
            self._lower,
            self._reshape,
            self._twice,
        ]

    def _size(self) -> int:
        return self.random.choice(SIZES)

    def _matrix(self) -> int:
        """One of the newest matrices, mostly."""
        return self.random.choice(self.matrices[-3:] if self.random.random() < 0.7 else self.matrices)

    def _with_rows(self, rows: int) -> int:
        """A matrix of so many rows: a known one (shared), or a new parameter."""
        known = [value for value in self.matrices if self.make.shape(value)[0] == rows]
        if known and self.random.random() < 0.5:
            return self.random.choice(known)
        return self._parameter(rows, self._size())

    def _parameter(self, *shape: int) -> int:
        value = self.make.input(*shape, role=Role.PARAMETER)
        return self._enter(value) if self.outer is not None else value

    def _product(self) -> None:
        left = self._matrix()
        self.matrices.append(self.make.dot(left, self._with_rows(self.make.shape(left)[1])))

    def _gradient(self) -> None:
        """The sum of two or three products of one shape, as the gradient of a shared parameter is."""
        left = self._matrix()
        rows, inner = self.make.shape(left)
        columns = self._size()
        terms = [self.make.dot(left, self._parameter(inner, columns))]
        for _ in range(self.random.choice((1, 1, 2))):
            size = self.random.choice((inner, self._size()))
            terms.append(self.make.dot(self._parameter(rows, size), self._parameter(size, columns)))
        total = terms[0]
        for term in terms[1:]:
            total = self.make.same(self.random.choice(("add", "add_any")), total, term)
        self.matrices.append(total)

    def _elementwise(self) -> None:
        self.matrices.append(self.make.same(self.random.choice(("tanh", "exp", "neg")), self._matrix()))

    def _residual(self) -> None:
        first = self._matrix()
        alike = [value for value in self.matrices if self.make.shape(value) == self.make.shape(first)]
        self.matrices.append(self.make.same(self.random.choice(("add", "mul", "sub")), first, self.random.choice(alike)))

    def _mask(self) -> None:
        """A value that depends on no input, and an op that reads it."""
        value = self._matrix()
        shape = self.make.shape(value)
        mask = self.make.op("iota", shape=shape, dimension=0, dtype="float32", shape_=shape)
        self.matrices.append(self.make.same("mul", value, self.make.same("exp", mask)))

    def _lower(self) -> None:
        value = self._matrix()
        shape = self.make.shape(value)
        reduced = self.make.reduce(self.random.choice(("reduce_sum", "reduce_max")), value, self.random.randrange(2))
        back = 0 if self.make.shape(reduced) == shape[:1] else 1
        if self.random.random() < 0.5:
            self.matrices.append(self.make.op("broadcast_in_dim", reduced, shape=shape, shape_=shape, broadcast_dimensions=(back,)))

    def _reshape(self) -> None:
        value = self._matrix()
        rows, columns = self.make.shape(value)
        if self.random.random() < 0.4:
            self.matrices.append(self.make.transpose(value))
            return
        split = [(rows * 2, columns // 2), (rows // 2, columns * 2)]
        new = self.random.choice([shape for shape in split if min(shape) > 1 and math.prod(shape) == rows * columns] or [(columns, rows)])
        flat = self.make.reshape(value, math.prod(new))
        self.matrices.append(self.make.reshape(flat, *new) if self.random.random() < 0.5 else self.make.reshape(value, *new))

    def _twice(self) -> None:
        """One value read by two products."""
        left = self._matrix()
        inner = self.make.shape(left)[1]
        for _ in range(2):
            self.matrices.append(self.make.dot(left, self._parameter(inner, self._size())))

    def _enter(self, value: int) -> int:
        make = self.make
        make.scope, repeats, make.repeats = make.scope - 1, make.repeats, 1
        inside = make.op("scan.enter", value, shape=make.shape(value))
        make.scope, make.repeats = make.scope + 1, repeats
        return inside

    def _loop(self) -> None:
        """From here on, ops run several times on what is carried."""
        make, carried = self.make, self._matrix()
        self.outer = self.matrices
        make.scope, make.repeats = 1, self.random.choice((2, 5))
        self.carried = self._enter(carried)
        self.matrices = [self.carried]

    def _close(self) -> None:
        """The carry's next value: the last one of its shape."""
        if self.outer is None:
            return
        make = self.make
        alike = [value for value in self.matrices if make.shape(value) == make.shape(self.carried)]
        after = make.op("scan.next", alike[-1], shape=make.shape(self.carried))
        make.ties.append((self.carried, after))
        make.scope, make.repeats = 0, 1

    def _carry(self, outputs: list[int]) -> None:
        """Ties an input to an output of its shape, as training state is."""
        tied = {value for pair in self.make.ties for value in pair}
        for value in self.make.inputs:
            for output in outputs:
                if self.make.shape(value) == self.make.shape(output) and output not in tied:
                    self.make.ties.append((value, output))
                    return


def fused(made: RandomStep) -> RandomStep:
    """The step as the compiler runs it: with what it only computes on the way into other ops."""
    graph = made.graph
    columns = Columns(
        [Kind(op.primitive, op.rule, op.flops) for op in graph.ops],
        range(len(graph.ops)),
        ([op.repeats for op in graph.ops], [0] * len(graph.ops)),
        [op.operands for op in graph.ops],
        [op.results for op in graph.ops],
        ([Tensor(value.shape, value.dtype) for value in graph.values], range(len(graph.values))),
    )
    held = in_memory(columns, (*graph.inputs, *graph.outputs))
    bits = fused_bits(columns, fused_slots(columns, held))
    ops = tuple([op._replace(fused=own) for op, own in zip(graph.ops, bits, strict=True)])
    return replace(made, graph=replace(graph, ops=ops))


def random_machine(seed: int) -> Topology:
    """A machine on which small tensors are worth splitting and moving."""
    choose = random.Random(seed).choice
    known = PRESETS[("h100", "cpu", "tpu-v5p")[seed % 3]]
    # By a name of its own nothing is known of its memory: both ends of a peak are alike, and there are no tiles.
    return replace(
        known,
        device=known.device if known.device == "cpu" else f"random {known.device}",
        latency_s=choose((1e-9, 1e-8, 1e-6)),
        network_latency_s=1e-8,
        peak_flops_per_s=choose((1e11, 1e12, 1e13)),
        memory_bytes_per_s=choose((2e10, 1e12)),
        link_bytes_per_s=choose((5e10, 4.5e11, 5e12)),
        devices_per_host=choose((2, 8)),
        gather_overlap=choose((0.0, 0.5)),
        reduction_overlap=choose((0.0, 0.7)),
        torus_dims=min(known.torus_dims, 2),
        scratch_bytes=0,
        scatters_strictly=known.scatters_strictly and seed // 9 % 3 != 2,
        combines_reductions=choose((False, True)),
    )


def random_mesh(seed: int) -> LogicalMesh:
    """2 or 4 devices in one line or two."""
    return LogicalMesh.of(((2,), (4,), (2, 2))[seed // 3 % 3])


def random_pins(made: RandomStep, mesh: LogicalMesh, seed: int) -> Setup:
    """Whole pins of some values and partial pins of others, none of two values that are tied."""
    rng = random.Random(seed)
    setup = Setup(mesh)
    tied = {value for pair in made.graph.ties for value in pair}
    values = [value.id for value in made.graph.values if value.id not in tied | made.from_literals]
    for value in rng.sample(values, min(3, len(values))):
        sharding = rng.choice(all_shardings(made.graph.values[value].shape, mesh))
        if rng.random() < 0.6:
            setup.pins[value] = sharding
        else:
            setup.partial_pins[value] = tuple(own if rng.random() < 0.5 else None for own in sharding)
    return setup

"""The road without the decorator: trace, propagate, price, lower, compile, run; each step small enough to look at."""

from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np

from spmdctx.audit.collectives import parse_collectives
from spmdctx.cost.bill import Bill
from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.lowering.compile import CompiledProgram, jit_program
from spmdctx.machine.presets import PRESETS
from spmdctx.search.problem.space import Space
from spmdctx.search.propagation import propagate
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.program import Program

CPU = PRESETS["cpu"]
MESH = LogicalMesh.of({"data": 4, "model": 2})


def trace(function, *args, carried=(), roles=None):
    """The program of a function on example arguments, which may be pytrees."""
    leaves, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *flat: jax.tree.leaves(function(*tree.unflatten(flat))))(*leaves)
    roles = roles or [Role.ARGUMENT] * len(leaves)
    return build(jaxpr, [Argument(f"leaf{index}", role) for index, role in enumerate(roles)], carried)


def ops(program, primitive):
    """The ops of one primitive, in order."""
    return [op for op in program.graph.ops if op.primitive == primitive]


def spread(program, pins, mesh=MESH, seeds=None, forced=None):
    """The assignment that propagation finds from shardings of inputs (keys are input numbers) or of values (keys are ops)."""
    space = Space(program.graph, mesh, CPU, program.from_literals)
    values = {program.graph.inputs[key] if isinstance(key, int) else key.results[0]: sharding for key, sharding in pins.items()}
    return propagate(space, values, forced or {}, seeds or {})


def bill_of(program, assignment, mesh=MESH):
    """What the assignment costs."""
    written = [row for region in program.manual for row in region.collectives]
    return price(Step(program.graph, program.scopes, program.from_literals), assignment, mesh, CPU, written=written)


@dataclass
class Run:
    """One function planned, compiled and run on eight devices, beside its results on one."""

    program: Program
    assignment: Assignment
    bill: Bill
    lowered: CompiledProgram
    compiled: jax.stages.Compiled
    got: tuple
    want: tuple
    mesh: LogicalMesh

    @property
    def planned(self):
        """Executions per (kind, axes, bytes) in the bill."""
        return _counted(self.bill.collectives)

    @property
    def executed(self):
        """Executions per (kind, axes, bytes) in the compiled program."""
        return _counted(parse_collectives(self.compiled.as_text(), self.mesh))

    def check(self):
        """The results are those of one device, and what is executed is what was planned."""
        for got, want in zip(self.got, self.want, strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            np.testing.assert_allclose(_array(got), _array(want), rtol=1e-4, atol=1e-4)
        assert self.planned == self.executed


def run(function, *args, pins, mesh=MESH, carried=(), forced=None):
    """Takes a function down the whole road."""
    program = trace(function, *args, carried=carried)
    assignment = spread(program, pins, mesh, forced=forced)
    lowered = jit_program(program, assignment, mesh, jax.devices())
    leaves = jax.tree.leaves(args)
    placed = [jax.device_put(leaf, sharding) for leaf, sharding in zip(leaves, lowered.in_shardings, strict=True)]
    compiled = lowered.jitted.lower(*leaves).compile()
    want = tuple(map(jax.numpy.asarray, jax.tree.leaves(jax.jit(function)(*args))))
    bill = bill_of(program, assignment, mesh)
    return Run(program, assignment, bill, lowered, compiled, compiled(*placed), want, mesh)


def _counted(rows):
    counts = Counter()
    for row in rows:
        # The CPU compiler scatters by an all_reduce and a slice, and may sum over several axes one after the other.
        kind = "all_reduce" if row.kind == "reduce_scatter" else row.kind
        for axes in [(axis,) for axis in row.axes] if kind == "all_reduce" else [row.axes]:
            counts[kind, axes, row.payload_bytes] += row.repeats
    return counts


def _array(value):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)

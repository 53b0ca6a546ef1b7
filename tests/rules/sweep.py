"""Runs small programs on eight devices with each legal split of each of their ops, as spmdctx lowers it, and compares with one device.

A program's other ops follow the split by sharding propagation. All runs of a call are one compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdctx.ir.domain import axis_codes
from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import FactorAxes, project
from spmdctx.lowering.rewrite.constrain import constrain
from spmdctx.rules import RULES
from spmdctx.search.problem.states import split_of_rule
from spmdctx.trace.build.program import Program
from spmdctx.trace.specs import make_mesh, named_sharding
from tests.road import spread, trace

MESHES = (LogicalMesh.of({"x": 2, "y": 4}), LogicalMesh.of({"x": 2, "y": 2, "z": 2}))
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Small:
    """A small program. `args` are arrays, or shapes that are filled with floats between 0.1 and 0.9."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def values(self) -> list[Any]:
        """The arguments as arrays, the same in every run."""
        generator = np.random.default_rng(0)
        return [np.asarray(generator.uniform(0.1, 0.9, arg), np.float32) if isinstance(arg, tuple) else arg for arg in self.args]


class Run(NamedTuple):
    """One split of one op of a program."""

    program: Program
    mesh: LogicalMesh
    op: Op
    axes: FactorAxes

    def __str__(self) -> str:
        shapes = [value.shape for value in (self.program.graph.values[value] for value in self.op.operands if value != LITERAL)]
        return f"{self.op.primitive} of {shapes} split as {self.axes} on {dict(self.mesh.axes)} by {self.op.rule}"


def can_split(program: Program) -> list[Op]:
    """The ops of a program that some rule splits."""
    return [op for op in program.graph.ops if op.primitive in RULES and any(op.rule.splittable)]


def legal_splits(program: Program, op: Op, mesh: LogicalMesh) -> list[FactorAxes]:
    """Every split of an op that searches know of, in all orders of axes, but the one that keeps it whole."""
    shapes = [() if value == LITERAL else program.graph.values[value].shape for value in (*op.operands, *op.results)]
    codes = axis_codes(mesh)
    rows = split_of_rule(op, shapes, op.rule.splittable, mesh).rows
    found = [tuple(codes.axes[code] for code in row) for row in rows.tolist()]
    return [axes for axes in found if any(axes)]


def runs(program: Program, most: int, meshes: Iterable[LogicalMesh] = MESHES) -> list[Run]:
    """At most `most` splits of each op on each mesh, drawn with a fixed seed."""
    found = []
    for mesh in meshes:
        for op in can_split(program):
            legal = legal_splits(program, op, mesh)
            drawn = np.random.default_rng(op.id).permutation(len(legal))[:most]
            found += [Run(program, mesh, op, legal[index]) for index in sorted(drawn.tolist())]
    return found


def traced(small: Small) -> tuple[Program, list[Any]]:
    """The program and its arguments."""
    args = small.values()
    return trace(small.function, *args), args


def evaluate(run: Run, args: Sequence[Any]) -> list[Any]:
    """The results of a program whose op is split, inside of a jit."""
    graph, devices = run.program.graph, make_mesh(run.mesh, jax.devices())
    pins = {}
    for value, dims in zip(run.op.operands, run.op.rule.operands, strict=True):
        if value in graph.inputs:
            pins[graph.inputs.index(value)] = project(dims, run.axes)
    assignment = spread(run.program, pins, run.mesh, forced={run.op.id: run.axes})
    closed = constrain(run.program, assignment, run.mesh, devices)
    taken = [_placed(arg, devices, assignment.values[value]) for arg, value in zip(args, graph.inputs, strict=True)]
    made = jexc.jaxpr_as_fun(closed)(*taken)
    return [_placed(made[place], devices, assignment.values[graph.outputs[place]]) for place in reached(run)]


def reached(run: Run) -> list[int]:
    """The places of the results that depend on the op that is split; nobody needs to compile the others."""
    graph = run.program.graph
    found = set(run.op.results)
    for op in graph.ops:
        if not found.isdisjoint(op.operands):
            found.update(op.results)
    loops = any(op.boundary is not None for op in graph.ops)
    return [place for place, value in enumerate(graph.outputs) if value != LITERAL and (loops or value in found)]


def _placed(value: Any, devices: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(value, named_sharding(devices, sharding)) if np.ndim(value) else value


def wrong(programs: Sequence[tuple[Program, Sequence[Any]]], chosen: Sequence[Run], tolerance: float = 1e-4) -> list[str]:
    """The runs whose results differ from one device's on some device, each with how much; those on one mesh are compiled together."""
    numbers = {id(program): index for index, (program, _) in enumerate(programs)}
    expected = [jax.jit(jexc.jaxpr_as_fun(program.jaxpr))(*args) for program, args in programs]
    found = []
    for mesh in dict.fromkeys(run.mesh for run in chosen):
        own = [run for run in chosen if run.mesh == mesh]
        for run, results in zip(own, _evaluated(own, [args for _, args in programs], numbers, mesh), strict=True):
            want = expected[numbers[id(run.program)]]
            texts = [_difference(one, want[place], tolerance) for one, place in zip(results, reached(run), strict=True)]
            found += [f"{run}: {text}" for text in texts if text]
    return found


def _evaluated(chosen: Sequence[Run], args: Sequence[Sequence[Any]], numbers: Mapping[int, int], mesh: LogicalMesh) -> list[list[Any]]:
    """The results of each run, from one compiled program; `numbers` has the place of each program's arguments."""

    def together(given: list[list[Any]]) -> list[list[Any]]:
        return [evaluate(run, given[numbers[id(run.program)]]) for run in chosen]

    whole = NamedSharding(make_mesh(mesh, jax.devices()), PartitionSpec())
    given = [[jax.device_put(arg, whole) for arg in own] for own in args]
    made: list[list[Any]] = jax.jit(together, in_shardings=whole).lower(given).compile(compiler_options=QUICK)(given)
    return made


def _difference(own: Any, want: Any, tolerance: float) -> str:
    """How the blocks of the devices differ from the expected array; empty where they do not."""
    if jax.dtypes.issubdtype(own.dtype, jax.dtypes.prng_key):
        own, want = jax.random.key_data(own), jax.random.key_data(want)
    whole = _wide(want)
    scale = np.max(np.abs(whole[np.isfinite(whole)]), initial=1e-3)
    for shard in own.addressable_shards:
        block = _wide(shard.data)
        if not np.allclose(block, whole[shard.index], rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"{block.ravel()[:4]} instead of {whole[shard.index].ravel()[:4]} on device {shard.device.id}"
    return ""


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value).astype(np.complex128 if np.iscomplexobj(value) else np.float64)

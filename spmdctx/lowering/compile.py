"""Turns a planned program into one jitted function over flat leaves, with shardings on every argument and result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding

from spmdctx.cost.price.directives import Directives
from spmdctx.ir.graph import LITERAL
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.lowering.rewrite.constrain import constrain
from spmdctx.lowering.rewrite.waiting.early_gradients import with_early_gradients
from spmdctx.machine.devices import backend_of
from spmdctx.machine.xla.memory.late_gradients import LATE_ON
from spmdctx.trace.build.program import Program
from spmdctx.trace.specs import make_mesh, named_sharding


@dataclass(frozen=True)
class CompiledProgram:
    """A jitted flat program. `jitted` takes the input leaves and returns a tuple of the output leaves."""

    jitted: jax.stages.Wrapped
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    mesh: Mesh


class JitOptions(NamedTuple):
    """Options for jitting a program.

    Attributes:
        donated: indices of the input leaves whose buffers the step may reuse.
        compiler_options: options for XLA, for this program only.
        name: name of the function in profiles and dumps.
        free_layouts: indices of the output leaves whose layout in memory the compiler chooses.
    """

    donated: Sequence[int] = ()
    compiler_options: Mapping[str, Any] | None = None
    name: str = "step"
    free_layouts: frozenset[int] = frozenset()


DEFAULT_OPTIONS = JitOptions()


def jit_program(
    program: Program,
    assignment: Assignment,
    mesh: LogicalMesh,
    devices: Sequence[Any],
    directives: Directives | None = None,
    options: JitOptions = DEFAULT_OPTIONS,
) -> CompiledProgram:
    """Writes the assignment into the program and jits it; nothing is compiled yet.

    Args:
        program: the traced step.
        assignment: a sharding for each of its ops and values.
        mesh: the logical mesh that the assignment is for.
        devices: at least as many as the mesh has.
        directives: what the plan says besides shardings; if None, what follows from the assignment alone.
        options: options for jitting the program.

    Raises:
        ContextError: fewer devices than the mesh has.
    """
    jax_mesh = make_mesh(mesh, devices)
    graph, values = program.graph, assignment.values
    inputs = tuple(named_sharding(jax_mesh, as_held(value, values[value], directives)) for value in graph.inputs)
    outputs = tuple(
        named_sharding(jax_mesh, as_held(value, values[value], directives) if value != LITERAL else ()) for value in graph.outputs
    )
    jitted = jax.jit(
        _evaluator(jaxpr_to_compile(program, assignment, mesh, devices, directives), options.name),
        in_shardings=inputs,
        out_shardings=tuple(Format(Layout.AUTO, own) if index in options.free_layouts else own for index, own in enumerate(outputs)),
        donate_argnums=tuple(options.donated),
        compiler_options=dict(options.compiler_options) if options.compiler_options else None,
    )
    return CompiledProgram(jitted, inputs, outputs, jax_mesh)


def jaxpr_to_compile(
    program: Program, assignment: Assignment, mesh: LogicalMesh, devices: Sequence[Any], directives: Directives | None
) -> jexc.ClosedJaxpr:
    """Returns the jaxpr that `jit_program` jits: the program with the assignment and the directives written into it."""
    is_split = mesh.num_devices > 1
    closed = constrain(program, assignment, mesh, make_mesh(mesh, devices), directives) if is_split else program.jaxpr
    return with_early_gradients(closed, is_split=is_split) if backend_of(devices) in LATE_ON else closed


def as_held(value: int, stored: TensorSharding, directives: Directives | None) -> TensorSharding:
    """Returns the sharding of an operand or result; that of an accumulator has the axes first over which it waits to be reduced."""
    axes = directives.loop_sums.axes.get(value) if directives is not None else None
    return (axes, *stored) if axes else stored


def _evaluator(closed: jexc.ClosedJaxpr, name: str) -> Callable[..., tuple[Any, ...]]:
    evaluate = jexc.jaxpr_as_fun(closed)

    def step(*leaves: Any) -> tuple[Any, ...]:
        return tuple(evaluate(*leaves))

    step.__name__ = step.__qualname__ = name
    return step

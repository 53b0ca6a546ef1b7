"""Writes a plan into its program."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc
from jax.sharding import Mesh

from spmdctx.cost.price.directives import Directives, completed
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment
from spmdctx.lowering.rewrite.control_flow import BODIES
from spmdctx.lowering.rewrite.rewriter import Rewriter
from spmdctx.lowering.rewrite.values import ShardedProgram
from spmdctx.lowering.rewrite.waiting.waits import wait_for
from spmdctx.trace.build.program import Program


def constrain(
    program: Program, assignment: Assignment, mesh: LogicalMesh, jax_mesh: Mesh, directives: Directives | None = None
) -> jexc.ClosedJaxpr:
    """Returns the program's jaxpr with the assignment's shardings as constraints, and the directives written into it.

    If no directives are given, the program gets those that follow from the assignment alone.
    """
    if directives is None:
        directives = completed(Directives(), program.graph, program.scopes, assignment, mesh)
    rewriter = Rewriter(ShardedProgram(program, assignment, mesh, jax_mesh, directives), BODIES)
    closed = program.jaxpr
    block = rewriter.block()
    invars = [_held(var, value, directives, mesh) for var, value in zip(closed.jaxpr.invars, program.graph.inputs, strict=True)]
    substitution = {**{var: var for var in closed.jaxpr.constvars}, **dict(zip(closed.jaxpr.invars, invars, strict=True))}
    eqns, outputs = block.finish(rewriter.rewrite(closed.jaxpr, substitution, block, None))
    for update in directives.waits:
        eqns, outputs = wait_for(eqns, outputs, *[rewriter.waited_for.get(value) for value in (update.gate, *update.results)])
    return jexc.ClosedJaxpr(closed.jaxpr.replace(invars=invars, eqns=eqns, outvars=outputs), closed.consts)


def _held(var: Any, value: int, directives: Directives, mesh: LogicalMesh) -> Any:
    """Returns the variable of an operand; that of an accumulator has a leading dimension for the devices over which it is partial."""
    axes = directives.loop_sums.axes.get(value)
    return jexc.Var(var.aval.update(shape=(mesh.num_slices(axes), *var.aval.shape))) if axes else var

"""What a worker runs for one part of the batch: what comes before the loss, the loss, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx.gradients.keys import fold
from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut
from spmdctx.trace.build.jaxprs.equations import struct_of


class WorkerProgram(NamedTuple):
    """The program of one part.

    Attributes:
        jaxpr: it takes the inputs, and last the number of the part; it gives results of the loss.
        inputs: the inputs of the step that it takes, by number.
        batch_dims: for those that are cut before the program takes them, by number, the dimension of the batch.
        outputs: the results of the loss that it gives, by number.
    """

    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[int, ...]
    batch_dims: dict[int, int]
    outputs: tuple[int, ...]


def worker_program(step: ServedStep, cut: Cut) -> WorkerProgram:
    """Returns the program that gives what any server reads."""
    around, loss = cut.around, step.loss
    body = around.jaxpr.jaxpr
    leaves = around.loss.invars
    outputs = tuple(sorted({number for server in cut.servers for number in server.joined}))
    early = needed(around.before, variables(leaves))
    read = {var for eqn in early for var in variables(eqn.invars)}
    inputs = tuple(number for number, var in enumerate(body.invars) if var in read or any(leaf is var for leaf in leaves))
    number_of = {body.invars[number]: number for number in inputs}
    dims: dict[int, int] = {}
    for leaf, operand in zip(leaves, loss.operands, strict=True):
        if operand.batch_dim is not None and not isinstance(leaf, jexc.Literal) and leaf in number_of and leaf not in read:
            dims[number_of[leaf]] = operand.batch_dim
    constants = dict(zip(body.constvars, around.jaxpr.consts, strict=True))

    def run(*given: Any) -> list[Any]:
        *values, part = given
        held = {**constants, **{body.invars[number]: value for number, value in zip(inputs, values, strict=True)}}
        for eqn in early:
            results = _evaluated(body, eqn, held)
            held.update(zip(eqn.outvars, results, strict=True))
        operands = []
        for index, (leaf, operand) in enumerate(zip(leaves, loss.operands, strict=True)):
            value = jnp.asarray(leaf.val, leaf.aval.dtype) if isinstance(leaf, jexc.Literal) else held[leaf]
            if operand.batch_dim is not None and (isinstance(leaf, jexc.Literal) or number_of.get(leaf) not in dims):
                value = _part(value, operand.batch_dim, part, loss.num_parts)
            operands.append(fold(value, part) if index in loss.folded and loss.num_parts > 1 else value)
        made = jexc.jaxpr_as_fun(loss.part)(*operands)
        return [made[number] for number in outputs]

    avals = [_cut_type(body.invars[number].aval, dims.get(number), loss.num_parts) for number in inputs]
    jaxpr = jax.make_jaxpr(run)(*avals, jax.ShapeDtypeStruct((), jnp.uint32))
    return WorkerProgram(jaxpr, inputs, dims, outputs)


def _evaluated(body: Any, eqn: Any, held: dict[Any, Any]) -> Sequence[Any]:
    read = list(dict.fromkeys(variables(eqn.invars)))
    info = body.debug_info._replace(arg_names=None, result_paths=None)
    alone = body.replace(constvars=[], invars=read, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects, debug_info=info)
    results: Sequence[Any] = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(alone, []))(*(held[var] for var in read))
    return results


def _part(value: Any, dim: int, part: Any, count: int) -> Any:
    """Returns elements part, part + count, ... along a dimension, as micro-batches are cut."""
    apart = value.reshape((*value.shape[:dim], value.shape[dim] // count, count, *value.shape[dim + 1 :]))
    return jax.lax.dynamic_index_in_dim(apart, part, dim + 1, keepdims=False)


def _cut_type(aval: Any, dim: int | None, count: int) -> Any:
    if dim is None:
        return struct_of(aval)
    shape = (*aval.shape[:dim], aval.shape[dim] // count, *aval.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

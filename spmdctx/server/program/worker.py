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
from spmdctx.server.program.rows import Tables, plainly_run, run_rows
from spmdctx.trace.build.jaxprs.equations import struct_of


class WorkerProgram(NamedTuple):
    """The program of one part.

    Attributes:
        jaxpr: it takes the inputs, for each read of a table the places of its ids, and last the number of the part; it gives results of
            the loss.
        inputs: the inputs of the step that it takes, by number; of tables it takes rows.
        batch_dims: for those that are cut before the program takes them, by number, the dimension of the batch.
        outputs: the results of the loss that it gives, by number.
    """

    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[int, ...]
    batch_dims: dict[int, int]
    outputs: tuple[int, ...]


def worker_program(step: ServedStep, cut: Cut) -> WorkerProgram:
    """Returns the program that gives what any server reads."""
    by_rows = [own.table for own in cut.rows.tables]
    outputs = sorted({number for server in cut.servers for number in server.joined} | {table.result for table in by_rows})
    reader = _Reader(step, cut, cut.around.loss.invars)

    def run(*given: Any) -> list[Any]:
        *values, part = given
        operands = reader.operands(values[: len(reader.inputs)], part)
        if step.tables is None:
            made = jexc.jaxpr_as_fun(step.loss.part)(*operands)
        else:
            made = _by_rows(step.tables, operands, values[len(reader.inputs) :])
        return [made[number] for number in outputs]

    rows = {table.number: table.num_ids for table in by_rows}
    avals = [_with_rows(aval, rows.get(number)) for number, aval in zip(reader.inputs, reader.avals, strict=True)]
    places = [] if step.tables is None else [jax.ShapeDtypeStruct(read.var.aval.shape, jnp.int32) for _, read in step.tables.reads]
    jaxpr = jax.make_jaxpr(run)(*avals, *places, jax.ShapeDtypeStruct((), jnp.uint32))
    return WorkerProgram(jaxpr, reader.inputs, reader.batch_dims, tuple(outputs))


def ids_program(step: ServedStep, cut: Cut) -> WorkerProgram | None:
    """Returns the program that gives the ids of each read of a table in a part; None without tables."""
    tables = step.tables
    if tables is None or not tables.tables:
        return None
    body, ids = tables.part.jaxpr, [read.var for _, read in tables.reads]
    eqns = needed(body.eqns, ids)
    read = {var for eqn in eqns for var in variables(eqn.invars)} | set(ids)
    leaves = [index for index, var in enumerate(body.invars) if var in read]
    reader = _Reader(step, cut, [cut.around.loss.invars[index] for index in leaves], leaves)

    def run(*given: Any) -> list[Any]:
        *values, part = given
        held = dict(zip(body.constvars, tables.part.consts, strict=True))
        held.update(zip((body.invars[index] for index in leaves), reader.operands(values, part), strict=True))
        for eqn in eqns:
            held.update(zip(eqn.outvars, plainly_run(body, eqn, held), strict=True))
        return [held[var] for var in ids]

    jaxpr = jax.make_jaxpr(run)(*reader.avals, jax.ShapeDtypeStruct((), jnp.uint32))
    return WorkerProgram(jaxpr, reader.inputs, reader.batch_dims, ())


class _Reader:
    """Makes operands of the loss for one part from inputs of the step.

    Args:
        step: the step.
        cut: how it is cut.
        atoms: the operands, as the step has them.
        leaves: their numbers in the loss; None for all.
    """

    def __init__(self, step: ServedStep, cut: Cut, atoms: Sequence[Any], leaves: Sequence[int] | None = None) -> None:
        self._step, self._around, self._atoms = step, cut.around, atoms
        self._leaves = range(len(atoms)) if leaves is None else leaves
        body, loss = cut.around.jaxpr.jaxpr, step.loss
        self._early = needed(cut.around.before, variables(atoms))
        read = {var for eqn in self._early for var in variables(eqn.invars)}
        self.inputs = tuple(number for number, var in enumerate(body.invars) if var in read or any(leaf is var for leaf in atoms))
        number_of = {body.invars[number]: number for number in self.inputs}
        self.batch_dims: dict[int, int] = {}
        for index, leaf in zip(self._leaves, atoms, strict=True):
            dim = loss.operands[index].batch_dim
            if dim is not None and not isinstance(leaf, jexc.Literal) and leaf in number_of and leaf not in read:
                self.batch_dims[number_of[leaf]] = dim
        self._number_of = number_of
        self.avals = [_cut_type(body.invars[number].aval, self.batch_dims.get(number), loss.num_parts) for number in self.inputs]

    def operands(self, values: Sequence[Any], part: Any) -> list[Any]:
        """Returns the operands for a part."""
        body, loss = self._around.jaxpr.jaxpr, self._step.loss
        held = dict(zip(body.constvars, self._around.jaxpr.consts, strict=True))
        held |= {body.invars[number]: value for number, value in zip(self.inputs, values, strict=True)}
        for eqn in self._early:
            held.update(zip(eqn.outvars, plainly_run(body, eqn, held), strict=True))
        found = []
        for index, leaf in zip(self._leaves, self._atoms, strict=True):
            dim = loss.operands[index].batch_dim
            value = jnp.asarray(leaf.val, leaf.aval.dtype) if isinstance(leaf, jexc.Literal) else held[leaf]
            if dim is not None and (isinstance(leaf, jexc.Literal) or self._number_of.get(leaf) not in self.batch_dims):
                value = _part(value, dim, part, loss.num_parts)
            found.append(fold(value, part) if index in loss.folded and loss.num_parts > 1 else value)
        return found


def _by_rows(tables: Tables, operands: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Returns the results of the loss, of which some operands are rows of tables."""
    body = tables.part.jaxpr
    values = dict(zip(body.constvars, tables.part.consts, strict=True)) | dict(zip(body.invars, operands, strict=True))
    place_of = {(var, read): own for (table, read), own in zip(tables.reads, places, strict=True) for var in table.in_part}
    run_rows(body, body.eqns, values, {var: table.num_ids for table in tables.tables for var in table.in_part}, place_of)
    return [jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jexc.Literal) else values[atom] for atom in body.outvars]


def _part(value: Any, dim: int, part: Any, count: int) -> Any:
    """Returns elements part, part + count, ... along a dimension, as micro-batches are cut."""
    apart = value.reshape((*value.shape[:dim], value.shape[dim] // count, count, *value.shape[dim + 1 :]))
    return jax.lax.dynamic_index_in_dim(apart, part, dim + 1, keepdims=False)


def _with_rows(struct: Any, num_rows: int | None) -> Any:
    return struct if num_rows is None else jax.ShapeDtypeStruct((num_rows, *struct.shape[1:]), struct.dtype, weak_type=struct.weak_type)


def _cut_type(aval: Any, dim: int | None, count: int) -> Any:
    if dim is None:
        return struct_of(aval)
    shape = (*aval.shape[:dim], aval.shape[dim] // count, *aval.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

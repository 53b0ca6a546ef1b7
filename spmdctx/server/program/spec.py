"""What servers are told, as plain data: their programs as exported StableHLO, and how parts become whole results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.gradients.reduce import is_low_precision
from spmdctx.gradients.results import Fate, Row
from spmdctx.pipeline.cut.line import variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut, ServerProgram
from spmdctx.server.program.recipe import Recipe
from spmdctx.server.program.row_step import run_row_step
from spmdctx.server.program.rows import run_rows

_SUMMED = (Fate.REDUCED, Fate.AVERAGED, Fate.OWN)


class Join(NamedTuple):
    """How one result of the loss becomes whole: "mean", "last", or "stack" along a dimension.

    `dtype` is its own, `sum_dtype` the one in which parts are added.
    """

    kind: str
    dtype: str
    sum_dtype: str
    dim: int = 0


class RoundSpec(NamedTuple):
    """One program: as `jax.export` writes it, and the slots that it reads and makes."""

    blob: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TableSpec(NamedTuple):
    """What each server does with rows of a table; row i lies on server i modulo their number.

    Attributes:
        num_rows: of the whole table.
        held: for the slot of each array that has such rows, the path of the input; the first is the table.
        gradient: the slot of its gradient.
        gradient_shape: of one row of it.
        join: how rows of parts become one.
        step: the program that takes rows of what is held and of the gradient, and scalars, and gives the next rows of what is held.
        scalars: the slots of these scalars.
        is_still: whether a row whose gradient is zero keeps its values.
        recipes: by slot, how rows are made at first that no worker has.
    """

    num_rows: int
    held: Mapping[str, str]
    gradient: str
    gradient_shape: tuple[int, ...]
    join: Join
    step: bytes
    scalars: tuple[str, ...]
    is_still: bool
    recipes: Mapping[str, Recipe]


class ServerSpec(NamedTuple):
    """What one server does; see `ServerPart`.

    Attributes:
        held: for the slot of each array that it holds, the path of the input.
        renewed: for each such slot, the slot of its next value; arrays for literals.
        joins: for the slot of each result of the loss that it gets, how parts become one.
        given: the slots that workers send with part 0.
        rounds: its programs.
        posts: see `ServerPart`.
        awaits: see `ServerPart`.
        results: the slots of results of the step, by number.
        num_parts: of each step.
        x64: whether JAX computes in 64 bits.
        server: its number.
        num_servers: of all.
        tables: of which it holds rows.
        kept: the slots that it keeps of each step for workers.
    """

    held: Mapping[str, str]
    renewed: Mapping[str, Any]
    joins: Mapping[str, Join]
    given: tuple[str, ...]
    rounds: tuple[RoundSpec | None, ...]
    posts: tuple[tuple[str, ...], ...]
    awaits: tuple[tuple[str, ...], ...]
    results: Mapping[int, str]
    num_parts: int
    x64: bool
    server: int = 0
    num_servers: int = 1
    tables: tuple[TableSpec, ...] = ()
    kept: tuple[str, ...] = ()


def server_specs(step: ServedStep, cut: Cut, *, x64: bool) -> list[ServerSpec]:
    """Returns what each server is told."""
    tables = tuple(_table(step, cut, number) for number in range(len(cut.rows.tables)))
    return [_spec(step, cut, number, x64=x64)._replace(tables=tables) for number in range(len(cut.servers))]


def fingerprint(step: ServedStep) -> str:
    """Returns what is the same for all processes that run the same step."""
    leaves = [(leaf.path, leaf.shape, leaf.dtype) for leaf in step.captured.inputs]
    primitives = [eqn.primitive.name for eqn in step.captured.jaxpr.jaxpr.eqns] + [eqn.primitive.name for eqn in step.loss.part.jaxpr.eqns]
    own = () if step.local is None else (step.local.held,)
    return hashlib.sha256(repr((leaves, primitives, step.loss.num_parts, *own)).encode()).hexdigest()


def _table(step: ServedStep, cut: Cut, number: int) -> TableSpec:
    table, own = cut.rows.tables[number]
    avals = [var.aval for var in own.rows]
    (count,) = jax.export.symbolic_shape("n")
    structs = [jax.ShapeDtypeStruct((count, *aval.shape[1:]), aval.dtype) for aval in avals]

    def run(*values: Any) -> list[Any]:
        scalars = [typed(value, var.aval) for value, var in zip(values[len(avals) :], own.scalars, strict=True)]
        return run_row_step(cut.around, table, own, values[: len(avals)], scalars)

    gradient = avals[-1]
    return TableSpec(
        num_rows=table.num_rows,
        held={f"in/{one}": step.captured.inputs[one].path for one in table.held},
        gradient=f"loss/{table.result}",
        gradient_shape=tuple(gradient.shape[1:]),
        join=_join(step.loss.rows[table.result], gradient, step.loss.num_parts),
        step=_exported(run, [*structs, *(raw_type(var.aval) for var in own.scalars)]),
        scalars=cut.scalars[number],
        is_still=table.is_still,
        recipes={},
    )


def _spec(step: ServedStep, cut: Cut, server: int, *, x64: bool) -> ServerSpec:
    inputs, part = step.captured.inputs, cut.servers[server]
    outvars = {leaf.carried_from: cut.around.jaxpr.jaxpr.outvars[number] for number, leaf in enumerate(step.captured.outputs)}
    renewed: dict[str, Any] = {}
    for number in part.held:
        slot, atom = cut.held[number], outvars[number]
        renewed[f"in/{number}"] = slot if slot else np.asarray(atom.val, atom.aval.dtype)
    avals = step.loss.part.out_avals
    return ServerSpec(
        held={f"in/{number}": inputs[number].path for number in part.held},
        renewed=renewed,
        joins={f"loss/{number}": _join(step.loss.rows[number], avals[number], step.loss.num_parts) for number in part.joined},
        given=tuple(f"in/{number}" for number in part.given),
        rounds=tuple(None if own is None else _round(own, cut) for own in part.rounds),
        posts=part.posts,
        awaits=part.awaits,
        results=part.results,
        num_parts=step.loss.num_parts,
        x64=x64,
        server=server,
        num_servers=len(cut.servers),
        kept=part.kept,
    )


def _join(row: Row, aval: Any, num_parts: int) -> Join:
    dtype = str(aval.dtype)
    if row.fate in _SUMMED and num_parts > 1:
        return Join("mean", dtype, "float32" if is_low_precision(aval.dtype) else dtype)
    if row.fate is Fate.STACKED and row.dim is not None and num_parts > 1:
        return Join("stack", dtype, dtype, row.dim)
    return Join("last", dtype, dtype)


def _round(own: ServerProgram, cut: Cut) -> RoundSpec:
    return RoundSpec(exported(own.jaxpr, _tables_of(own.jaxpr, cut)), own.inputs, own.outputs)


def _tables_of(closed: jexc.ClosedJaxpr, cut: Cut) -> dict[Any, int]:
    """Returns, for each variable of a program that has rows, the number of its table."""
    body = closed.jaxpr
    used = {var for eqn in body.eqns for var in (*variables(eqn.invars), *eqn.outvars)}
    return {var: number for var, number in cut.rows.table_of.items() if var in used}


def exported(closed: jexc.ClosedJaxpr, table_of: Mapping[Any, int] | None = None) -> bytes:
    """Returns a program for CPUs, in which keys are the words that they are made of.

    Args:
        closed: the program.
        table_of: for variables that have rows, the number of the table: the program takes any number of rows of each.
    """
    body, table_of = closed.jaxpr, table_of or {}
    names = sorted(set(table_of.values()))
    counts = dict(zip(names, jax.export.symbolic_shape(", ".join(f"n{name}" for name in names)), strict=True)) if names else {}
    count_of = {var: counts[number] for var, number in table_of.items()}

    def plain(*values: Any) -> list[Any]:
        own = [typed(value, var.aval) for value, var in zip(values, body.invars, strict=True)]
        if not count_of:
            return [raw(made) for made in jexc.jaxpr_as_fun(closed)(*own)]
        held = dict(zip((*body.constvars, *body.invars), (*closed.consts, *own), strict=True))
        run_rows(body, body.eqns, held, count_of)
        return [raw(jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jexc.Literal) else held[atom]) for atom in body.outvars]

    structs = [raw_type(var.aval) for var in body.invars]
    for place, var in enumerate(body.invars):
        if var in count_of:
            structs[place] = jax.ShapeDtypeStruct((count_of[var], *structs[place].shape[1:]), structs[place].dtype)
    return _exported(plain, structs)


def _exported(run: Any, structs: Sequence[Any]) -> bytes:
    return bytes(jax.export.export(jax.jit(run), platforms=["cpu"])(*structs).serialize())


def raw(value: Any) -> Any:
    """Returns an array, or the words of a typed key."""
    return jax.random.key_data(value) if is_key(value.dtype) else value


def typed(value: Any, aval: Any) -> Any:
    """Returns an array as its type says: a typed key of its words."""
    return jax.random.wrap_key_data(value, impl=_impl(aval)) if is_key(aval.dtype) else value


def _impl(aval: Any) -> Any:
    """Returns the generator of a type of keys, which JAX tells of arrays alone."""
    found = []

    def look(key: Any) -> Any:
        found.append(jax.random.key_impl(key))
        return 0

    jax.eval_shape(look, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return found[0]


def raw_type(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of what `raw` gives."""
    if not is_key(aval.dtype):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    struct: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return struct


def is_key(dtype: Any) -> bool:
    """Returns whether a type is that of typed keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))

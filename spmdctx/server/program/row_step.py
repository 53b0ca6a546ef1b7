"""The program that renews rows of a table, from the scalars of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.pipeline.capture.around import Around
from spmdctx.pipeline.cut.line import is_array, variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.rows import Table, run_rows

_PROBES = 8
_ROWS = 4


class RowStep(NamedTuple):
    """What renews rows of a table.

    Attributes:
        rows: the variables of its inputs that have rows: what the table holds, and last its gradient.
        scalars: those of its other inputs.
        eqns: its equations.
        results: the atoms of what the table holds next, in the same order.
    """

    rows: tuple[Any, ...]
    scalars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    results: tuple[Any, ...]


def row_step(step: ServedStep, around: Around, table: Table) -> RowStep:
    """Returns the equations that make a table's next rows, from scalars that need more than scalars to be made."""
    body = around.jaxpr.jaxpr
    outputs = {leaf.carried_from: index for index, leaf in enumerate(step.captured.outputs) if leaf.carried_from is not None}
    results = tuple(body.outvars[outputs[number]] for number in table.held)
    rows = (*(body.invars[number] for number in table.held), around.loss.outvars[table.result])
    wanted = set(variables(results))
    eqns: list[Any] = []
    for eqn in reversed(around.after):
        if wanted.isdisjoint(eqn.outvars):
            continue
        makes_rows = any(var in table.after for var in eqn.outvars)
        if makes_rows or not any(is_array(var) for var in variables(eqn.invars)):
            eqns.append(eqn)
            wanted.update(variables(eqn.invars))
    made = {var for eqn in eqns for var in eqn.outvars} | set(rows) | set(body.constvars)
    scalars = dict.fromkeys(var for eqn in reversed(eqns) for var in variables(eqn.invars) if var not in made)
    return RowStep(rows, tuple(scalars), tuple(reversed(eqns)), results)


def run_row_step(around: Around, table: Table, own: RowStep, rows: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Returns the next rows; `rows` end with the gradient."""
    body = around.jaxpr.jaxpr
    count = rows[0].shape[0]
    values = dict(zip(body.constvars, around.jaxpr.consts, strict=True))
    values |= dict(zip((*own.rows, *own.scalars), (*rows, *scalars), strict=True))
    run_rows(body, own.eqns, values, dict.fromkeys(table.after, count))
    return [values[atom] for atom in own.results]


def is_still(step: ServedStep, around: Around, table: Table) -> bool:
    """Returns whether rows whose gradient is zero keep their values, whatever the scalars; found out on random ones."""
    own = row_step(step, around, table)
    if any(not jnp.issubdtype(var.aval.dtype, jnp.number) and var.aval.dtype != jnp.bool_ for var in own.scalars):
        return False
    run = jax.jit(lambda rows, scalars: run_row_step(around, table, own, rows, scalars))
    source = np.random.default_rng(0)
    for probe in range(_PROBES):
        held = [_random(source, var.aval, probe, (_ROWS, *var.aval.shape[1:])) for var in own.rows[:-1]]
        zero = jnp.zeros((_ROWS, *own.rows[-1].aval.shape[1:]), own.rows[-1].aval.dtype)
        made = run([*held, zero], [_random(source, var.aval, probe, var.aval.shape) for var in own.scalars])
        if not all(bool(jnp.array_equal(before, after)) for before, after in zip(held, made, strict=True)):
            return False
    return True


def _random(source: np.random.Generator, aval: Any, probe: int, shape: tuple[int, ...]) -> Any:
    """Returns random values; counts grow from probe to probe."""
    if aval.dtype == jnp.bool_:
        return jnp.asarray(source.integers(0, 2, shape), bool)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        most = min(int(np.iinfo(aval.dtype).max) - 1, 10 ** (probe + 1))
        return jnp.asarray(source.integers(0, most, shape), aval.dtype)
    return jnp.asarray(source.uniform(-0.5 if probe % 2 else 0.1, 0.9, shape), aval.dtype)


def vanishes(eqns: Sequence[Any], gradient: Any) -> set[Any]:
    """Returns the variables that are zero where a gradient is, whatever the finite values of others."""
    found = {gradient}

    def is_zero(atom: Any) -> bool:
        return not np.any(np.asarray(atom.val)) if isinstance(atom, jexc.Literal) else atom in found

    for eqn in eqns:
        zero = [is_zero(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if (
            (name in _ALL_ZERO and all(zero))
            or (name in ("mul", "and") and any(zero))
            or (name == "div" and zero[0])
            or (name == "integer_pow" and zero[0] and eqn.params["y"] > 0)
            or (name == "select_n" and all(zero[1:]))
        ):
            found.update(eqn.outvars)
    return found


_ALL_ZERO = frozenset(
    {
        *("abs", "add", "add_any", "asin", "asinh", "atan", "atanh", "broadcast_in_dim", "cbrt", "ceil", "conj", "convert_element_type"),
        *("copy", "copy_p", "erf", "expm1", "floor", "imag", "log1p", "max", "min", "neg", "optimization_barrier", "or", "real"),
        *("reduce_max", "reduce_min", "reduce_precision", "reduce_sum", "reshape", "round", "sign", "sin", "sinh", "sqrt", "square"),
        *("squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor"),
    }
)

"""Writes the equations of a table again for some of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.pipeline.capture.around import Around
from spmdctx.pipeline.cut.line import is_array, variables
from spmdctx.rules.elementwise import ELEMENTWISE


class Rows(NamedTuple):
    """Rows of a table on their way to a server: their places among its rows, rising, and their values."""

    places: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


GATHER, SCATTER = "gather", "scatter-add"


class IdsRead(NamedTuple):
    """The ids of one read of a table: their variable in the program of a part, and whether ids outside of the table are clipped."""

    var: Any
    clips: bool


@dataclass(frozen=True)
class Table:
    """A parameter whose rows alone cross between workers and servers.

    Attributes:
        number: of the step's input.
        leaf: of the loss that it is.
        result: of the loss that is its gradient.
        num_rows: of the whole table.
        num_ids: how many rows one part reads at most.
        reads: the ids by which the loss reads it.
        held: the inputs that have its rows: itself, and its optimizer state.
        in_part: the variables of the part's program that have its rows.
        after: the variables after the loss that have its rows.
        is_still: whether a row whose gradient is zero keeps its values.
    """

    number: int
    leaf: int
    result: int
    num_rows: int
    num_ids: int
    reads: tuple[IdsRead, ...]
    held: tuple[int, ...]
    in_part: frozenset[Any]
    after: frozenset[Any]
    is_still: bool = False


@dataclass(frozen=True)
class Tables:
    """The tables of a step, by the variables of its program around the loss and of its part without nested calls."""

    around: Around
    part: jexc.ClosedJaxpr
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    @property
    def reads(self) -> list[tuple[Table, IdsRead]]:
        """All reads, in the order of the part's additional operands."""
        return [(table, read) for table in self.tables for read in table.reads]

    @property
    def held(self) -> frozenset[int]:
        """The inputs of all tables and of their state."""
        return frozenset(number for table in self.tables for number in table.held)


def unshared(eqns: Sequence[Any], outvars: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns equations in which each array of equal elements has one reader, so that it may have as many rows as that one needs."""
    maker: dict[Any, Any] = {}
    found: list[Any] = []
    taken: set[Any] = set()

    def own(atom: Any) -> Any:
        eqn = None if isinstance(atom, jexc.Literal) else maker.get(atom)
        if eqn is None:
            return atom
        fresh = [jexc.Var(var.aval) if var in taken else var for var in eqn.outvars]
        taken.update(eqn.outvars)
        found.append(eqn.replace(invars=[own(one) for one in eqn.invars], outvars=fresh))
        return fresh[eqn.outvars.index(atom)]

    for eqn in eqns:
        if is_uniform(eqn, maker):
            maker.update(dict.fromkeys(eqn.outvars, eqn))
        else:
            found.append(eqn.replace(invars=[own(atom) for atom in eqn.invars]))
    return found, [own(atom) for atom in outvars]


def is_uniform(eqn: Any, uniform: Mapping[Any, Any]) -> bool:
    """Returns whether an equation makes an array of equal elements, from scalars and such arrays."""
    if len(eqn.outvars) != 1 or not is_array(eqn.outvars[0]) or eqn.primitive.name not in (*ELEMENTWISE, "broadcast_in_dim", "reshape"):
        return False
    return all(not is_array(var) or var in uniform for var in variables(eqn.invars))


def by_rows(eqn: Any, values: Sequence[Any], count: Any) -> list[Any]:
    """Runs an equation on `count` rows of arrays in place of all."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        return [jax.lax.broadcast_in_dim(values[0], (count, *params["shape"][1:]), tuple(map(int, params["broadcast_dimensions"])))]
    if name == "reshape":
        return [jax.lax.reshape(values[0], (count, *params["new_sizes"][1:]))]
    made = eqn.primitive.bind(*values, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def plainly_run(body: Any, eqn: Any, values: Mapping[Any, Any]) -> Sequence[Any]:
    """Runs an equation of a program as it is."""
    read = list(dict.fromkeys(variables(eqn.invars)))
    info = body.debug_info._replace(arg_names=None, result_paths=None)
    alone = body.replace(constvars=[], invars=read, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects, debug_info=info)
    results: Sequence[Any] = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(alone, []))(*(values[var] for var in read))
    return results


def run_rows(
    body: Any,
    eqns: Iterable[Any],
    values: dict[Any, Any],
    count_of: Mapping[Any, Any],
    places: Mapping[tuple[Any, IdsRead], Any] | None = None,
) -> None:
    """Runs equations in order, those of rows on fewer rows; `values` takes their results.

    Args:
        body: the program of the equations.
        eqns: the equations.
        values: of the variables that they read.
        count_of: for each variable that has rows, how many it has here.
        places: for an array of rows, and the ids by which gathers and scatters take rows of it, the places of these rows.
    """
    for eqn in eqns:
        has_rows = [var for var in (*variables(eqn.invars), *eqn.outvars) if var in count_of]
        if not has_rows:
            values.update(zip(eqn.outvars, plainly_run(body, eqn, values), strict=True))
            continue
        read = [atom.val if isinstance(atom, jexc.Literal) else values[atom] for atom in eqn.invars]
        if places and eqn.primitive.name in (GATHER, SCATTER):
            read[1] = places[eqn.invars[0], ids_of(eqn)]
        values.update(zip(eqn.outvars, by_rows(eqn, read, count_of[has_rows[0]]), strict=True))


def ids_of(eqn: Any) -> IdsRead:
    """Returns the ids of a gather or a scatter."""
    return IdsRead(eqn.invars[1], eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP)

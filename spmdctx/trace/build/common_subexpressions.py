"""Finds ops that compute what an earlier op of the same body has computed, and merges them.

XLA merges equal equations, and a plan that counted them twice would plan collectives that never run. These stay separate:

- bodies: a remat computes its values again. Of bodies that compilers inline, prices know (`machine.xla.collectives.inlining`);
- equations with effects, and barriers;
- values that element-wise ops only compute on the way into other ops (`machine.xla.fusion`), and values that depend on no input.
  XLA computes them for each reader anyway, and each reader may want them split in its own way.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc
import numpy as np

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.arrays import BoolArray
from spmdctx.ir.graph import LITERAL
from spmdctx.ir.primitives import IDENTITIES
from spmdctx.machine.xla.collectives.inlining import merged_scopes
from spmdctx.machine.xla.fusion import CHAINED

_NEVER_MERGED = frozenset({"optimization_barrier", "rng_uniform", "pure_callback"})
"""Equations that are executed as often as they are written."""


class Copies(NamedTuple):
    """Values and ops that are others once more, by the first of them."""

    values: dict[int, int]
    ops: dict[int, int]


def find_copies(columns: Columns, equations: Sequence[Any], inlined: Sequence[tuple[int, int]] = ()) -> Copies:
    """Finds all ops that compute what an earlier one has computed.

    Args:
        columns: the columns of the step.
        equations: the equation of each op, or None for an op that equals no other; ops of one kind have equal parameters.
        inlined: pairs of computations, of which compilers inline the first into the second (`Graph.inlined`).
    """
    known: dict[Any, int] = {}
    copies = Copies({}, {})
    first = [*range(columns.num_values), LITERAL]
    scopes = np.array(merged_scopes(inlined, columns.scopes.tolist()), dtype=np.int64)
    bodies = (columns.kind_of * (int(scopes.max(initial=0)) + 1) + scopes).tolist()
    other_names = columns.which(IDENTITIES.__contains__).tolist() if inlined else [False] * len(equations)
    for op, (body, operands, eqn) in enumerate(zip(bodies, columns.operands, equations, strict=True)):
        if other_names[op]:
            first[columns.results[op][0]] = first[operands[0]] if operands[0] != LITERAL else columns.results[op][0]
        if eqn is None or other_names[op]:
            continue
        key = (body, *map(first.__getitem__, operands))
        twin = known.setdefault(key, op)
        if twin != op and LITERAL in operands:
            literals = _literals(eqn)
            if literals != _literals(equations[twin]):
                twin = known.setdefault((key, literals), op)
        if twin != op and not eqn.effects and eqn.primitive.name not in _NEVER_MERGED:
            for value, same in zip(columns.results[op], columns.results[twin], strict=True):
                first[value] = copies.values[value] = same
            copies.ops[op] = twin
    return copies


def copies_across(columns: Columns, equations: Sequence[Any], inlined: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the ops that equal one of another body once compilers have `inlined` some, each with that one."""
    if not inlined:
        return ()
    scopes = columns.scopes.tolist()
    return tuple([pair for pair in find_copies(columns, equations, inlined).ops.items() if scopes[pair[0]] != scopes[pair[1]]])


def choices_of_one(columns: Columns, copies: Copies) -> list[int]:
    """Returns the selections whose cases are all equal, as in the gradient of an update by a constant: XLA drops what selects."""
    found = []
    for op in np.flatnonzero(columns.which(("select_n",).__contains__)).tolist():
        cases = {copies.values.get(value, value) for value in columns.operands[op][1:]}
        if len(cases) == 1 and LITERAL not in cases:
            found.append(op)
    return found


def _literals(eqn: Any) -> tuple[Any, ...]:
    literals = [np.asarray(atom.val) for atom in eqn.invars if isinstance(atom, jexc.Literal)]
    return tuple([(literal.dtype, literal.tobytes()) for literal in literals])


def made_one(copies: Copies, columns: Columns, materialized: BoolArray, from_literals: Container[int]) -> Copies:
    """Returns the copies that XLA merges with their originals; `materialized` tells for each value whether it exists in memory."""
    values: dict[int, int] = {}
    twins: dict[int, int] = {}
    chained = columns.which(CHAINED.__contains__)
    for copy, number in copies.ops.items():
        pairs = list(zip(columns.results[copy], columns.results[number], strict=True))
        if all(first in from_literals for _, first in pairs):
            continue
        if not chained[number] or all(materialized[value] and materialized[first] for value, first in pairs):
            values.update(pairs)
            twins[copy] = number
    return Copies(values, twins)


def sites_of(num_ops: int, alive: Sequence[int], twins: Mapping[int, int]) -> list[int]:
    """Returns the number of each op in walking order: its own or its twin's, and -1 if the op is dead."""
    numbers = np.full(num_ops, -1, dtype=np.int64)
    numbers[alive] = np.arange(len(alive))
    numbers[list(twins)] = numbers[list(twins.values())]
    sites: list[int] = numbers.tolist()
    return sites

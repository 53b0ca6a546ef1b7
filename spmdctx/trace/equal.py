"""Which ops compute what an earlier op of the same body has computed, and are made one with it.

XLA makes equal equations one, and a plan that counted them twice would plan collectives that never run. What stays apart:

- bodies: what a remat computes again is computed again;
- equations with effects, and barriers;
- what element-wise ops only compute on the way into other ops (`rules.fusion`), and what depends on no input: it is computed for each
  reader anyway, and each may want it split in its own way.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc
import numpy as np

from spmdctx.ir import LITERAL, Op
from spmdctx.rules.fusion import CHAINED

_APART = frozenset({"optimization_barrier", "rng_uniform", "pure_callback"})
"""Equations that are executed as often as they are written."""


Site = tuple[Any, int, int]
"""The equation of an op, None for a boundary, its kind and its scope; ops of one kind have the same primitive, shapes and parameters."""


class Copies(NamedTuple):
    """Values and ops that are others once more, by the first of them."""

    values: dict[int, int]
    ops: dict[int, int]


def find_copies(ops: Sequence[Op], sites: Sequence[Site]) -> Copies:
    """All ops that compute what an earlier one has computed; both arguments in the order of execution."""
    known: dict[Any, Op] = {}
    copies = Copies({}, {})
    first = copies.values
    for op, (eqn, kind, scope) in zip(ops, sites, strict=True):
        if eqn is None:
            continue
        operands = op.operands
        if first and not first.keys().isdisjoint(operands):
            operands = tuple([first.get(value, value) for value in operands])
        key = (kind, scope, operands)
        twin = known.setdefault(key, op)
        if twin is not op and LITERAL in operands:
            literals = _literals(eqn)
            if literals != _literals(sites[twin.id][0]):
                twin = known.setdefault((key, literals), op)
        if twin is not op and not eqn.effects and op.primitive not in _APART:
            first.update(zip(op.results, twin.results, strict=True))
            copies.ops[op.id] = twin.id
    return copies


def _literals(eqn: Any) -> tuple[Any, ...]:
    literals = [np.asarray(atom.val) for atom in eqn.invars if isinstance(atom, jexc.Literal)]
    return tuple([(literal.dtype, literal.tobytes()) for literal in literals])


def made_one(copies: Copies, ops: Sequence[Op], held: Sequence[int], loose: Container[int]) -> Copies:
    """Those copies that are the op which they are copies of; `held` says of each value whether it exists in memory."""
    values: dict[int, int] = {}
    twins: dict[int, int] = {}
    for copy, number in copies.ops.items():
        op = ops[number]
        pairs = list(zip(ops[copy].results, op.results, strict=True))
        if all(first in loose for _, first in pairs):
            continue
        if op.primitive not in CHAINED or all(held[value] and held[first] for value, first in pairs):
            values.update(pairs)
            twins[copy] = number
    return Copies(values, twins)

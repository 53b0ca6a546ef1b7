"""Finds the results of a jaxpr that depend on some of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.ir.primitives import VIEWS
from spmdctx.ir.sharding import AxisNames
from spmdctx.rules.control_flow import CALLS, call_body, call_operands, opened

_PREPARING = VIEWS | {"broadcast_in_dim"}
"""Ops of a loss that are no use of a parameter yet. In `gradient_order` a broadcast is one: plans number their gradients by it."""

_JOINING = frozenset({"psum", "pmax", "pmin", "all_gather"})
"""Collectives whose result is the same on all devices."""


def dependents(jaxpr: Any, inputs: Sequence[bool], joined: AxisNames = ()) -> list[bool]:
    """Returns for each result of `jaxpr` whether it depends on an input marked True; constants depend on nothing.

    Values computed from a device's number count as dependent. Values that collectives join over all axes `joined` do not.
    """
    body = opened(jaxpr)
    reached = {var for var, mark in zip(body.invars, inputs, strict=True) if mark}
    for eqn in body.eqns:
        marks = [_is_in(atom, reached) for atom in eqn.invars]
        if any(marks) or eqn.primitive.name == "axis_index":
            reached.update(var for var, mark in zip(eqn.outvars, _results(eqn, marks, joined), strict=True) if mark)
    return [_is_in(atom, reached) for atom in body.outvars]


def _is_in(atom: Any, reached: set[Any]) -> bool:
    return not isinstance(atom, jexc.Literal) and atom in reached


def _results(eqn: Any, marks: list[bool], joined: AxisNames) -> list[bool]:
    name = eqn.primitive.name
    if name in _JOINING and joined and _axes(eqn.params) >= set(joined) and eqn.params.get("axis_index_groups") is None:
        return [False] * len(eqn.outvars)
    if name in CALLS and name != "custom_linear_solve":
        taken = [marks[index] for index in call_operands(name, eqn.params, len(eqn.invars))]
        return dependents(call_body(name, eqn.params), taken, joined)
    if name == "scan":
        return _scan(eqn, marks, joined)
    if name == "cond" and not marks[0]:
        per_branch = [dependents(branch, marks[1:], joined) for branch in eqn.params["branches"]]
        return [any(found) for found in zip(*per_branch, strict=True)]
    return [True] * len(eqn.outvars)


def _axes(params: Any) -> set[str]:
    axes = params.get("axes", params.get("axis_name"))
    return set(axes if isinstance(axes, tuple | list) else (axes,))


def _scan(eqn: Any, marks: list[bool], joined: AxisNames) -> list[bool]:
    """Follows the marks around the loop until nothing changes."""
    num_consts, num_carry = scan_counts(eqn.params)
    while True:
        found = dependents(eqn.params["jaxpr"], marks, joined)
        carried = [old or new for old, new in zip(marks[num_consts : num_consts + num_carry], found[:num_carry], strict=True)]
        if carried == marks[num_consts : num_consts + num_carry]:
            return [*carried, *found[num_carry:]]
        marks = [*marks[:num_consts], *carried, *marks[num_consts + num_carry :]]


def first_uses(jaxpr: Any) -> list[int]:
    """Returns for each input the number of the first equation that reads it, counting equations inside calls.

    An input that no equation reads gets the number of all equations. The forward pass comes first in the program of a gradient,
    so this is the order of the forward pass.
    """
    body = opened(jaxpr)
    counter = _Counter()
    counter.walk(body, {var: [index] for index, var in enumerate(body.invars)})
    return [counter.first.get(index, counter.count) for index in range(len(body.invars))]


class _Counter:
    def __init__(self) -> None:
        self.count = 0
        self.first: dict[int, int] = {}

    def walk(self, jaxpr: Any, names: dict[Any, list[int]]) -> None:
        """Counts the equations; `names` are the inputs behind the variables of this body."""
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in CALLS:
                inner = opened(call_body(name, eqn.params))
                taken = [eqn.invars[index] for index in call_operands(name, eqn.params, len(eqn.invars))]
                self.walk(inner, self._bound(inner.invars, taken, names))
                continue
            known = [index for atom in eqn.invars if not isinstance(atom, jexc.Literal) for index in names.get(atom, [])]
            if name in _PREPARING:
                names[eqn.outvars[0]] = known
                continue
            self.count += 1
            for index in known:
                self.first.setdefault(index, self.count)

    @staticmethod
    def _bound(variables: Sequence[Any], atoms: Sequence[Any], names: dict[Any, list[int]]) -> dict[Any, list[int]]:
        known = {}
        for var, atom in zip(variables, atoms, strict=True):
            if not isinstance(atom, jexc.Literal) and atom in names:
                known[var] = names[atom]
        return known

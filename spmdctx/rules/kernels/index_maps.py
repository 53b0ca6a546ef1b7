"""Reads the index maps of a kernel: on which grid axes an index depends, and what it is at each step of one axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdctx.rules.control_flow import CALLS, call_body, opened


def axes_of_indices(jaxpr: Any, num_axes: int) -> list[frozenset[int]]:
    """Returns the grid axes on which each result of an index map depends, also through tables that it looks indices up in."""
    known: dict[Any, frozenset[int]] = {var: frozenset({axis}) for axis, var in enumerate(jaxpr.invars[:num_axes])}
    nothing: frozenset[int] = frozenset()

    def axes(atom: Any) -> frozenset[int]:
        return nothing if hasattr(atom, "val") else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        found = nothing.union(*map(axes, eqn.invars))
        known.update(dict.fromkeys(eqn.outvars, found))
    return [axes(atom) for atom in jaxpr.outvars]


def indices_along(jaxpr: Any, result: int, axis: int, size: int) -> list[int] | None:
    """Returns one result of an index map at each step of the one grid axis on which it depends.

    Returns None if the index is looked up in a table, or computed by a primitive that is not known here.
    """
    steps = np.arange(size)
    try:
        found = _value(jaxpr.outvars[result], jaxpr, {jaxpr.invars[axis]: steps})
    except LookupError:
        return None
    return [int(index) for index in np.broadcast_to(found, steps.shape)]


def _value(atom: Any, jaxpr: Any, known: dict[Any, Any]) -> Any:
    """Computes an atom from what is known.

    Raises:
        LookupError: it depends on something else.
    """
    if hasattr(atom, "val"):
        return np.asarray(atom.val)
    if atom not in known:
        eqn = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
        if eqn is None:
            raise LookupError("an index depends on an argument that is not known")
        operands = [_value(operand, jaxpr, known) for operand in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, operands), strict=True))
    return known[atom]


def _results(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name not in CALLS:
        return [_ON_INTEGERS[name](*operands)]
    body = opened(call_body(name, eqn.params))
    known = dict(zip(body.invars, operands, strict=True))
    return [_value(atom, body, known) for atom in body.outvars]


def _quotient(left: Any, right: Any) -> Any:
    """Divides integers as XLA does, towards zero."""
    return np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right))


_ON_INTEGERS: Mapping[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient, "rem": np.fmod, "neg": np.negative},
    **{"abs": np.abs, "sign": np.sign, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or},
    **{"not": np.logical_not, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    "ge": np.greater_equal,
    "convert_element_type": lambda value: value,
    "select_n": lambda which, *cases: np.choose(np.asarray(which).astype(int), cases),
}
"""Primitives of which index maps are made, on integers and booleans."""

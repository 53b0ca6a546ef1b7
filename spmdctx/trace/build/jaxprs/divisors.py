"""By which numbers a program divides its values: a sum that is divided by the number of its terms is a mean."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import jax.extend.core as jexc
import numpy as np

from spmdctx.rules.control_flow import bodies_of, opened


def divisors(equations: Sequence[Any], op_of_site: Sequence[int]) -> dict[int, float]:
    """Returns the number by which each op divides a value, where the program holds it; 1 where the value becomes no smaller.

    Args:
        equations: the equation of each site, None for boundaries.
        op_of_site: the op of each site, negative where it is dead.
    """
    found = {op: _divisor(eqn) for eqn, op in zip(equations, op_of_site, strict=True) if op >= 0 and eqn is not None}
    return {op: divisor for op, divisor in found.items() if divisor is not None}


def divisors_in(jaxpr: Any) -> tuple[float, ...]:
    """Returns the numbers by which a program and its bodies make values smaller, in rising order, each as often as it does so."""
    own = [divisor for eqn in jaxpr.eqns if (divisor := _divisor(eqn)) is not None and divisor > 1]
    inner = [divisor for eqn in jaxpr.eqns for body in bodies_of(eqn.params) for divisor in divisors_in(opened(body))]
    return tuple(sorted(own + inner))


def _divisor(eqn: Any) -> float | None:
    """Returns by how much an equation makes a value smaller, None if it does not tell."""
    name = eqn.primitive.name
    if name not in ("mul", "div"):
        return None
    numbers = [place for place, atom in enumerate(eqn.invars) if isinstance(atom, jexc.Literal)]
    if len(numbers) != 1 or (name == "div" and numbers != [1]):
        return None
    value = np.asarray(eqn.invars[numbers[0]].val)
    size = float(np.abs(value)) if value.ndim == 0 else 0.0
    if not size or not isfinite(size):
        return None
    return max(size if name == "div" else 1 / size, 1.0)

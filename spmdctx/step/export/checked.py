"""Compares two programs equation by equation, calls dissolved."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc
import numpy as np

from spmdctx.rules.control_flow import bodies_of, is_body
from spmdctx.step.export.listing import dissolved, stated
from spmdctx.step.export.runtime import type_text
from spmdctx.trace.build.canonical import Canonical


def difference(one: Any, other: Any) -> str:
    """Returns the first difference between two bodies, empty if they are alike."""
    return _difference(one, other, Canonical())


def _difference(one: Any, other: Any, canonical: Canonical) -> str:
    sides = [(jaxpr, *dissolved(jaxpr)) for jaxpr in (getattr(body, "jaxpr", body) for body in (one, other))]
    if len(sides[0][1]) != len(sides[1][1]):
        return f"{len(sides[0][1])} equations and {len(sides[1][1])}"
    names: list[dict[Any, Any]] = [{}, {}]
    for known, (jaxpr, _, _) in zip(names, sides, strict=True):
        known.update((var, place) for place, var in enumerate([*jaxpr.constvars, *jaxpr.invars]))
        known["inputs"] = [type_text(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]]
    if names[0]["inputs"] != names[1]["inputs"]:
        return "other inputs"
    for place, pair in enumerate(zip(sides[0][1], sides[1][1], strict=True)):
        forms = [_form(eqn, known, canonical) for eqn, known in zip(pair, names, strict=True)]
        if forms[0] != forms[1]:
            return f"equation {place}: {forms[0]} and {forms[1]}"
        for body, found in zip(*[bodies_of(eqn.params) for eqn in pair], strict=True):
            inner = _difference(body, found, canonical)
            if inner:
                return f"equation {place}, {pair[0].primitive.name}: {inner}"
        for known, eqn in zip(names, pair, strict=True):
            known.update((var, (place, index)) for index, var in enumerate(eqn.outvars))
    results = [[_named(atom, known) for atom in outputs] for known, (_, _, outputs) in zip(names, sides, strict=True)]
    return "" if results[0] == results[1] else "other results"


def _form(eqn: Any, names: Any, canonical: Canonical) -> Any:
    params = {
        name: stated(value)
        for name, value in eqn.params.items()
        if not (callable(value) or any(map(is_body, value if isinstance(value, tuple | list) else (value,))))
    }
    types = [type_text(var.aval) for var in eqn.outvars]
    return eqn.primitive.name, types, [_named(atom, names) for atom in eqn.invars], canonical.form(params).text


def _named(atom: Any, names: Any) -> Any:
    if isinstance(atom, jexc.Literal):
        return type_text(atom.aval), np.asarray(atom.val).tobytes()
    return names[atom]

"""Compares two programs equation by equation, calls dissolved."""

from __future__ import annotations

from typing import Any

import jax.extend.core as jexc

from spmdctx.rules.control_flow import MANUAL, bodies_of, is_body
from spmdctx.step.export.literals import literal_bytes
from spmdctx.step.export.operations import dissolved, stated
from spmdctx.step.export.runtime import type_text
from spmdctx.trace.build.canonical import Canonical

_COUNTER = "region"
"""The parameter by which marks of `shard()` tell calls apart; it goes on counting from one trace to the next."""


def difference(one: Any, other: Any) -> str:
    """Returns the first difference between two bodies, empty if they are alike."""
    return _difference(one, other, Canonical())


def _difference(one: Any, other: Any, canonical: Canonical, is_block: bool = False) -> str:
    sides = [(jaxpr, *dissolved(jaxpr, is_block=is_block)) for jaxpr in (getattr(body, "jaxpr", body) for body in (one, other))]
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
            texts = [f"{eqn.primitive.name} {' '.join(type_text(var.aval) for var in eqn.outvars)}" for eqn in pair]
            return f"equation {place}: {' and '.join(dict.fromkeys(texts))}{' of other operands' if texts[0] == texts[1] else ''}"
        for body, found in zip(*[bodies_of(eqn.params) for eqn in pair], strict=True):
            inner = _difference(body, found, canonical, is_block or pair[0].primitive.name in MANUAL)
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
        if not (name == _COUNTER or callable(value) or any(map(is_body, value if isinstance(value, tuple | list) else (value,))))
    }
    types = [type_text(var.aval) for var in eqn.outvars]
    return eqn.primitive.name, types, [_named(atom, names) for atom in eqn.invars], canonical.form(params).text


def _named(atom: Any, names: Any) -> Any:
    if isinstance(atom, jexc.Literal):
        return type_text(atom.aval), literal_bytes(atom)
    return names[atom]

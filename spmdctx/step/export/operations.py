"""Writes operations as rows of a table, bodies of loops and branches among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.errors import UnsupportedError
from spmdctx.ir.primitives import MARKER
from spmdctx.rules.control_flow import is_body, opened
from spmdctx.step.export.blocks import KEYS, Body, Named, named, primitive
from spmdctx.step.export.literals import NoLiteralError, source
from spmdctx.step.export.runtime import DISSOLVED
from spmdctx.trace.build.origins import source_line

_IN_BLOCKS = {**DISSOLVED, "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Calls that are dissolved on each device's block, too: nothing differentiates what stands there."""


class Code(str):
    """Python source that stands in a row as it is."""


def block_rows(body: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns rows of operations that make a body's results, and the names of these.

    Raises:
        UnsupportedError: an operation that no table can say.
    """
    jaxpr = opened(body)
    names: dict[Any, str] = {var: f"in.{place}" for place, var in enumerate(jaxpr.invars)}

    def read(atom: Any) -> Any:
        return (np.asarray(atom.val).item(), str(atom.aval.dtype)) if isinstance(atom, jexc.Literal) else names[atom]

    rows = []
    eqns, results = dissolved(jaxpr, is_block=True)
    for number, eqn in enumerate(eqns):
        _check_known(eqn)
        to = tuple(f"{number}.{place}" for place in range(len(eqn.outvars)))
        rows.append((eqn.primitive.name, tuple(map(read, eqn.invars)), _params(eqn), to))
        names.update(zip(eqn.outvars, to, strict=True))
    return tuple(rows), tuple(map(read, results))


def _params(eqn: Any) -> dict[str, Any]:
    """Returns parameters as source; what a policy saves is decided, as nothing is differentiated any more."""
    return {name: None if name == "policy" else _param(stated(value), eqn) for name, value in eqn.params.items()}


def _param(value: Any, eqn: Any) -> Any:
    if is_body(value) and not _has_source(value):
        if getattr(value, "consts", ()) or opened(value).constvars:
            raise _unsaid(eqn, "a body with arrays of its own")
        inputs = tuple((str(var.aval.dtype), tuple(var.aval.shape)) for var in opened(value).invars)
        return Body(inputs, *block_rows(value), not isinstance(value, jexc.ClosedJaxpr))
    found = _named(value)
    if found is not None:
        return found
    if type(value) is tuple and any(map(is_body, value)):
        return tuple(_param(own, eqn) for own in value)
    return code_of(value, eqn)


def _named(value: Any) -> Named | None:
    """Returns a parameter that has only a name, None for others."""
    if type(value).__name__ == "MemorySpace":
        return Named("memory_space", value.name)
    return next((Named("impl", kind) for kind in KEYS if type(value).__name__ == "PRNGImpl" and named("impl", kind) == value), None)


def _has_source(value: Any) -> bool:
    """Returns whether a body is written as an expression: that which combines two numbers."""
    try:
        source(value)
    except NoLiteralError:
        return False
    return True


def code_of(value: Any, eqn: Any) -> Code:
    """Returns the source of a parameter.

    Raises:
        UnsupportedError: it has none.
    """
    try:
        return Code(source(value))
    except NoLiteralError as error:
        raise _unsaid(eqn, f"a parameter of type {error}") from None


def _check_known(eqn: Any) -> None:
    try:
        primitive(eqn.primitive.name)
    except KeyError:
        raise _unsaid(eqn, "a primitive without a public name") from None


def _unsaid(eqn: Any, got: str) -> UnsupportedError:
    return UnsupportedError(
        f'export("jax") cannot write the operation {eqn.primitive.name} as this plan splits it.',
        where=source_line(eqn.source_info),
        got=got,
        fix="run the step with spmdctx, or pin the operands of this operation so that it stays whole",
    )


def _is_identity(eqn: Any) -> bool:
    """Returns whether an equation hands on its operand: a mark, or a conversion that only makes a type a strong one."""
    kind = eqn.primitive.name
    same = kind == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    return kind == MARKER or bool(same)


def stated(value: Any) -> Any:
    """Returns a parameter; a sharding that splits nothing, as operations of a type get it inside of a mesh, as None."""
    return None if isinstance(value, jax.NamedSharding) and not any(value.spec) else value


def dissolved(jaxpr: Any, *, is_block: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns the equations of a body with those of calls in the calls' places, and its results.

    Calls of the user's own stay, but for what runs on each device's block (`is_block`).
    """
    found: list[Any] = []
    calls = _IN_BLOCKS if is_block else DISSOLVED

    def walk(jaxpr: Any, names: dict[Any, Any]) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jexc.Literal) else names.get(atom, atom)

        for eqn in jaxpr.eqns:
            inner, operands = eqn.params.get(calls.get(eqn.primitive.name, "")), [read(atom) for atom in eqn.invars]
            results: Sequence[Any]
            if inner is not None and not getattr(inner, "consts", ()):
                results = walk(opened(inner), dict(zip(opened(inner).invars, operands, strict=True)))
            elif is_block and _is_identity(eqn):
                results = operands
            else:
                results = [jexc.Var(var.aval) for var in eqn.outvars]
                found.append(eqn.replace(invars=operands, outvars=list(results)))
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return found, walk(jaxpr, {})

"""Finds the equations of the user's own trace among those of the captured program, and marks the captured ones with them.

The two are traced alike, but capture also rewrites: it leaves out what nothing depends on, and dissolves what the plan could not see.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.ir.primitives import IDENTITIES
from spmdctx.rules.control_flow import MANUAL, is_body, opened, with_bodies
from spmdctx.step.export.literals import literal_bytes
from spmdctx.step.export.losses import is_loss, results_of_losses
from spmdctx.step.export.runtime import Numbered, bodies, type_text
from spmdctx.trace.build.canonical import Canonical


@dataclass(eq=False)
class Tag:
    """What stands in place of an equation's context in a program that is only looked at; `number` is that of the user's equation."""

    number: int | None = None
    key: str = ""


def tagged(closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns the program with a Tag of its own at each equation, bodies included; it cannot run."""
    return _tagged(closed)


def _tagged(body: Any) -> Any:
    jaxpr = opened(body)
    eqns = [
        eqn.replace(ctx=Tag(), params=eqn.params if eqn.primitive.name in MANUAL else with_bodies(eqn.params, _tagged))
        for eqn in jaxpr.eqns
    ]
    new = jaxpr.replace(eqns=eqns)
    return jexc.ClosedJaxpr(new, body.consts) if hasattr(body, "consts") else new


def align(captured: jexc.ClosedJaxpr, own: jexc.ClosedJaxpr, inputs: Sequence[int]) -> None:
    """Numbers the tags of a captured program by the equations of the user's own trace.

    Args:
        captured: the tagged program.
        own: the user's trace.
        inputs: for each input of the captured program, which one of the own trace it is.
    """
    names = {f"in.{place}": f"in.{number}" for place, number in enumerate(inputs)}
    known = {id(const): place for place, const in enumerate(own.consts)}
    for place, const in enumerate(captured.consts):
        names[f"const.{place}"] = f"const.{known.get(id(const), place)}"
    _Alignment(Canonical()).body(captured.jaxpr, own.jaxpr, names, "")


class _Alignment:
    def __init__(self, canonical: Canonical) -> None:
        self._canonical = canonical

    def body(self, captured: Any, own: Any, names: dict[Any, Any], key: str) -> None:
        """Aligns one body; `names` has the user's name of each captured input."""
        one, other = Numbered(captured, IDENTITIES), Numbered(own)
        if not self._are_alike(one, other, names):
            self._search(one, other, names, key)
            return
        for number, (line, found) in enumerate(zip(one.lines, other.lines, strict=True)):
            self._match(line[0], found[0], number, key)

    def _are_alike(self, one: Numbered, other: Numbered, names: Mapping[Any, Any]) -> bool:
        """Returns whether two bodies have the same equations in the same order, which nearly all have."""
        if len(one.lines) != len(other.lines):
            return False
        return all(
            _head(eqn) == _head(found) and [_named(name, names) for name in operands] == [_named(name, {}) for name in others]
            for (eqn, operands, _), (found, others, _) in zip(one.lines, other.lines, strict=True)
        )

    def _match(self, eqn: Any, found: Any, number: int, key: str) -> None:
        eqn.ctx.number, eqn.ctx.key = number, key
        for (name, place, body), (_, _, own) in zip(bodies(eqn), bodies(found), strict=False):
            if len(opened(body).invars) == len(opened(own).invars):
                self.body(body, own, {}, f"{key}{number}/{name}.{place}/")

    def _search(self, one: Numbered, other: Numbered, names: dict[Any, Any], key: str) -> None:
        """Matches equations that compute the same of the same values, each once in order, later copies with the last one."""
        places: dict[Any, deque[int]] = defaultdict(deque)
        for number, (eqn, operands, _) in enumerate(other.lines):
            places[self._form(eqn, operands, {})].append(number)
        losses = iter(_paired(one, results_of_losses(other)))
        for eqn, operands, results in one.lines:
            found = places.get(self._form(eqn, operands, names))
            if is_loss(eqn):
                names.update(zip(results, next(losses), strict=True))
                continue
            if not found:
                names.update((name, ("foreign", name)) for name in results)
                continue
            number = found.popleft() if len(found) > 1 else found[0]
            names.update(zip(results, other.lines[number][2], strict=True))
            self._match(eqn, other.lines[number][0], number, key)

    def _form(self, eqn: Any, operands: Sequence[Any], names: Mapping[Any, Any]) -> Any:
        plain = {name: value for name, value in eqn.params.items() if not _holds_bodies(value)}
        return (*_head(eqn), *[_named(name, names) for name in operands], self._canonical.form(plain).text)


def _paired(captured: Numbered, losses: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """Returns the names of the results of each loss in a captured body.

    Raises:
        UnsupportedError: some losses of the user's trace are none that each device computes by itself.
    """
    counts = [len(results) for eqn, _, results in captured.lines if is_loss(eqn)]
    if counts and counts != [len(own) for own in losses]:
        raise UnsupportedError(
            'export("jax") cannot write a step whose losses are computed by each device in part only: one reads nothing of the batch.',
            got=f"{len(losses)} losses, of which each device computes {len(counts)} by itself",
            fix="use jax.value_and_grad for the others",
        )
    return losses


def _holds_bodies(value: Any) -> bool:
    return any(is_body(entry) for entry in (value if isinstance(value, tuple | list) else (value,))) or callable(value)


def _head(eqn: Any) -> tuple[Any, ...]:
    return eqn.primitive.name, *[type_text(var.aval) for var in eqn.outvars]


def _named(name: Any, names: Mapping[Any, Any]) -> Any:
    if isinstance(name, jexc.Literal):
        return type_text(name.aval), literal_bytes(name)
    return names.get(name, name)

"""Tells leaves that only the update of other leaves reads from those that the differentiated function reads, by data flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.rules.control_flow import CALLS, bodies_of, call_body, call_operands, opened
from spmdctx.trace.build.origins import DIFFERENTIATED

Flags = list[bool]


class Updates:
    """Answers what a step reads its inputs for. A step that differentiates nothing has no update: its forward pass is unknown."""

    def __init__(self, jaxpr: jexc.Jaxpr, carried: Mapping[int, int]) -> None:
        """Looks at a flat program; `carried` maps each carried input to the output that is its next value."""
        self._jaxpr, self._carried = jaxpr, carried
        known = _differentiates(jaxpr)
        self._forward = _reads(jaxpr, [False] * len(jaxpr.outvars), True) if known else [True] * len(jaxpr.invars)

    def unread(self, leaves: Iterable[int]) -> set[int]:
        """Returns those of some inputs that no differentiated function reads."""
        return {leaf for leaf in leaves if not self._forward[leaf]}

    def of_others(self, leaves: Iterable[int]) -> set[int]:
        """Returns those of some inputs that no differentiated function reads, and that change the next value of another input."""
        waiting = self.unread(leaves)
        changed = {leaf for leaf in self._carried if self._forward[leaf]}
        found: set[int] = set()
        while waiting and changed:
            targets = {self._carried[leaf] for leaf in changed}
            reached = _reads(self._jaxpr, [index in targets for index in range(len(self._jaxpr.outvars))], False)
            # State of state: what changes it changes a parameter one step later.
            changed = {leaf for leaf in waiting if reached[leaf]}
            found |= changed
            waiting -= changed
            changed &= self._carried.keys()
        return found


def _differentiates(jaxpr: Any) -> bool:
    return any(_is_differentiated(eqn) or any(map(_differentiates, bodies_of(eqn.params))) for eqn in opened(jaxpr).eqns)


def _is_differentiated(eqn: Any) -> bool:
    return DIFFERENTIATED in str(eqn.source_info.name_stack)


def _reads(jaxpr: Any, outputs: Sequence[bool], ahead: bool) -> Flags:
    """Flags the inputs that reach a flagged output; with `ahead` also those that reach a differentiated equation."""
    live = {var for var, flag in zip(jaxpr.outvars, outputs, strict=True) if flag and not isinstance(var, jexc.Literal)}
    for eqn in reversed(jaxpr.eqns):
        whole = ahead and _is_differentiated(eqn)
        read = [True] * len(eqn.invars) if whole else _through(eqn, [var in live for var in eqn.outvars], ahead)
        live.update(var for var, flag in zip(eqn.invars, read, strict=True) if flag and not isinstance(var, jexc.Literal))
    return [var in live for var in jaxpr.invars]


def _through(eqn: Any, results: Flags, ahead: bool) -> Flags:
    """Flags the operands of an equation that reach its flagged results, or what is differentiated inside it."""
    name = eqn.primitive.name
    if name in CALLS:
        inner, taken = opened(call_body(name, eqn.params)), call_operands(name, eqn.params, len(eqn.invars))
        if len(inner.invars) == len(taken):
            of_body = dict(zip(taken, _reads(inner, results, ahead), strict=True))
            return [of_body.get(place, True) for place in range(len(eqn.invars))]
    if name in _CONTROL:
        return _CONTROL[name](eqn, results, ahead)
    read = any(results) or (ahead and any(map(_differentiates, bodies_of(eqn.params))))
    return [read] * len(eqn.invars)


def _scan(eqn: Any, results: Flags, ahead: bool) -> Flags:
    constants, carried = scan_counts(eqn.params)
    return _loop(eqn.params["jaxpr"].jaxpr, results, constants, carried, ahead)


def _while(eqn: Any, results: Flags, ahead: bool) -> Flags:
    """Takes what the condition reads for read, as it decides on all results."""
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    read = _reads(test, [any(results)], ahead)
    kept = [one or other for one, other in zip(results, read[of_test:], strict=True)]
    return read[:of_test] + _loop(body, kept, of_body, len(results), ahead)


def _loop(body: Any, results: Flags, constants: int, carried: int, ahead: bool) -> Flags:
    flags = list(results)
    while True:
        read = _reads(body, flags, ahead)
        more = [one or other for one, other in zip(flags[:carried], read[constants : constants + carried], strict=True)]
        if more == flags[:carried]:
            return read[:constants] + more + read[constants + carried :]
        flags[:carried] = more


def _cond(eqn: Any, results: Flags, ahead: bool) -> Flags:
    branches = [_reads(branch.jaxpr, results, ahead) for branch in eqn.params["branches"]]
    index = any(results) or any(any(own) for own in branches)
    return [index, *map(any, zip(*branches, strict=True))]


_CONTROL: Mapping[str, Callable[[Any, Flags, bool], Flags]] = {"scan": _scan, "while": _while, "cond": _cond}

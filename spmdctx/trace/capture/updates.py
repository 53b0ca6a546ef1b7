"""Tells leaves that only the update of other leaves reads from those that the differentiated function reads, by data flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.trace.build.origins import DIFFERENTIATED

_ONE_BODY = {
    **dict.fromkeys(("jit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint", "custom_lin"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}

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
    return any(_is_differentiated(eqn) or any(map(_differentiates, _bodies(eqn))) for eqn in jaxpr.eqns)


def _is_differentiated(eqn: Any) -> bool:
    return DIFFERENTIATED in str(eqn.source_info.name_stack)


def _bodies(eqn: Any) -> list[Any]:
    bodies = [body for param in eqn.params.values() for body in (param if isinstance(param, (tuple, list)) else (param,))]
    return [getattr(body, "jaxpr", body) for body in bodies if hasattr(body, "eqns") or hasattr(body, "jaxpr")]


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
    if name in _ONE_BODY and (body := eqn.params.get(_ONE_BODY[name])) is not None:
        inner = getattr(body, "jaxpr", body)
        if len(inner.invars) == len(eqn.invars):
            return _reads(inner, results, ahead)
    if name in _CONTROL:
        return _CONTROL[name](eqn, results, ahead)
    read = any(results) or (ahead and any(map(_differentiates, _bodies(eqn))))
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

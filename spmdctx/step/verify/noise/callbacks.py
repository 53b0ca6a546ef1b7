"""Callbacks of a step that runs several times: none reports twice, and what the host answered is answered again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import plain_call_params
from spmdctx.rules.control_flow import with_bodies
from spmdctx.step.verify.noise.primitives import REPORTS


def only_reports(eqn: Any) -> bool:
    """Returns whether an equation calls the host and gets nothing back."""
    return eqn.primitive.name in REPORTS and not eqn.outvars


class Answers:
    """What the host answered to the calls with effects of one run, for runs that must not call it again."""

    def __init__(self) -> None:
        self._given: dict[int, list[Any]] = {}
        self._next: dict[int, int] = {}

    def recording(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a callback that calls the host and keeps its answers."""
        given = self._given.setdefault(id(callback), [])

        def call(*args: Any) -> Any:
            given.append(callback(*args))
            return given[-1]

        return call

    def repeating(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a callback that gives the answers that were kept, in their order."""
        key = id(callback)

        def call(*args: Any) -> Any:
            given, place = self._given[key], self._next.get(key, 0)
            self._next[key] = place + 1
            return given[min(place, len(given) - 1)]

        return call

    def clear(self) -> None:
        """Forgets the answers of the last run."""
        for given in self._given.values():
            given.clear()
        self.rewind()

    def rewind(self) -> None:
        """Lets the next run get the answers from the first one on."""
        self._next.clear()


def _without_places(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a nested jit that say where it runs, as one without shardings has them."""
    plain = plain_call_params()
    places = {name: (plain[name],) * len(params[name]) for name in ("in_shardings", "out_shardings")}
    return {**places, "ctx_mesh": plain["ctx_mesh"]} if "ctx_mesh" in params else places


def for_one_run(jaxpr: Any, answers: Answers | None, *, keep_constraints: bool) -> Any:
    """Returns a program without reports to the host, whose other calls with effects may be recorded.

    Args:
        jaxpr: open or closed.
        answers: takes what the host answers; None leaves the calls as they are.
        keep_constraints: False removes sharding constraints and the shardings of nested jits, so that the program runs on one device.
            Bodies of shard_map stay as they are.
    """
    is_open = isinstance(jaxpr, jexc.Jaxpr)
    body = jaxpr if is_open else jaxpr.jaxpr

    def inner(program: Any) -> Any:
        return for_one_run(program, answers, keep_constraints=keep_constraints)

    def changed(eqn: Any) -> Any:
        if eqn.primitive.name == "sharding_constraint" and not keep_constraints:
            return eqn.replace(primitive=jexc.primitives.copy_p, params={})
        params = with_bodies(eqn.params, inner)
        if "in_shardings" in params and not keep_constraints:
            params |= _without_places(params)
        if eqn.primitive.name == "io_callback" and answers is not None:
            params["callback"] = answers.recording(params["callback"])
        return eqn.replace(params=params)

    plain = body.replace(eqns=[changed(eqn) for eqn in body.eqns if not only_reports(eqn)])
    return plain if is_open else jexc.ClosedJaxpr(plain, jaxpr.consts)

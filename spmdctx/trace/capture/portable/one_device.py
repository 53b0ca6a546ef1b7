"""Constraints, placements and shard_maps over one device, in a step for several; constraints and placements over several in one for one.

A mesh of one device says nothing about how several are used. Programs such as MaxText's, T5X's and haliax's are written with whatever
mesh there is, and on one device all its axes have size 1. Neither does a mesh of several say how one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdctx._compat import plain_call_params
from spmdctx.rules.control_flow import opened
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.capture.portable.collectives import Alone
from spmdctx.trace.capture.portable.placements import is_one_device
from spmdctx.trace.capture.portable.rewriting import Handler, Rewriting
from spmdctx.wording import counted


@dataclass
class OneDevice:
    """Handlers that leave out what is said of other devices, and what they have left out: a count of each kind, and the first line.

    `is_foreign` tells whether a placement is of such devices, and `described` names them.
    """

    is_foreign: Callable[[Any], bool] = is_one_device
    described: str = "one device"
    counts: dict[str, int] = field(default_factory=dict)
    line: str = ""
    _inside: frozenset[str] = frozenset()
    _rewritings: dict[frozenset[str], Rewriting] = field(default_factory=dict)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handlers, by primitive."""
        return {
            **dict.fromkeys(("sharding_constraint", "reshard"), self._constraint),
            **dict.fromkeys(("jit", "pjit"), self._call),
            "device_put": self._placement,
            "shard_map": self._shard_map,
        }

    def note(self, num_devices: int) -> str:
        """Says what was left out of a step for so many devices; empty if that is nothing."""
        if not self.counts:
            return ""
        things = [counted(count, thing) for thing, count in self.counts.items()]
        text = " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)
        line = f", the first at {self.line}" if self.line else ""
        return f"What the step says of {self.described} has no effect on {num_devices}: {text}{line}."

    def add(self, thing: str, count: int = 1) -> None:
        """Counts things that are left out."""
        self.counts[thing] = self.counts.get(thing, 0) + count

    def _leave_out(self, thing: str, eqn: Any, count: int = 1) -> None:
        self.add(thing, count)
        self.line = self.line or source_line(eqn.source_info)

    def _constraint(self, eqn: Any, operands: list[Any], _eqns: list[Any]) -> Sequence[Any] | None:
        if not self.is_foreign(eqn.params.get("sharding", eqn.params.get("dst_sharding"))):
            return None
        self._leave_out("sharding constraint", eqn)
        return operands

    def _placement(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        places = eqn.params["devices"]
        if not any(map(self.is_foreign, places)):
            return None
        self._leave_out("placement", eqn)
        spaces = [
            (getattr(atom.aval, "memory_space", None), getattr(var.aval, "memory_space", None))
            for atom, var in zip(operands, eqn.outvars, strict=True)
        ]
        if all(before == after for before, after in spaces) and all(place is None or self.is_foreign(place) for place in places):
            return operands
        # A move to the host's memory stays one.
        places = tuple(after if self.is_foreign(place) else place for place, (_, after) in zip(places, spaces, strict=True))
        eqns.append(eqn.replace(invars=operands, params={**eqn.params, "devices": places}))
        return eqn.outvars  # type: ignore[no-any-return]  # JAX does not say so

    def _call(self, eqn: Any, _operands: list[Any], _eqns: list[Any]) -> Any:
        given = eqn.params
        count = sum(map(self.is_foreign, (*given["in_shardings"], *given["out_shardings"])))
        if not count and not self.is_foreign(given.get("ctx_mesh")):
            return None
        if count:
            self._leave_out("jit sharding", eqn, count)
        plain, params = plain_call_params(), dict(given)
        for name in ("in_shardings", "out_shardings"):
            params[name] = tuple(plain[name] if self.is_foreign(sharding) else sharding for sharding in given[name])
        if self.is_foreign(given.get("ctx_mesh")):
            params["ctx_mesh"] = plain["ctx_mesh"]
        return eqn.replace(params=params)

    def _shard_map(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        mesh, body = eqn.params["mesh"], eqn.params["jaxpr"]
        body = opened(body)
        names = self._inside | frozenset(map(str, mesh.axis_names))
        alone = Alone(names)
        if not is_one_device(mesh) or not self.is_foreign(mesh) or not alone.knows(body):
            return None
        self._leave_out("shard_map", eqn)
        outer, self._inside = self._inside, names
        if names not in self._rewritings:
            self._rewritings[names] = Rewriting({**self.handlers, **alone.handlers}, gone=names)
        results = self._rewritings[names].write(body, dict(zip(body.invars, operands, strict=True)), eqns, eqn.source_info)
        self._inside = outer
        return results

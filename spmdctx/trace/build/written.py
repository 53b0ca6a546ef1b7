"""The collectives that the user wrote inside a shard_map, without those that XLA removes: nobody uses them, or an equal one ran before."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from spmdctx._compat import acts_outside, scan_counts
from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.ir.graph import item_bytes
from spmdctx.rules.control_flow import CALLS, call_body, call_operands
from spmdctx.trace.build.origins import source_line

_KIND_OF_PRIMITIVE = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}

_SEALED = frozenset({"remat2", "remat", "checkpoint"})
"""Calls whose ops XLA may keep apart from equal ones outside."""


class _Inner(NamedTuple):
    """A body that an equation runs `runs` times: which of its results are needed, and which operands of the equation it takes."""

    jaxpr: Any
    needed: Sequence[bool]
    operands: Sequence[int]
    runs: int = 1


def written_collectives(jaxpr: Any, used: Sequence[bool], repeats: int, cause: Cause | None) -> Iterator[Collective]:
    """Yields the collectives of a manual body that run, with the repeats of loops multiplied.

    Args:
        jaxpr: The body, over one device's shapes.
        used: For each of its results, whether the step uses it.
        repeats: How often the body runs in a step.
        cause: The cause of all collectives; if None, each was written by the user.
    """
    yield from _collectives(jaxpr, used, repeats, cause, _Numbers())


def _collectives(jaxpr: Any, used: Sequence[bool], repeats: int, cause: Cause | None, numbers: _Numbers) -> Iterator[Collective]:
    for eqn, needed in _alive(jaxpr, used)[0]:
        name = eqn.primitive.name
        inside = _inner(eqn, needed)
        for one in inside:
            is_inlined = name in CALLS and name not in _SEALED
            own = numbers if is_inlined else _Numbers()
            if is_inlined:
                numbers.bind(one.jaxpr.invars, [eqn.invars[place] for place in one.operands])
            yield from _collectives(one.jaxpr, one.needed, repeats * one.runs, cause, own)
            if is_inlined:
                numbers.bind(eqn.outvars, one.jaxpr.outvars)
            else:
                numbers.forget(eqn.outvars)
        if not inside and numbers.is_new(eqn) and name in _KIND_OF_PRIMITIVE:
            yield from _written(eqn, _KIND_OF_PRIMITIVE[name], needed, repeats, cause or Cause(CauseForm.WRITTEN, primitive=name))


def _written(eqn: Any, kind: str, needed: Sequence[bool], repeats: int, cause: Cause) -> Iterator[Collective]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = tuple(str(axis) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)))
    for operand, result, is_needed in zip(eqn.invars, eqn.outvars, needed, strict=False):
        if is_needed:
            carrier = (result if kind == "all_gather" else operand).aval
            payload = math.prod(getattr(carrier, "shape", ())) * item_bytes(str(getattr(carrier, "dtype", "float32")))
            yield Collective(kind, names, payload, 0.0, repeats, cause, source_line(eqn.source_info))


def _alive(jaxpr: Any, used: Sequence[bool]) -> tuple[list[tuple[Any, list[bool]]], list[bool]]:
    """Returns the equations that results or effects need, each with its needed results, and the inputs that are needed."""
    wanted = {id(var) for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used}
    alive = []
    for eqn in reversed(jaxpr.eqns):
        needed = [id(var) in wanted for var in eqn.outvars]
        if any(needed) or acts_outside(eqn):
            alive.append((eqn, needed))
            wanted.update(id(atom) for atom, is_read in zip(eqn.invars, _read(eqn, needed), strict=True) if is_read)
    return alive[::-1], [id(var) in wanted for var in jaxpr.invars]


def _read(eqn: Any, needed: Sequence[bool]) -> Sequence[bool]:
    """Returns which operands an equation reads to make its needed results."""
    if eqn.primitive.name in _KIND_OF_PRIMITIVE and len(eqn.invars) == len(eqn.outvars):
        return needed
    inside = _inner(eqn, needed)
    if not inside:
        return [True] * len(eqn.invars)
    taken = {place for one in inside for place in one.operands}
    read = [place not in taken for place in range(len(eqn.invars))]
    for one in inside:
        # Bodies of other primitives, such as the addition of a scatter, take no operands as they are.
        for place, is_read in zip(one.operands, _alive(one.jaxpr, one.needed)[1], strict=len(one.operands) > 0):
            read[place] |= is_read
    return read


def _inner(eqn: Any, needed: Sequence[bool]) -> list[_Inner]:
    """Returns the bodies that an equation runs; none for one that is no call, loop or branch."""
    name, params = eqn.primitive.name, eqn.params
    every = range(len(eqn.invars))
    if name == "scan":
        consts, carried = scan_counts(params)
        jaxpr = _opened(params["jaxpr"])
        return [_Inner(jaxpr, _around(jaxpr, needed, consts, carried), every, int(params["length"]))]
    if name == "while":
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        test, body = _opened(params["cond_jaxpr"]), _opened(params["body_jaxpr"])
        state = every[num_cond + num_body :]
        read = _alive(test, [True])[1][num_cond:]
        wanted = _around(body, [own or tested for own, tested in zip(needed, read, strict=True)], num_body, len(state))
        return [_Inner(test, [True], [*every[:num_cond], *state]), _Inner(body, wanted, every[num_cond:])]
    if name == "cond":
        return [_Inner(_opened(branch), needed, every[1:]) for branch in params["branches"]]
    if name in CALLS:
        return [_Inner(_opened(call_body(name, params)), needed, call_operands(name, params, len(eqn.invars)))]
    held = [body for param in params.values() for body in (param if isinstance(param, (tuple, list)) else (param,))]
    bodies = [_opened(body) for body in held if hasattr(body, "eqns") or hasattr(body, "jaxpr")]
    return [_Inner(body, [True] * len(body.outvars), ()) for body in bodies]


def _around(body: Any, needed: Sequence[bool], num_consts: int, num_carried: int) -> list[bool]:
    """Returns which results of a loop's body are needed: a carried one also if the next iteration reads it for others."""
    wanted = list(needed)
    while True:
        read = _alive(body, wanted)[1][num_consts : num_consts + num_carried]
        more = [own or again for own, again in zip(wanted, [*read, *wanted[num_carried:]], strict=True)]
        if more == wanted:
            return wanted
        wanted = more


def _opened(body: Any) -> Any:
    return getattr(body, "jaxpr", body)


class _Numbers:
    """Numbers the values of a body. Equal ones have one number, as XLA makes equal ops one."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._known: dict[Hashable, list[int]] = {}
        self._next = count()

    def of(self, atom: Any) -> int:
        """Returns the number of a variable or literal."""
        if hasattr(atom, "val"):
            value = atom.val.item() if getattr(atom.val, "shape", None) == () else atom.val
            return self._numbers(("literal", str(atom.aval.dtype), value), 1)[0][0]
        return self._of.setdefault(id(atom), next(self._next))

    def is_new(self, eqn: Any) -> bool:
        """Numbers the results of an equation; returns whether no equal equation came before."""
        key = None if acts_outside(eqn) else (eqn.primitive, *map(self.of, eqn.invars), *eqn.params.items())
        numbers, is_new = self._numbers(key, len(eqn.outvars))
        self._of.update(zip(map(id, eqn.outvars), numbers, strict=True))
        return is_new

    def bind(self, variables: Sequence[Any], atoms: Sequence[Any]) -> None:
        """Gives variables the numbers of what a call hands to them."""
        self._of.update([(id(var), self.of(atom)) for var, atom in zip(variables, atoms, strict=True)])

    def forget(self, variables: Sequence[Any]) -> None:
        """Gives variables new numbers."""
        self._of.update([(id(var), next(self._next)) for var in variables])

    def _numbers(self, key: Hashable, size: int) -> tuple[list[int], bool]:
        fresh = [next(self._next) for _ in range(size)]
        try:
            found = fresh if key is None else self._known.setdefault(key, fresh)
        except TypeError:  # parameters that cannot be compared
            found = fresh
        return found, found is fresh

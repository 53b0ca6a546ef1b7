"""The collectives that the user wrote inside a shard_map, without those that XLA removes: nobody uses them, or an equal one ran before."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any

from spmdctx._compat import acts_outside
from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.ir.graph import item_bytes
from spmdctx.rules.control_flow import CALLS, RECOMPUTED
from spmdctx.trace.build.jaxprs.liveness import Liveness
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
    for eqn, needed in _LIVENESS.alive(jaxpr, used)[0]:
        name = eqn.primitive.name
        inside = _LIVENESS.inner(eqn, needed)
        for one in inside:
            is_inlined = name in CALLS and name not in RECOMPUTED  # whose ops XLA may keep apart from equal ones outside
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


def _reads(eqn: Any, needed: Sequence[bool]) -> Sequence[bool] | None:
    """Returns that a collective reads an operand for each result."""
    return needed if eqn.primitive.name in _KIND_OF_PRIMITIVE and len(eqn.invars) == len(eqn.outvars) else None


_LIVENESS = Liveness(acts_outside, _reads)


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

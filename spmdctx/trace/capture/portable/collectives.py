"""Collectives without communication: over an axis of vmap they are reductions, and over one device they change nothing.

JAX batches `psum`, `pmax` and `pmin` over an axis of vmap to the same primitive with positions in place of the axis name. Only these
three take positions: JAX turns other collectives into plain ops while it batches them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.capture.portable.rewriting import Handler

_REDUCE: Mapping[str, Callable[..., jax.Array]] = {
    "psum": jax.lax.reduce_sum,
    "psum_invariant": jax.lax.reduce_sum,
    "pmax": jax.lax.reduce_max,
    "pmin": jax.lax.reduce_min,
}
_DEVICE_CASTS = (
    "pvary",
    "pbroadcast",
    "preduced",
    "reduced_vary_cast",
    "reduced_vary_cast_p",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
)
_UNREDUCED = ("unreduced_psum", "unreduced_pmax", "unreduced_pmin")
_GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
_SCATTERS = ("reduce_scatter", "unreduced_reduce_scatter")


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """Returns the axes of a collective: names, and positions of dimensions."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list | frozenset | set) else (axes,)


def reduction(eqn: Any, operands: list[Any], eqns: list[Any], alone: Container[str] = ()) -> Sequence[Any] | None:
    """Writes a collective over positions as a reduction; one over names too keeps the names, but for those in `alone`."""
    named = tuple(axis for axis in axes_of(eqn) if not isinstance(axis, int) and axis not in alone)
    positions = tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
    if named == axes_of(eqn) and named:
        return None
    value = operands[0]
    if positions:
        reduce, out = _REDUCE[eqn.primitive.name], eqn.outvars[0].aval
        results = None
        if named:
            # The names come last: fewer bytes are sent. How the result differs between devices is as it was before.
            results = [jexc.Var(value.aval.update(shape=out.shape, sharding=out.sharding))]
        value = _written(lambda x: reduce(x, positions), eqn, value, eqns, results)
    if named:
        eqns.append(eqn.replace(invars=[value], params={**eqn.params, "axes": named}))
        return eqn.outvars  # type: ignore[no-any-return]  # JAX does not say so
    return [value]


def _written(fn: Callable[[jax.Array], Any], eqn: Any, value: Any, eqns: list[Any], results: list[Any] | None = None) -> Any:
    """Appends the one equation of `fn` on a value in place of `eqn`; returns its result, `eqn`'s own if none is given."""
    template = jax.make_jaxpr(fn)(struct_of(value.aval)).jaxpr.eqns[0]
    operands = [atom if isinstance(atom, jexc.Literal) else value for atom in template.invars]
    eqns.append(template.replace(invars=operands, outvars=results or eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx))
    return eqns[-1].outvars[0]


OVER_VMAP: Mapping[str, Handler] = dict.fromkeys(_REDUCE, reduction)
"""Handlers of collectives over axes of vmap."""


class Alone:
    """Handlers of collectives over mesh axes that hold one device; collectives over other axes stay."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self.handlers: Mapping[str, Handler] = {
            **dict.fromkeys(_REDUCE, self._reduction),
            **dict.fromkeys((*_DEVICE_CASTS, *_UNREDUCED, "all_to_all"), self._same),
            **dict.fromkeys(_GATHERS, self._gathered),
            **dict.fromkeys(_SCATTERS, self._scattered),
            "ppermute": self._permuted,
            "axis_index": self._index,
        }

    def knows(self, jaxpr: jexc.Jaxpr) -> bool:
        """Returns whether all collectives of a body are known."""
        return all(self._knows(eqn) for eqn in jaxpr.eqns)

    def _knows(self, eqn: Any) -> bool:
        if eqn.primitive.name not in self.handlers and any(isinstance(axis, str) for axis in axes_of(eqn)):
            return False
        return all(self.knows(opened(body)) for body in bodies_of(eqn.params))

    def _is_alone(self, eqn: Any) -> bool:
        return all(axis in self._names for axis in axes_of(eqn))

    def _reduction(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        return reduction(eqn, operands, eqns, self._names)

    def _same(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        return operands if self._is_alone(eqn) else None

    def _gathered(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        if not self._is_alone(eqn) or eqn.params["tiled"]:
            return self._same(eqn, operands, eqns)
        dim = eqn.params["all_gather_dimension"]
        return [_written(lambda x: jax.lax.expand_dims(x, (dim,)), eqn, operands[0], eqns)]

    def _scattered(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        if not self._is_alone(eqn) or eqn.params["tiled"]:
            return self._same(eqn, operands, eqns)
        dim = eqn.params["scatter_dimension"]
        return [_written(lambda x: jax.lax.squeeze(x, (dim,)), eqn, operands[0], eqns)]

    def _permuted(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any] | None:
        if not self._is_alone(eqn) or eqn.params["perm"]:
            return self._same(eqn, operands, eqns)
        # A device that receives nothing has zeros.
        aval = eqn.outvars[0].aval
        if not aval.shape:
            return [jexc.Literal(np.zeros((), aval.dtype), aval)]
        return [_written(lambda x: jax.lax.full_like(x, 0), eqn, operands[0], eqns)]

    def _index(self, eqn: Any, _operands: list[Any], _eqns: list[Any]) -> Sequence[Any] | None:
        aval = eqn.outvars[0].aval
        return [jexc.Literal(np.zeros((), aval.dtype), aval)] if self._is_alone(eqn) else None

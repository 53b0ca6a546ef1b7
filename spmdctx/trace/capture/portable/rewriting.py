"""Rewrites a jaxpr equation by equation, its bodies included, and leaves alone what does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx._compat import is_axis_effect, without_mesh
from spmdctx.rules.control_flow import CONTROL_FLOW, with_entries
from spmdctx.trace.capture.portable.placements import is_on_one_device, is_one_device

Names = dict[Any, Any]
"""The atom that a variable has become."""

Handler = Callable[[Any, list[Any], list[Any]], Any]
"""Rewrites an equation on its new operands into a list of equations.

Returns the atoms of its results, or None to keep the equation, or another equation to be kept in its place.
"""


class Rewriting:
    """Rewrites the equations that `handlers` name by their primitives.

    If it `strips`, it takes meshes of one device out of types and contexts too. `gone` are the axes of such a mesh whose shard_map
    the equations leave.
    """

    def __init__(self, handlers: Mapping[str, Handler], *, strips: bool = False, gone: frozenset[str] = frozenset()) -> None:
        self._handlers, self._strips, self._gone = handlers, strips or bool(gone), gone
        self._concerned = CONTROL_FLOW | handlers.keys()
        # By identity; what is replaced is kept alive with what replaces it.
        self._known: dict[int, tuple[Any, Any]] = {}
        self._closed: dict[int, tuple[jexc.ClosedJaxpr, jexc.ClosedJaxpr]] = {}
        self._contexts: dict[int, tuple[Any, Any]] = {}

    def closed(self, closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
        """Returns the rewritten program, or the program itself if nothing in it changes; one that is used twice stays one."""
        if id(closed) not in self._closed:
            jaxpr = self.jaxpr(closed.jaxpr)
            same = jaxpr is closed.jaxpr
            self._closed[id(closed)] = closed, closed if same else jexc.ClosedJaxpr(jaxpr, closed.consts)
        return self._closed[id(closed)][1]

    def jaxpr(self, jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
        """Returns the rewritten body, or the body itself if nothing in it changes; a body that is used twice stays one."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._rewritten(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewritten(self, jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
        names: Names = {}
        inputs = [[self._made(var, names) for var in side] for side in (jaxpr.constvars, jaxpr.invars)]
        eqns: list[Any] = []
        outputs = self.write(jaxpr, names, eqns)
        is_same = len(eqns) == len(jaxpr.eqns) and all(one is other for one, other in zip(eqns, jaxpr.eqns, strict=True))
        if is_same and not self._strips and all(one is other for one, other in zip(outputs, jaxpr.outvars, strict=True)):
            return jaxpr
        return jaxpr.replace(constvars=inputs[0], invars=inputs[1], eqns=eqns, outvars=outputs, effects=self._effects(jaxpr.effects))

    def write(self, jaxpr: jexc.Jaxpr, names: Names, eqns: list[Any], outer: Any = None) -> list[Any]:
        """Appends the rewritten equations of a body to `eqns`; returns the atoms of its results.

        `names` holds the inputs of the body. `outer` is the source info of the equation in whose place the body is written.
        """
        for eqn in jaxpr.eqns:
            if not names and not self._strips and eqn.primitive.name not in self._concerned:
                eqns.append(eqn)
                continue
            if outer is not None:
                info = eqn.source_info
                eqn = eqn.replace(source_info=info.replace(name_stack=outer.name_stack + info.name_stack))
            operands, made = [self._read(atom, names) for atom in eqn.invars], eqn.outvars
            if self._strips:
                eqn = eqn.replace(outvars=[jexc.Var(stripped(var.aval)) for var in made], ctx=self._context(eqn.ctx))
            handler = self._handlers.get(eqn.primitive.name)
            results = None if handler is None else handler(eqn, operands, eqns)
            if results is None or isinstance(results, jexc.JaxprEqn):
                results = self._kept(results or eqn, operands, eqns)
            if results is not made:
                names.update(zip(made, results, strict=True))
        return [self._read(atom, names) for atom in jaxpr.outvars]

    def _kept(self, eqn: Any, operands: list[Any], eqns: list[Any]) -> Sequence[Any]:
        params = self._params(eqn)
        if self._strips or params is not None or any(one is not other for one, other in zip(operands, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=operands, params=params or eqn.params, effects=self._effects(eqn.effects))
        eqns.append(eqn)
        return eqn.outvars  # type: ignore[no-any-return]  # JAX does not say so

    def _params(self, eqn: Any) -> dict[str, Any] | None:
        """Returns the parameters of an equation with their bodies rewritten, or None if nothing in them changes."""
        if not self._strips and eqn.primitive.name not in CONTROL_FLOW:
            return None
        new = {name: with_entries(value, self._entry) for name, value in eqn.params.items()}
        return new if any(new[name] is not value for name, value in eqn.params.items()) else None

    def _entry(self, value: Any) -> Any:
        if isinstance(value, jexc.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, jexc.Jaxpr):
            return self.jaxpr(value)
        if self._strips and isinstance(value, jax.core.ShapedArray):
            return stripped(value)
        return None if self._strips and isinstance(value, jax.sharding.NamedSharding) and is_one_device(value) else value

    def _made(self, var: Any, names: Names) -> Any:
        """Returns the variable that stands for an input of a body."""
        if not self._strips:
            return var
        names[var] = jexc.Var(stripped(var.aval))
        return names[var]

    def _read(self, atom: Any, names: Names) -> Any:
        if not isinstance(atom, jexc.Literal):
            return names.get(atom, atom)
        if not self._strips:
            return atom
        # A literal array knows its type, which may name a mesh; a view of it does not.
        value = atom.val.view() if isinstance(atom.val, np.ndarray) and is_on_one_device(jax.typeof(atom.val)) else atom.val
        return jexc.Literal(value, stripped(atom.aval))

    def _context(self, context: Any) -> Any:
        if id(context) not in self._contexts:
            has_one = is_one_device(getattr(context, "cur_abstract_mesh", None))
            self._contexts[id(context)] = context, without_mesh(context) if has_one else context
        return self._contexts[id(context)][1]

    def _effects(self, effects: Any) -> Any:
        return type(effects)(effect for effect in effects if not is_axis_effect(effect, self._gone)) if self._strips else effects


def stripped(aval: Any) -> Any:
    """Returns a type without a mesh of one device."""
    if not is_on_one_device(aval):
        return aval
    space = getattr(aval, "memory_space", None)
    return jax.core.ShapedArray(aval.shape, aval.dtype, aval.weak_type, **({} if space is None else {"memory_space": space}))

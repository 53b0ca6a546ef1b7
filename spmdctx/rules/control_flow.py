"""Primitives that hold a jaxpr and therefore have no rule of their own: the trace walks their bodies and ties loop carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_linear_solve": "jaxprs",
    "linear_call": "callee",
    "composite": "jaxpr",
    "xla_metadata_call": "jaxpr",
    "compute_on": "jaxpr",
}
"""Calls, whose operands and results are those of one body, with the name of the parameter that holds the body."""

LOOPS = frozenset({"scan", "while"})
"""Loops: the trace ties what they carry in to what they carry out."""

BRANCHES = frozenset({"cond"})
"""Branches: the trace ties each result to the same result of every branch."""

MANUAL = frozenset({"shard_map"})
"""Regions that the user split by hand; their rule comes from their own specs."""

RECOMPUTED = frozenset({"checkpoint", "remat", "remat2"})
"""Calls whose body runs once more in the backward pass."""

CONTROL_FLOW = frozenset(CALLS) | LOOPS | BRANCHES | MANUAL
"""Everything that the trace handles by structure instead of by a rule."""


def opened(body: Any) -> Any:
    """Returns the open jaxpr of a body that an equation holds open or closed."""
    return getattr(body, "jaxpr", body)


def is_body(value: Any) -> bool:
    """Returns whether a value is a jaxpr, open or closed."""
    return hasattr(opened(value), "eqns")


def bodies_of(params: Mapping[str, Any]) -> list[Any]:
    """Returns the bodies among the parameters of an equation, open or closed as they are there."""
    return [value for param in params.values() for value in (param if isinstance(param, tuple | list) else (param,)) if is_body(value)]


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types of most parameters, which hold no body."""


def _may_hold_bodies(param: Any) -> bool:
    kind = type(param)
    if kind in _PLAIN:
        return False
    return any(map(_may_hold_bodies, param)) if isinstance(param, tuple | list) else is_body(param)


def with_bodies(params: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of an equation with a function of each body in place of it; others stay the objects that they are."""
    if not any(map(_may_hold_bodies, params.values())):
        # A dict of its own: the equation's is shared, and callers write into what they get.
        return dict(params)
    return {name: with_entries(param, lambda value: function(value) if is_body(value) else value) for name, param in params.items()}


def with_entries(param: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a function of a parameter, or a tuple or list with a function of each entry; the same object if no entry changes."""
    if not isinstance(param, tuple | list):
        return function(param)
    made = [with_entries(entry, function) for entry in param]
    if all(new is old for new, old in zip(made, param, strict=True)):
        return param
    make = getattr(param, "_make", type(param))  # named tuples take their fields one by one
    return make(made)


def body_parameter(primitive: str, params: Mapping[str, Any]) -> str:
    """Returns the name of the parameter that holds the body of a call; newer versions of JAX use `call_jaxpr` for composites too."""
    name = CALLS[primitive]
    return name if name in params else "call_jaxpr"


def call_body(primitive: str, params: Mapping[str, Any]) -> Any:
    """Returns the body that a call runs. A linear solve carries four: its forward pass runs the solver."""
    body = params[body_parameter(primitive, params)]
    return body.solve if primitive == "custom_linear_solve" else body


def call_operands(primitive: str, params: Mapping[str, Any], num_operands: int) -> Sequence[int]:
    """Returns the positions of the operands that the body of a call takes, in order."""
    if primitive != "custom_linear_solve":
        return range(num_operands)
    lengths = params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    return [*range(before, before + lengths.solve), *range(before + lengths.solve + lengths.transpose_solve, num_operands)]

"""Primitives that hold a jaxpr and therefore have no rule of their own: the trace walks their bodies and ties loop carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

CONTROL_FLOW = frozenset(CALLS) | LOOPS | BRANCHES | MANUAL
"""Everything that the trace handles by structure instead of by a rule."""


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

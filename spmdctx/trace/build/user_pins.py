"""Shardings that the user's own code fixes, as mesh axis names for each dimension."""

from __future__ import annotations

from typing import Any

from spmdctx.ir.sharding import AxisNames
from spmdctx.rules.builder import identity
from spmdctx.trace.build.builder import Around, Builder
from spmdctx.trace.build.program import BY_CONSTRAINT, UserPin

CONSTRAINT = "sharding_constraint"


def spec_dims(spec: Any, rank: int) -> tuple[AxisNames | None, ...]:
    """Returns the axes of each dimension of a PartitionSpec, with None for an unconstrained dimension."""
    dims: list[AxisNames | None] = []
    for entry in spec:
        if entry is None:
            dims.append(())
        elif isinstance(entry, str):
            dims.append((entry,))
        elif isinstance(entry, tuple):
            dims.append(tuple(entry))
        else:
            dims.append(None)
    return tuple(dims + [()] * (rank - len(dims)))


def has_explicit_spec(sharding: Any) -> bool:
    """Returns whether `sharding` names mesh axes (a NamedSharding), instead of being unspecified or a single device's."""
    return hasattr(sharding, "spec") and hasattr(sharding, "mesh")


def constrained(builder: Builder, value: int, sharding: Any, info: Any, around: Around) -> int:
    """An identity op whose result has the sharding of a constraint."""
    result = _identity(builder, value, info, around)
    if has_explicit_spec(sharding):
        builder.user_pins.append(_pin(builder, result, sharding, BY_CONSTRAINT))
    return result


def pin_of_call(builder: Builder, value: int, sharding: Any, origin: str, info: Any, around: Around) -> int:
    """An identity op whose result has the sharding that a nested jit gives an argument or a result; `value` itself where there is none.

    An argument of the step is pinned itself, too, so that it arrives in this sharding.
    """
    if not has_explicit_spec(sharding):
        return value
    if value in builder.inputs:
        builder.user_pins.append(_pin(builder, value, sharding, origin))
    result = _identity(builder, value, info, around)
    builder.user_pins.append(_pin(builder, result, sharding, origin))
    return result


def _identity(builder: Builder, value: int, info: Any, around: Around) -> int:
    result = builder.add_like(value)
    builder.add_op(CONSTRAINT, (value,), (result,), identity(builder.shape(value)), info, around)
    return result


def _pin(builder: Builder, value: int, sharding: Any, origin: str) -> UserPin:
    axes = tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items())
    return UserPin(value, axes, spec_dims(sharding.spec, len(builder.shape(value))), origin)

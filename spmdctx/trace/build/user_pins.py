"""Shardings that the user's own code fixes, as mesh axis names for each dimension."""

from __future__ import annotations

from typing import Any

from spmdctx.ir.sharding import AxisNames
from spmdctx.rules.builder import identity
from spmdctx.trace.build.builder import Around, Builder
from spmdctx.trace.build.program import UserPin

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


def pin(builder: Builder, value: int, sharding: Any, info: Any, around: Around, *, always: bool = False) -> int:
    """An identity op whose result has the user's sharding; `value` itself where there is none (unless `always`)."""
    explicit = has_explicit_spec(sharding)
    if not explicit and not always:
        return value
    shape, result = builder.shape(value), builder.add_like(value)
    builder.add_op(CONSTRAINT, (value,), (result,), identity(shape), info, around)
    if explicit:
        axes = tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items())
        builder.user_pins.append(UserPin(result, axes, spec_dims(sharding.spec, len(shape))))
    return result

"""The user's shard_maps: each is an op whose shardings are its specs, with the collectives written inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdctx.ir.collective import LOSS_REDUCTION
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames
from spmdctx.rules.builder import RuleBuilder
from spmdctx.rules.control_flow import opened
from spmdctx.trace.build.builder import ReadRegion
from spmdctx.trace.build.program import ManualRegion, Program
from spmdctx.trace.build.user_pins import spec_dims
from spmdctx.trace.build.written import written_collectives

LOSS_SCOPE = "spmdctx_loss"
"""Name scope of the shard_maps that `spmdctx.value_and_grad` makes; the primitive `ir.primitives.LOSS` only shares its text."""


def rule_of(eqn: Any) -> OpRule:
    """Makes a rule in which every dimension is a separate factor, so that operands and results can take the axes of their specs."""
    builder = RuleBuilder()
    operands = [builder.factors(getattr(var.aval, "shape", ())) for var in eqn.invars]
    results = [builder.factors(getattr(var.aval, "shape", ())) for var in eqn.outvars]
    return builder.build(operands, results)


def region_of(eqn: Any, op: int, program: Program, repeats: int, used: Sequence[bool]) -> ManualRegion:
    """Reads the specs and collectives of a shard_map equation, whose body is `program`; `used` tells which results the step uses."""
    mesh = eqn.params["mesh"]
    body = eqn.params["jaxpr"]
    is_loss = LOSS_SCOPE in str(eqn.source_info.name_stack)
    cause = LOSS_REDUCTION if is_loss else None
    return ManualRegion(
        op=op,
        mesh_axes=tuple((str(name), int(size)) for name, size in mesh.shape.items()),
        operands=_specs(eqn.params["in_specs"], eqn.invars),
        results=_specs(eqn.params["out_specs"], eqn.outvars),
        collectives=tuple(written_collectives(opened(body), used, repeats, cause)),
        body=program,
        repeats=repeats,
        is_loss=is_loss,
    )


def read_regions(
    waiting: Mapping[int, ReadRegion],
    alive: Sequence[int],
    outputs: Sequence[int],
    columns: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
) -> list[ManualRegion]:
    """Reads the shard_maps of a step; in those that are dead, every result counts as used.

    Args:
        waiting: How to read each, by its op.
        alive: The ops that are not dead.
        outputs: The values that the step returns.
        columns: The operands and the results of all ops.
    """
    if not waiting:
        return []
    operands, results = columns
    used, living = set(outputs).union(*(operands[op] for op in alive)), set(alive)
    return [read([op not in living or value in used for value in results[op]]) for op, read in waiting.items()]


def _specs(specs: Any, atoms: Any) -> tuple[tuple[AxisNames, ...], ...]:
    return tuple(
        tuple(dim or () for dim in spec_dims(spec, len(getattr(atom.aval, "shape", ())))) for spec, atom in zip(specs, atoms, strict=True)
    )

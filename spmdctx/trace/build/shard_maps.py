"""The user's shard_maps: each is an op whose shardings are its specs, with the collectives written inside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from spmdctx.ir.collective import LOSS_REDUCTION, Cause, CauseForm, Collective
from spmdctx.ir.graph import item_bytes
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames
from spmdctx.rules.builder import RuleBuilder
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.build.program import ManualRegion, Program
from spmdctx.trace.build.user_pins import spec_dims

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


LOSS_SCOPE = "spmdctx_loss"
"""Name scope of the shard_maps that `spmdctx.value_and_grad` makes."""


def rule_of(eqn: Any) -> OpRule:
    """Makes a rule in which every dimension is a separate factor, so that operands and results can take the axes of their specs."""
    builder = RuleBuilder()
    operands = [builder.factors(getattr(var.aval, "shape", ())) for var in eqn.invars]
    results = [builder.factors(getattr(var.aval, "shape", ())) for var in eqn.outvars]
    return builder.build(operands, results)


def region_of(eqn: Any, op: int, program: Program, repeats: int) -> ManualRegion:
    """Reads the specs and collectives of a shard_map equation, whose body is `program`."""
    mesh = eqn.params["mesh"]
    body = eqn.params["jaxpr"]
    is_loss = LOSS_SCOPE in str(eqn.source_info.name_stack)
    cause = LOSS_REDUCTION if is_loss else None
    return ManualRegion(
        op=op,
        mesh_axes=tuple((str(name), int(size)) for name, size in mesh.shape.items()),
        operands=_specs(eqn.params["in_specs"], eqn.invars),
        results=_specs(eqn.params["out_specs"], eqn.outvars),
        collectives=tuple(_collectives(getattr(body, "jaxpr", body), repeats, cause)),
        body=program,
        repeats=repeats,
        is_loss=is_loss,
    )


def _specs(specs: Any, atoms: Any) -> tuple[tuple[AxisNames, ...], ...]:
    return tuple(
        tuple(dim or () for dim in spec_dims(spec, len(getattr(atom.aval, "shape", ())))) for spec, atom in zip(specs, atoms, strict=True)
    )


def _collectives(jaxpr: Any, repeats: int, cause: Cause | None) -> Iterator[Collective]:
    """Yields the collectives written in a manual body, with the repeats of loops multiplied."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _KIND_OF_PRIMITIVE:
            yield from _written(eqn, _KIND_OF_PRIMITIVE[name], repeats, cause or Cause(CauseForm.WRITTEN, primitive=name))
        inside = repeats * int(eqn.params["length"]) if name == "scan" else repeats
        for param in eqn.params.values():
            for body in param if isinstance(param, (tuple, list)) else (param,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    yield from _collectives(getattr(body, "jaxpr", body), inside, cause)


def _written(eqn: Any, kind: str, repeats: int, cause: Cause) -> Iterator[Collective]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = tuple(str(axis) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)))
    for operand, result in zip(eqn.invars, eqn.outvars, strict=False):
        carrier = (result if kind == "all_gather" else operand).aval
        payload = math.prod(getattr(carrier, "shape", ())) * item_bytes(str(getattr(carrier, "dtype", "float32")))
        yield Collective(kind, names, payload, 0.0, repeats, cause, source_line(eqn.source_info))

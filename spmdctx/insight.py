"""What a plan can say beyond what was decided: it is worked out when it is asked for, from the program that was planned."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.ir import Role
from spmdctx.planner import Planned, Settings
from spmdctx.search.alternatives import PricedAlternatives
from spmdctx.trace.capture import Captured

_FREE_BATCH = "auto_parallel"


def with_alternatives(planned: Planned, captured: Captured, settings: Settings) -> Planned:
    """The plan with its alternatives, where its search has not given it any; takes no time until one is asked for."""
    if planned.plan.alternatives is not None or planned.mesh.num_devices == 1:
        return planned
    program, graph = planned.program, planned.program.graph
    found = PricedAlternatives(
        graph=graph,
        scopes=program.scopes,
        loose=program.loose,
        manual=tuple(row for region in program.manual for row in region.collectives),
        assignment=planned.assignment,
        mesh=planned.mesh,
        topology=settings.topology,
        donated=frozenset(value for value, leaf in zip(graph.inputs, captured.inputs, strict=True) if leaf.donated),
        pinned=_pinned(planned, captured, settings),
        forced=frozenset(region.op for region in program.manual),
        memory_bytes=settings.memory_bytes,
    )
    return replace(planned, plan=replace(planned.plan, alternatives=found))


def _pinned(planned: Planned, captured: Captured, settings: Settings) -> frozenset[int]:
    """Values whose sharding the user or the mode fixed."""
    program, context = planned.program, settings.context
    pinned = {mark.value for mark in program.marks if mark.strategy is not None} | {pin.value for pin in program.user_pins}
    batch_is_free = context.parallel_mode == _FREE_BATCH and not context.batch_is_pinned
    for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True):
        if leaf.metadata is not None or leaf.layerwise or (leaf.role is Role.BATCH and not batch_is_free):
            pinned.add(value)
    return frozenset(pinned)

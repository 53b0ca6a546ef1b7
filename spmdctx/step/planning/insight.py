"""Adds insight into a plan beyond its decisions, computed on request from the program that was planned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from spmdctx.context.values import memory_budget
from spmdctx.ir.graph import Role
from spmdctx.plan.plan import Plan
from spmdctx.search.select import Shared
from spmdctx.search.whatif.alternatives import PricedAlternatives
from spmdctx.step.planning.planner import Planned, certify, plan_program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings


def with_insight(planned: Planned, captured: Captured, settings: Settings) -> Planned:
    """Adds alternatives, a certifier and a way to plan again if the search gave the plan none; computes nothing yet."""
    plan = planned.plan
    if plan.replan is None:
        plan = replace(plan, replan=Replanner(captured, settings))
    if plan.certifier is None and settings.context.parallel_mode == "auto_parallel" and planned.mesh.num_devices > 1:
        plan = replace(plan, certifier=partial(certify, plan, captured, settings))
    if plan.alternatives is None and planned.mesh.num_devices > 1:
        plan = replace(plan, alternatives=_alternatives(planned, captured, settings))
    return replace(planned, plan=plan)


@dataclass(frozen=True)
class Replanner:
    """Plans a captured step again for another budget or number of devices; the new plan can do the same."""

    captured: Captured
    settings: Settings
    shared: Shared | None = field(default=None, compare=False)

    def briefly(self) -> Replanner:
        """Returns one that makes several plans with little work on proofs; they share what no budget changes."""
        return replace(self, shared=Shared())

    def __call__(self, *, memory_bytes: int | None = None, num_devices: int | None = None) -> Plan:
        """Plans for a budget per device (None for no budget) and a number of devices (None for as many as before).

        Raises:
            ContextError: the budget is not positive.
            InfeasibleError: no plan fits.
            StrategyError: the user's strategies do not fit the number of devices.
        """
        old = self.settings
        count = old.num_devices if num_devices is None else num_devices
        mesh = old.mesh if count == old.num_devices else None
        context = old.context.replace(device_num=count) if old.context.is_set("device_num") else old.context
        settings = replace(old, context=context, num_devices=count, mesh=mesh, memory_bytes=memory_budget(memory_bytes))
        return with_insight(plan_program(self.captured, settings, self.shared), self.captured, settings).plan


def _alternatives(planned: Planned, captured: Captured, settings: Settings) -> PricedAlternatives:
    program, graph = planned.program, planned.program.graph
    return PricedAlternatives(
        graph=graph,
        scopes=program.scopes,
        from_literals=program.from_literals,
        manual=tuple(row for region in program.manual for row in region.collectives),
        assignment=planned.assignment,
        mesh=planned.mesh,
        topology=settings.topology,
        donated=frozenset(value for value, leaf in zip(graph.inputs, captured.inputs, strict=True) if leaf.donated),
        pinned=_pinned(planned, captured, settings),
        forced=frozenset(region.op for region in program.manual),
        memory_bytes=settings.memory_bytes,
    )


def _pinned(planned: Planned, captured: Captured, settings: Settings) -> frozenset[int]:
    """Returns the values whose sharding the user or the mode fixed."""
    program, context = planned.program, settings.context
    pinned = {mark.value for mark in program.marks if mark.strategy is not None} | {pin.value for pin in program.user_pins}
    batch_is_free = context.parallel_mode == "auto_parallel" and not context.batch_is_pinned
    for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True):
        if leaf.metadata is not None or leaf.layerwise or (leaf.role is Role.BATCH and not batch_is_free):
            pinned.add(value)
    return frozenset(pinned)

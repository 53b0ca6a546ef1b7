"""Logs that a step is planned, and what came of it."""

from __future__ import annotations

import logging

from spmdctx.plan.plan import Plan
from spmdctx.step.planning.request import search_mode
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text
from spmdctx.wording.phases import log_of

_LOG, _TRACE = log_of("plan"), log_of("trace")


def log_planning(captured: Captured, settings: Settings, num_ops: int) -> None:
    """Logs how long a step was traced, and that it is planned."""
    _TRACE.info("%s was traced in %s: %s.", captured.name, seconds_text(captured.trace_s), counted(num_ops, "op"))
    how = " by ".join(part for part in (settings.context.parallel_mode, search_mode(settings)) if part)
    _LOG.info("%s is planned for %s (%s), %s.", captured.name, counted(settings.num_devices, "device"), settings.topology.device, how)


def log_plan(name: str, plan: Plan) -> None:
    """Logs what a plan is."""
    if _LOG.isEnabledFor(logging.INFO):
        cost, mesh = plan.cost, mesh_text(plan.logical_mesh)
        foretold = f"{seconds_text(cost.total_s)} a step, {bytes_text(cost.memory_bytes)} per device"
        _LOG.info("%s was planned in %s on mesh %s: %s; %s.", name, seconds_text(plan.timing.search_s), mesh, plan.summary, foretold)

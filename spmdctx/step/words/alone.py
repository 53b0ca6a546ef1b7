"""Warns of a step that one device would run faster, by the plan."""

from __future__ import annotations

from typing import Any

from spmdctx.cost.step import bill_of
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.plan import Plan
from spmdctx.search.select import whole
from spmdctx.step.planning.planner import Planned
from spmdctx.step.planning.request import step_of
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import counted, seconds_text


def faster_alone(planned: Planned, captured: Captured, settings: Settings, devices: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a warning if one device would run the step faster, by the cost model, and has the memory for it; else nothing.

    CPU devices are mostly virtual ones, of which nobody expects speed. Nor is it said of steps on servers, nor
    where a user wrote the parts of each device.
    """
    plan, program = planned.plan, planned.program
    if type(plan) is not Plan or planned.mesh.num_devices == 1 or program.manual or not devices or devices[0].platform == "cpu":
        return ()
    mode = settings.context.parallel_mode
    alone = bill_of(step_of(program, captured), whole(program.graph, mode), LogicalMesh.of({"data": 1}), settings.topology)
    if alone.total_s >= plan.cost.total_s or alone.memory_bytes > settings.topology.memory_bytes:
        return ()
    count, times = counted(planned.mesh.num_devices, "device"), [seconds_text(one) for one in (plan.cost.total_s, alone.total_s)]
    return (f"By the plan the step takes {times[0]} on {count} and {times[1]} on one: it is too small to be split, or its links too slow.",)

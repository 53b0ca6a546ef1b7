"""Gives the plan of a pipelined step as plain data, for programs that read JSON."""

from __future__ import annotations

from typing import Any

from spmdctx.ir.mesh import format_sharding
from spmdctx.pipeline.data import PipelineData, StagePlan
from spmdctx.pipeline.show.summary import pipeline_sentence


def plain_plan(plan: PipelineData) -> dict[str, Any]:
    """Returns what the tables of a plan say, in seconds and bytes."""
    schedule = plan.simulation.schedule
    return {
        "summary": pipeline_sentence(plan),
        "mesh": plan.mesh,
        "mode": plan.mode,
        "search_mode": plan.search_mode,
        "topology": plan.topology,
        "schedule": {
            "name": schedule.name,
            "num_micro": schedule.num_micro,
            "makespan_s": plan.simulation.makespan_s,
            "idle": plan.simulation.bubble,
            "idle_by_formula": plan.bubble_formula,
        },
        "cost": plan.cost._asdict(),
        "imbalance": plan.imbalance,
        "stages": [_stage(stage) for stage in plan.stages],
        "transfers": [
            {"what": str(one.what), "source": one.source, "target": one.target, "count": one.count, "bytes": one.bytes}
            for one in plan.transfers
        ],
        "inputs": [
            {
                "path": leaf.path,
                "role": leaf.role,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "sharding": format_sharding(leaf.sharding),
                "stage": leaf.stage,
            }
            for leaf in plan.inputs
        ],
        "notes": list(plan.notes),
    }


def _stage(stage: StagePlan) -> dict[str, Any]:
    plain = {name: getattr(stage, name) for name in StagePlan.__dataclass_fields__ if name not in ("tasks", "after", "live_bytes")}
    programs = {**stage.tasks, **stage.after}
    return {**plain, "programs": {name: own.cost._asdict() for name, own in programs.items()}, "live_bytes": dict(stage.live_bytes)}

"""Says in one sentence what the plan of a pipeline is."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.ir.graph import Role
from spmdctx.pipeline.data import PipelineData
from spmdctx.plan.plan import Plan
from spmdctx.plan.summary.sentence import asks_for_first_stage, phrase
from spmdctx.plan.summary.strategy import kept, strategy_of
from spmdctx.wording import counted


def pipeline_sentence(plan: PipelineData) -> str:
    """Returns what a pipeline is, and each of its stages, such as "4 pipeline stages by 1f1b, each ZeRO-1 over 2 devices"."""
    schedule = plan.simulation.schedule
    begin = f"{counted(len(plan.stages), 'pipeline stage')} by {schedule.name}"
    if plan.logical_mesh.num_devices == 1:
        return f"{begin}, each on one device"
    own = list(dict.fromkeys(_of_part(plan, joint) for joint in plan.joints))
    return f"{begin}, each {' or '.join(own)}"


def _of_part(plan: PipelineData, joint: Plan) -> str:
    """Returns what a part of the loss is; the optimizer state lies with the whole step."""
    found = strategy_of(dict(joint.logical_mesh.axes), joint.inputs, [joint.op_table], joint.collectives)
    states = {leaf.path: kept(leaf, found.rows) for leaf in plan.inputs if leaf.role is Role.OPTIMIZER and leaf.shape}
    return phrase(replace(found, states=states), dict(joint.logical_mesh.axes), asks_for_first_stage(joint.options))

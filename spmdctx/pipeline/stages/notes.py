"""What a user would want to know of a planned pipeline."""

from __future__ import annotations

from spmdctx.pipeline.cut.line import is_dear
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.rules.control_flow import CONTROL_FLOW


def whole_backward(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on the chunks whose backward pass a zero-bubble schedule cannot part, or nothing.

    A checkpointed region or a loop is one equation, which gives the gradients of inputs and of weights together.
    """
    if not pipeline.schedule.splits_backward:
        return []
    found: dict[str, list[int]] = {}
    for number, chunk in enumerate(pipeline.planned):
        for eqn in chunk.tasks[Kind.INPUT].program.jaxpr.eqns:
            if eqn.primitive.name in CONTROL_FLOW and is_dear(eqn) and number not in found.setdefault(eqn.primitive.name, []):
                found[eqn.primitive.name].append(number)
    if not found:
        return []
    kinds = "; ".join(f"{name} in chunks {', '.join(map(str, numbers))}" for name, numbers in found.items())
    return [
        f"{pipeline.schedule.name} leaves these equations of the backward pass in one part, which gives the gradients of inputs and "
        f"weights together: {kinds}. So fewer gradients of weights are left to fill the time in which stages wait."
    ]

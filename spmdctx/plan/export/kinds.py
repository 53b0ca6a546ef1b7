"""Chooses what `plan.export` writes."""

from __future__ import annotations

from spmdctx.errors import ContextError, PlanError, shown
from spmdctx.plan.data import PlanData
from spmdctx.plan.export.rules import rules_text

_EXPORTS = ("jax", "rules")


def export_text(plan: PlanData, kind: str) -> str:
    """Returns the text of an export.

    Raises:
        ContextError: there is no such kind.
        PlanError: a module is asked of a plan that does not hold its step.
        UnsupportedError: the plan cannot be said in that form.
    """
    if kind not in _EXPORTS:
        raise ContextError("A plan has no such export.", got=shown(kind), need=", ".join(map(repr, _EXPORTS)))
    if kind == "rules":
        return rules_text(plan)
    if plan.exporter is None:
        raise PlanError(
            'export("jax") needs the step, which this plan does not hold.',
            fix="export the plan that step.plan(...) returns; for a saved plan, plan the step with strategy_ckpt_load_file",
        )
    return plan.exporter()

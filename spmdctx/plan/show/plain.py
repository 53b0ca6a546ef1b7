"""Gives plans, their differences, explanations and fronts as plain data, for programs that read JSON."""

from __future__ import annotations

from typing import Any

from spmdctx.ir.mesh import format_sharding
from spmdctx.plan.data import PlanData, PlannedTensor
from spmdctx.plan.explain import ExplanationData, OpExplanation, TensorExplanation
from spmdctx.plan.pareto import ParetoData


def plan_figures(plan: PlanData) -> dict[str, Any]:
    """Returns what the table of a plan says; ops and all shardings are in its file only."""
    return {
        "mesh": plan.mesh,
        "mode": plan.mode,
        "search_mode": plan.search_mode,
        "topology": plan.topology,
        "options": dict(plan.options),
        "cost": plan.cost,
        "safe_memory_bytes": plan.safe_memory_bytes,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "timing": plan.timing,
        "inputs": [_tensor(leaf) for leaf in plan.inputs],
        "outputs": [_tensor(leaf) for leaf in plan.outputs],
        "num_ops": len(plan.ops),
        "collectives": plan.collectives,
        "notes": plan.notes,
    }


def _tensor(leaf: PlannedTensor) -> dict[str, Any]:
    return {"path": leaf.path, "role": leaf.role, "shape": leaf.shape, "dtype": leaf.dtype, "sharding": format_sharding(leaf.sharding)}


def explanation_figures(explanation: ExplanationData) -> dict[str, Any]:
    """Returns what an explanation says."""
    return {
        "pattern": explanation.pattern,
        "tensors": [_explained_tensor(one) for one in explanation.tensors],
        "ops": [{**op._asdict(), "rule": str(op.rule)} for op in explanation.ops],
        "op_kinds": [_explained_kind(kind) for kind in explanation.op_kinds],
        "collectives": explanation.collectives,
    }


def _explained_tensor(one: TensorExplanation) -> dict[str, Any]:
    return {
        "paths": one.paths,
        "sharding": format_sharding(one.tensor.sharding),
        "reason": one.tensor.reason,
        "uses": one.uses,
        "reshards": one.reshards,
        "alternatives": one.alternatives,
    }


def _explained_kind(kind: OpExplanation) -> dict[str, Any]:
    return {
        "op": kind.op.name,
        "split": kind.op.sharding,
        "num_runs": kind.num_runs,
        "missing": kind.missing,
        "alternatives": kind.alternatives,
    }


def pareto_figures(found: ParetoData[Any]) -> dict[str, Any]:
    """Returns the points of a front and beside it, without their plans."""
    points = [{**_point(point), "on_front": point in found.front} for point in found.points]
    return {"points": points, "unmet": found.unmet, "notes": found.notes}


def _point(point: Any) -> dict[str, Any]:
    own = {name: getattr(point, name) for name in point.__dataclass_fields__}
    return {**own, "mesh": dict(point.mesh.axes)}

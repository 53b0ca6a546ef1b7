"""Compares the plan of a pipeline with another one, or with a plan of the same step without stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from spmdctx.errors import message
from spmdctx.pipeline.data import PipelineData
from spmdctx.plan.data import PlanData
from spmdctx.plan.diff import Change, quantity_change
from spmdctx.plan.show.diff import PlanDiff
from spmdctx.wording import TIMES, bytes_text, mesh_text, place_text, seconds_text, split_text

AnyPlan = PipelineData | PlanData


class _Quantity(NamedTuple):
    value: float
    unit: Callable[[float], str]


def diff_pipelines(before: AnyPlan, after: Any) -> PlanDiff:
    """Returns the changes from one plan to another, of which at least one is a pipeline's.

    Settings hold the schedule and the cuts, costs each stage and what crosses, tensors the stages of the step's inputs.
    """
    if not isinstance(after, AnyPlan):
        text = "A plan is compared with another plan."
        raise TypeError(message(text, got=repr(after), need="a plan, of plan(...) or its class's load(...)"))
    old, new = _settings(before), _settings(after)
    names = dict.fromkeys((*old, *new))
    return PlanDiff(
        settings=tuple(Change(name, old.get(name, ""), new.get(name, "")) for name in names if old.get(name) != new.get(name)),
        costs=tuple(_costs(_quantities(before), _quantities(after))),
        tensors=tuple(_tensors(_places(before), _places(after))),
        communication=(),
        num_ops=None,
        notes_added=tuple(note for note in after.notes if note not in before.notes),
        notes_removed=tuple(note for note in before.notes if note not in after.notes),
        same=before == after,
    )


def _settings(plan: AnyPlan) -> dict[str, str]:
    common = {"mode": plan.mode, "search_mode": plan.search_mode, "topology": plan.topology}
    if isinstance(plan, PlanData):
        return {"stages": "1", "mesh": mesh_text(plan.logical_mesh), **common}
    schedule = plan.simulation.schedule
    cuts = [place_text(reason.before) for reason in plan.cut_reasons]
    return {
        "stages": str(len(plan.stages)),
        "mesh": f"{mesh_text(plan.logical_mesh)} for each stage",
        **common,
        "schedule": schedule.name,
        "micro-batches": str(schedule.num_micro),
        **{f"cut {number}": f"behind equation {place}, {cut}" for number, (place, cut) in enumerate(zip(plan.cuts, cuts, strict=True))},
    }


def _quantities(plan: AnyPlan) -> dict[str, _Quantity]:
    if isinstance(plan, PlanData):
        return {"step": _Quantity(plan.cost.total_s, seconds_text), "memory": _Quantity(plan.cost.memory_bytes, bytes_text)}
    found = {"step": _Quantity(plan.step_s, seconds_text), "memory": _Quantity(plan.memory_bytes, bytes_text)}
    found["idle"] = _Quantity(plan.simulation.bubble, "{:.1%}".format)
    for number, stage in enumerate(plan.stages):
        found[f"stage {number}: a micro-batch"] = _Quantity(stage.forward_s + stage.backward_s, seconds_text)
        found[f"stage {number}: in flight"] = _Quantity(stage.in_flight, str)
        found[f"stage {number}: memory"] = _Quantity(stage.memory_bytes, bytes_text)
    crossing: Counter[str] = Counter()
    for one in plan.transfers:
        crossing[str(one.what)] += one.bytes
    return found | {f"crosses: {what}": _Quantity(size, bytes_text) for what, size in crossing.items()}


def _costs(before: dict[str, _Quantity], after: dict[str, _Quantity]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        was, becomes = before.get(name), after.get(name)
        if was is not None and becomes is not None:
            yield from quantity_change(name, was.value, becomes.value, was.unit)
        else:
            yield Change(name, *("" if one is None else one.unit(one.value) for one in (was, becomes)))


def _places(plan: AnyPlan) -> dict[str, str]:
    """Returns where each input of the step lies: the stage of a pipeline, and the sharding."""
    if isinstance(plan, PlanData):
        return {one.path: split_text(one.sharding) for one in plan.inputs}
    return {one.path: f"stage {one.stage} {split_text(one.sharding)}" if one.shape else "all stages" for one in plan.inputs}


def _tensors(before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    """Gives the changes of inputs; those of layers alike that change alike make one row."""
    rows: Counter[tuple[str, str, str]] = Counter()
    for path in dict.fromkeys((*before, *after)):
        was, becomes = before.get(path, ""), after.get(path, "")
        if was != becomes:
            rows[re.sub(r"\d+", "*", path), was, becomes] += 1
    for (pattern, was, becomes), count in rows.items():
        yield Change(f"{pattern}  {TIMES}{count}" if count > 1 else pattern, was, becomes)

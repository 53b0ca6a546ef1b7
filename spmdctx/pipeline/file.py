"""Reads and writes plans of pipelines: one JSON file with the schedule, the cuts and the plan of each program, under one checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from spmdctx.errors import PlanFormatError, StrategyError, shown
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.cut.reasons import ChunkReason, CutReason, OtherPlace
from spmdctx.pipeline.data import PipelineData, StagedTensor, StagePlan, Transfer
from spmdctx.pipeline.programs.transfers import Moved
from spmdctx.pipeline.schedule.simulate import Simulation, Span, simulate
from spmdctx.pipeline.schedule.tasks import Kind, Schedule, Task
from spmdctx.plan.file import parse_plan, plan_json
from spmdctx.plan.plan import Plan
from spmdctx.wording.files import read_file, write_file
from spmdctx.wording.text_data import read_json_text

FORMAT = "spmdctx pipeline"
FORMAT_VERSION = 1

AnyPipeline = TypeVar("AnyPipeline", bound=PipelineData)


def write_pipeline(plan: PipelineData, path: str | os.PathLike[str]) -> None:
    """Writes the plan of a pipeline, and makes its folder: the same bytes for equal plans; a reader never sees half of it.

    Raises:
        FileError: the file cannot be written; a former one is as it was.
    """
    write_file(path, pipeline_json(plan))


def pipeline_json(plan: PipelineData) -> str:
    """Returns the text of the plan's file."""
    body = _encode(plan)
    return _text({**body, "sha256": _checksum(body)}) + "\n"


def read_pipeline(path: str | os.PathLike[str], kind: type[AnyPipeline]) -> AnyPipeline:
    """Reads what `write_pipeline` wrote, as a plan of the class `kind`.

    Raises:
        PlanFormatError: the file is no plan of a pipeline, is damaged, or has another format version.
        OSError: the file cannot be read.
    """
    where = os.fspath(path)
    try:
        body = read_json_text(read_file(path))
    except ValueError as error:
        raise PlanFormatError("The file is no plan of a pipeline: it does not hold JSON text.", where=where, got=str(error)) from None
    return pipeline_of(body, where, kind)


def pipeline_of(body: Any, where: str, kind: type[AnyPipeline]) -> AnyPipeline:
    """Returns the plan that a file's body holds; errors call the file `where`.

    Raises:
        PlanFormatError: it is no plan of a pipeline, is damaged, or has another format version.
    """
    _check(body, where)
    try:
        return _decode(body, where, kind)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StrategyError) as error:
        if isinstance(error, PlanFormatError):
            raise
        raise PlanFormatError(
            "The file does not have the parts of a pipeline's plan.", where=where, got=f"{type(error).__name__}: {error}"
        ) from error


def _check(body: Any, where: str) -> None:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise PlanFormatError(
            f"The file is no plan of a pipeline: its format is not {FORMAT!r}.",
            where=where,
            fix="save the plan of a step with pipeline_stages, or leave pipeline_stages out for the plan of a step without",
        )
    if body.get("format_version") != FORMAT_VERSION:
        raise PlanFormatError(
            "The file of a pipeline's plan has another format version.",
            where=where,
            got=shown(body.get("format_version")),
            need=str(FORMAT_VERSION),
            fix="make the plan again with this version of spmdctx",
        )
    if body.pop("sha256", None) != _checksum(body):
        raise PlanFormatError("The file is damaged: its checksum does not match what it holds.", where=where, fix="plan again and save it")


def _text(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _checksum(body: Any) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _encode(plan: PipelineData) -> dict[str, Any]:
    schedule, spans = plan.simulation.schedule, plan.simulation.spans
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mode": plan.mode,
        "search_mode": plan.search_mode,
        "topology": plan.topology,
        "mesh": plan.logical_mesh.axes,
        "schedule": {
            "name": schedule.name,
            "num_micro": schedule.num_micro,
            "stage_of": schedule.stage_of,
            "stages": [[[str(task.kind), task.chunk, task.micro, *spans[task]] for task in tasks] for tasks in schedule.stages],
        },
        "cuts": plan.cuts,
        "bubble_formula": plan.bubble_formula,
        "inputs": list(map(_encode_leaf, plan.inputs)),
        "outputs": list(map(_encode_leaf, plan.outputs)),
        "joints": [_plan_body(own) for own in plan.joints],
        "stages": [_encode_stage(stage) for stage in plan.stages],
        "transfers": [[str(one.what), one.source, one.target, one.count, one.bytes] for one in plan.transfers],
        "chunk_reasons": plan.chunk_reasons,
        "cut_reasons": plan.cut_reasons,
        "notes": plan.notes,
    }


def _encode_leaf(leaf: StagedTensor) -> list[Any]:
    return [leaf.path, leaf.role.value, leaf.shape, leaf.dtype, leaf.sharding, leaf.stage]


def _decode_leaf(body: Any) -> StagedTensor:
    path, role, shape, dtype, sharding, stage = body
    return StagedTensor(path, Role(role), tuple(shape), dtype, tuple(map(tuple, sharding)), stage)


def _encode_stage(stage: StagePlan) -> dict[str, Any]:
    return {
        **{name: getattr(stage, name) for name in StagePlan.__dataclass_fields__},
        "tasks": [[name, _plan_body(own)] for name, own in stage.tasks.items()],
        "after": [[name, _plan_body(own)] for name, own in stage.after.items()],
        "live_bytes": list(map(list, stage.live_bytes.items())),
    }


def _plan_body(plan: Plan) -> Any:
    return json.loads(plan_json(plan))


def _decode(body: Mapping[str, Any], where: str, kind: type[AnyPipeline]) -> AnyPipeline:
    def plan_of(own: Any) -> Plan:
        return parse_plan(_text(own), where, Plan)

    def stage_of(own: Mapping[str, Any]) -> StagePlan:
        tasks, after = ({one: plan_of(text) for one, text in own[name]} for name in ("tasks", "after"))
        rest = {name: own[name] for name in StagePlan.__dataclass_fields__ if name not in ("tasks", "after", "live_bytes", "chunks")}
        return StagePlan(chunks=tuple(own["chunks"]), tasks=tasks, after=after, live_bytes=dict(own["live_bytes"]), **rest)

    return kind(
        mode=body["mode"],
        search_mode=body["search_mode"],
        topology=body["topology"],
        logical_mesh=LogicalMesh(tuple((name, size) for name, size in body["mesh"])),
        simulation=_simulation(body["schedule"]),
        bubble_formula=body["bubble_formula"],
        inputs=tuple(map(_decode_leaf, body["inputs"])),
        outputs=tuple(map(_decode_leaf, body["outputs"])),
        stages=tuple(map(stage_of, body["stages"])),
        transfers=tuple(Transfer(Moved(what), *numbers) for what, *numbers in body["transfers"]),
        joints=tuple(map(plan_of, body["joints"])),
        cuts=tuple(body["cuts"]),
        chunk_reasons=tuple(ChunkReason(tuple(sources), tuple(leaves), seconds) for sources, leaves, seconds in body["chunk_reasons"]),
        cut_reasons=tuple(map(_cut_reason, body["cut_reasons"])),
        notes=tuple(body["notes"]),
    )


def _cut_reason(body: Any) -> CutReason:
    before, after, crossing_bytes, limit_s, others = body
    return CutReason(before, after, crossing_bytes, limit_s, tuple(OtherPlace(*one) for one in others))


def _simulation(body: Mapping[str, Any]) -> Simulation:
    """Returns the schedule with its times.

    Raises:
        ValueError: tasks are missing, or stand twice or on another stage.
        StrategyError: tasks wait for each other.
    """
    rows = [[(Task(Kind(kind), chunk, micro), Span(start, end)) for kind, chunk, micro, start, end in own] for own in body["stages"]]
    schedule = Schedule(body["name"], tuple(tuple(task for task, _ in own) for own in rows), tuple(body["stage_of"]), body["num_micro"])
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if schedule.splits_backward else (Kind.FORWARD, Kind.BACKWARD)
    wanted = [
        Counter(
            Task(kind, chunk, micro)
            for chunk, at in enumerate(schedule.stage_of)
            if at == stage
            for kind in kinds
            for micro in range(schedule.num_micro)
        )
        for stage in range(schedule.num_stages)
    ]
    if [Counter(tasks) for tasks in schedule.stages] != wanted:
        raise ValueError("the schedule does not run each task once, on the stage of its chunk")
    simulate(schedule, lambda _: 1.0)
    return Simulation(schedule, {task: span for own in rows for task, span in own})

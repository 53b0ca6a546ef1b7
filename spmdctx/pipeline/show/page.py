"""Shows the plan of a pipelined step as one self-contained page, for a notebook cell or a file of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from spmdctx.pipeline.data import PipelineData, StagePlan
from spmdctx.pipeline.show.summary import pipeline_sentence
from spmdctx.pipeline.show.timeline import Timeline
from spmdctx.plan.show.page import document, section, styled, tile
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text

_STAGE_COLUMNS = ("stage", "chunks", "equations", "parameters", "forward", "backward", "in flight", "state", "kept", "peak")
_TRANSFER_COLUMNS = ("crosses", "from stage", "to stage", "arrays", "bytes")


def pipeline_document(plan: PipelineData) -> str:
    """Returns a whole HTML document."""
    return document(f"Pipeline: {len(plan.stages)} stages of {mesh_text(plan.logical_mesh)}", pipeline_page(plan))


def pipeline_page(plan: PipelineData) -> str:
    """Returns the page as a fragment; its style reaches nothing outside."""
    timeline = Timeline(plan.simulation)
    schedule = plan.simulation.schedule
    moved = sum(one.bytes for one in plan.transfers)
    stages = [_stage_cells(number, stage) for number, stage in enumerate(plan.stages)]
    detail = f"{schedule.name}, {schedule.num_micro} micro-batches"
    notes = f"<ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in plan.notes)}</ul>"
    parts = [
        _header(plan),
        _tiles(plan),
        section("Timeline", detail, f'<div class="scroll">{timeline.svg()}</div>{timeline.legend()}'),
        section("Stages", counted(len(plan.stages), "stage"), _table(_STAGE_COLUMNS, stages)),
        section("Transfers", f"{bytes_text(moved)} in a step", _table(_TRANSFER_COLUMNS, plan.told_transfers)),
        section("Notes", str(len(plan.notes)), notes) if plan.notes else "",
    ]
    return styled("".join(parts))


def _header(plan: PipelineData) -> str:
    words = (plan.mode, plan.topology, counted(plan.num_devices, "device"), f"{mesh_text(plan.logical_mesh)} each")
    tags = "".join(f"<li>{escape(word)}</li>" for word in words)
    what = f"<p><strong>{escape(pipeline_sentence(plan))}.</strong></p>"
    return f'<header><h1>{counted(len(plan.stages), "stage")}</h1>{what}<ul class="tags">{tags}</ul></header>'


def _tiles(plan: PipelineData) -> str:
    formula = "" if plan.bubble_formula is None else f"{plan.bubble_formula:.1%} by formula"
    tiles = (
        tile("step", seconds_text(plan.step_s), f"{seconds_text(plan.after_s)} after the loss"),
        tile("idle", f"{plan.simulation.bubble:.1%}", formula, plan.simulation.bubble),
        tile("longest stage / mean", f"{plan.imbalance:.3f}", "planned seconds"),
        tile("memory per device", bytes_text(plan.memory_bytes), "fullest stage"),
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _stage_cells(number: int, stage: StagePlan) -> tuple[str, ...]:
    return (
        *(str(number), ", ".join(map(str, stage.chunks)), str(stage.num_equations), str(stage.num_parameters)),
        *(seconds_text(stage.forward_s), seconds_text(stage.backward_s), str(stage.in_flight)),
        *map(bytes_text, (stage.state_bytes, stage.kept_bytes, stage.memory_bytes)),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    style = f"grid-template-columns:minmax(110px,1.4fr) repeat({len(head) - 1},minmax(0,1fr))"
    drawn = "".join(f'<div class="row" style="{style}">{_cells(row)}</div>' for row in rows)
    return f'<div class="grid"><div class="row head" style="{style}">{_cells(head)}</div>{drawn}</div>'


def _cells(cells: Sequence[str]) -> str:
    return "".join(f'<span class="{"num" if place else ""}">{escape(cell)}</span>' for place, cell in enumerate(cells))

"""Shows the plan of a pipelined step as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spmdctx.pipeline.data import PipelineData
from spmdctx.pipeline.show.summary import pipeline_sentence
from spmdctx.pipeline.show.timeline import Timeline
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text


def pipeline_table(plan: PipelineData) -> Group:
    """Returns the plan for a rich console: a summary, a row for each stage, and notes."""
    schedule = plan.simulation.schedule
    formula = "" if plan.bubble_formula is None else f", {plan.bubble_formula:.1%} by formula for stages alike"
    lines = [
        Text.assemble(("Pipeline  ", "bold"), f"{counted(len(plan.stages), 'stage')} of {mesh_text(plan.logical_mesh)} on {plan.topology}"),
        Text(pipeline_sentence(plan) + ".", style="bold"),
        Text(
            f"{schedule.name}, {schedule.num_micro} micro-batches: {seconds_text(plan.simulation.makespan_s)}, "
            f"{plan.simulation.bubble:.1%} idle{formula}; {seconds_text(plan.after_s)} after the loss"
        ),
        Text(f"longest stage / mean {plan.imbalance:.3f}, {bytes_text(plan.memory_bytes)} per device at most"),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "chunks", "equations", "parameters", "forward", "backward", "in flight", "state", "kept", "peak"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(
            *(str(number), ", ".join(map(str, stage.chunks)), str(stage.num_equations), str(stage.num_parameters)),
            *(seconds_text(stage.forward_s), seconds_text(stage.backward_s), str(stage.in_flight)),
            *map(bytes_text, (stage.state_bytes, stage.kept_bytes, stage.memory_bytes)),
        )
    moves = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("crosses", "from stage", "to stage", "arrays", "bytes"):
        moves.add_column(name, justify="left" if name == "crosses" else "right")
    for row in plan.told_transfers:
        moves.add_row(*row)
    notes: Sequence[RenderableType] = [Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in plan.notes]
    return Group(*lines, table, Timeline(plan.simulation), moves, *notes)

"""Draws the schedule of a pipeline over time: a row for each stage, as a picture and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.text import Text

from spmdctx.pipeline.schedule.simulate import Simulation
from spmdctx.pipeline.schedule.tasks import Kind, Task
from spmdctx.plan.show.page import styled
from spmdctx.plan.show.terminal import WIDTH, plain_text
from spmdctx.wording import seconds_text
from spmdctx.wording.reports import Report

NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input gradients", Kind.WEIGHT: "weight gradients"}
_COLOURS = {Kind.FORWARD: "blue", Kind.BACKWARD: "yellow", Kind.INPUT: "green", Kind.WEIGHT: "magenta"}
_IDLE = "\N{MIDDLE DOT}"

_LEFT, _ACROSS, _RIGHT, _ROW, _GAP = 64, 840, 96, 26, 6


@dataclass(frozen=True)
class Timeline(Report):
    """The tasks of a pipeline over time; it draws itself in a notebook, and prints itself in a terminal.

    Attributes:
        simulation: the schedule that runs, with the planned times of its tasks.
    """

    simulation: Simulation

    kind = "timeline"

    def _figures(self) -> dict[str, Any]:
        own = self.simulation
        spans = {task: own.spans[task] for tasks in own.schedule.stages for task in tasks}
        rows = [{**task._asdict(), "start_s": span.start, "end_s": span.end} for task, span in spans.items()]
        return {"schedule": own.schedule.name, "makespan_s": own.makespan_s, "idle": own.bubble, "tasks": rows}

    def svg(self) -> str:
        """Returns the picture alone, to be put into a page with the style of plans."""
        schedule, end = self.simulation.schedule, self.simulation.makespan_s or 1.0
        rows = "".join(self._row(stage, tasks, end) for stage, tasks in enumerate(schedule.stages))
        height = len(schedule.stages) * (_ROW + _GAP) + 22
        base = height - 6
        axis = f'<text x="{_LEFT}" y="{base}">0</text><text x="{_LEFT + _ACROSS}" y="{base}" text-anchor="end">{seconds_text(end)}</text>'
        label = escape(f"{schedule.name} of {schedule.num_micro} micro-batches on {schedule.num_stages} stages")
        size = f'viewBox="0 0 {_LEFT + _ACROSS + _RIGHT} {height}"'
        return f'<svg class="chart timeline" {size} role="img" aria-label="{label}">{_HATCH}{rows}{axis}</svg>'

    def _row(self, stage: int, tasks: Sequence[Task], end: float) -> str:
        top = stage * (_ROW + _GAP)
        middle = top + _ROW / 2 + 4
        drawn = "".join(self._task(task, tasks[0].chunk, top, end) for task in tasks)
        idle = f"{1 - self.simulation.busy_s[stage] / end:.1%} idle"
        return (
            f'<text class="strong" x="{_LEFT - 8}" y="{middle}" text-anchor="end">stage {stage}</text>'
            f'<rect class="idle" fill="url(#spmdctx-idle)" x="{_LEFT}" y="{top}" width="{_ACROSS}" height="{_ROW}"/>{drawn}'
            f'<text x="{_LEFT + _ACROSS + 8}" y="{middle}">{idle}</text>'
        )

    def _task(self, task: Task, first_chunk: int, top: float, end: float) -> str:
        span = self.simulation.spans[task]
        x, width = _LEFT + _ACROSS * span.start / end, _ACROSS * (span.end - span.start) / end
        title = f"{NAMES[task.kind]} of chunk {task.chunk}, micro-batch {task.micro}: {seconds_text(span.end - span.start)}"
        later = "" if task.chunk == first_chunk else " later"
        number = f'<text class="in" x="{x + width / 2:.1f}" y="{top + _ROW / 2 + 4}" text-anchor="middle">{task.micro}</text>'
        return (
            f'<rect class="task {task.kind}{later}" x="{x:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{_ROW}">'
            f"<title>{escape(title)}</title></rect>{number if width > 8 * len(str(task.micro)) + 2 else ''}"
        )

    def legend(self) -> str:
        """Returns what the colours mean, as a list of a page."""
        kinds = dict.fromkeys(task.kind for tasks in self.simulation.schedule.stages for task in tasks)
        items = "".join(f'<li><i class="key {kind}"></i>{NAMES[kind]}</li>' for kind in Kind if kind in kinds)
        return f'<ul class="legend">{items}<li><i class="key idle"></i>idle, {self.simulation.bubble:.1%}</li></ul>'

    def _repr_html_(self) -> str:
        return styled(self.svg() + self.legend())

    def __str__(self) -> str:
        return plain_text(self.__rich__())

    def __rich__(self) -> Text:
        schedule, end = self.simulation.schedule, self.simulation.makespan_s
        drawn = Text(no_wrap=True)
        names = [f"stage {stage}  " for stage in range(schedule.num_stages)]
        columns = WIDTH - max(map(len, names))
        for name, tasks in zip(names, schedule.stages, strict=True):
            drawn.append(name.rjust(WIDTH - columns))
            for letter, kind in self._letters(tasks, columns):
                drawn.append(letter, style=None if kind is None else _COLOURS[kind])
            drawn.append("\n")
        kinds = dict.fromkeys(task.kind for tasks in schedule.stages for task in tasks)
        told = ", ".join(f"{kind} {NAMES[kind]}" for kind in Kind if kind in kinds)
        small = "; small letters: later chunks" if schedule.num_chunks > schedule.num_stages else ""
        return drawn.append(f"{seconds_text(end)}: {told}, and the micro-batch{small}; {_IDLE} idle")

    def _letters(self, tasks: Sequence[Task], columns: int) -> list[tuple[str, Kind | None]]:
        """Returns a letter for each column: the task that has most of it, named where it begins."""
        end = self.simulation.makespan_s or 1.0
        row: list[tuple[str, Kind | None]] = [(_IDLE, None)] * columns
        for task in tasks:
            span = self.simulation.spans[task]
            first, last = round(columns * span.start / end), round(columns * span.end / end)
            letter = str(task.kind) if task.chunk == tasks[0].chunk else str(task.kind).lower()
            name = f"{letter}{task.micro}".ljust(last - first, "-")
            row[first:last] = [(name[place], task.kind) for place in range(last - first)]
        return row


_HATCH = (
    '<defs><pattern id="spmdctx-idle" width="6" height="6" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">'
    '<rect class="ground" width="6" height="6"/><line class="rule" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
)

"""Shows the changes from one plan to another, as text for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spmdctx.plan.diff import PlanDiffData, ops_text, verdict
from spmdctx.plan.show.page import styled
from spmdctx.plan.show.terminal import plain_text
from spmdctx.wording import bytes_text, seconds_text
from spmdctx.wording.reports import Report

ARROW = "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True, slots=True)
class PlanDiff(PlanDiffData, Report):
    """The answer of `Plan.diff`; it prints itself, and draws itself in a notebook."""

    kind = "diff"

    def _figures(self) -> dict[str, Any]:
        names = ("same", "settings", "costs", "tensors", "communication", "num_ops", "notes_added", "notes_removed")
        return {name: getattr(self, name) for name in names}

    def __rich__(self) -> Group:
        return Group(*_text_sections(self))

    def __str__(self) -> str:
        return plain_text(self)

    def _repr_html_(self) -> str:
        return _page(self)


def _text_sections(diff: PlanDiff) -> Iterator[RenderableType]:
    if verdict(diff):
        yield Text(verdict(diff))
        return
    for title, changes in (("Settings", diff.settings), ("Predicted", diff.costs), ("Inputs", diff.tensors)):
        if changes:
            table = _text_table(title, "before", "after")
            for change in changes:
                table.add_row(Text(change.name), Text(change.before or "none"), Text(change.after or "none"))
            yield table
    if diff.communication:
        yield _communication_table(diff)
    if diff.num_ops:
        yield Text(f"  {ops_text(diff.num_ops)}")
    for sign, notes in (("-", diff.notes_removed), ("+", diff.notes_added)):
        for note in notes:
            yield Text(f"  {sign} {note}")


def _communication_table(diff: PlanDiff) -> Table:
    table = _text_table("Communication", "over", "count", "per device", "time")
    for row in diff.communication:
        table.add_row(
            row.kind,
            "+".join(row.axes),
            f"{row.counts[0]} {ARROW} {row.counts[1]}",
            f"{bytes_text(row.payload_bytes[0])} {ARROW} {bytes_text(row.payload_bytes[1])}",
            f"{seconds_text(row.times_s[0])} {ARROW} {seconds_text(row.times_s[1])}",
        )
    return table


def _text_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, header_style="bold" if index == 0 else "dim", overflow="fold")
    return table


def _page(diff: PlanDiff) -> str:
    """Returns the page as a fragment; its style reaches nothing outside."""
    if verdict(diff):
        return styled(f"<p>{verdict(diff)}</p>")
    return styled("".join(_page_sections(diff)))


def _page_sections(diff: PlanDiff) -> Iterator[str]:
    for title, changes in (("Predicted", diff.costs), ("Inputs", diff.tensors), ("Settings", diff.settings)):
        if changes:
            rows = [(escape(change.name), escape(change.before or "none"), escape(change.after or "none")) for change in changes]
            yield _page_table(title, ("", "before", "after"), rows, code=title == "Inputs")
    if diff.communication:
        rows = [
            (
                f"{row.kind} over {escape('+'.join(row.axes))}",
                f"{row.counts[0]} {ARROW} {row.counts[1]}, {bytes_text(row.payload_bytes[0])} {ARROW} {bytes_text(row.payload_bytes[1])}",
                f"{seconds_text(row.times_s[0])} {ARROW} {seconds_text(row.times_s[1])}",
            )
            for row in diff.communication
        ]
        yield _page_table("Communication", ("", "count and bytes per device", "time"), rows)
    if diff.num_ops:
        yield f'<p class="muted">{ops_text(diff.num_ops)}</p>'
    notes = [f"- {note}" for note in diff.notes_removed] + [f"+ {note}" for note in diff.notes_added]
    if notes:
        yield f"<h2>Notes</h2><ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _page_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, code: bool = False) -> str:
    names = "".join(f"<span>{name}</span>" for name in head)
    lines = ""
    for first, *rest in rows:
        cells = "".join(f"<span>{cell}</span>" for cell in rest)
        lines += f'<div class="row"><span>{f"<code>{first}</code>" if code else first}</span>{cells}</div>'
    return f'<h2>{title}</h2><div class="grid diff"><div class="row head">{names}</div>{lines}</div>'

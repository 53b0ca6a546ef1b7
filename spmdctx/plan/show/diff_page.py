"""What changes from one plan to another, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from spmdctx.plan.diff import ARROW, PlanDiff, ops_text, verdict
from spmdctx.plan.show.page import styled
from spmdctx.wording import bytes_text, seconds_text


def diff_page(diff: PlanDiff) -> str:
    """The page as a fragment; its style reaches nothing outside."""
    if verdict(diff):
        return styled(f"<p>{verdict(diff)}</p>")
    return styled("".join(_sections(diff)))


def _sections(diff: PlanDiff) -> Iterator[str]:
    for title, changes in (("Predicted", diff.costs), ("Inputs", diff.tensors), ("Settings", diff.settings)):
        if changes:
            rows = [(escape(change.name), escape(change.before or "none"), escape(change.after or "none")) for change in changes]
            yield _table(title, ("", "before", "after"), rows, code=title == "Inputs")
    if diff.communication:
        rows = [
            (
                f"{row.kind} over {escape('+'.join(row.axes))}",
                f"{row.counts[0]} {ARROW} {row.counts[1]}, {bytes_text(row.payload_bytes[0])} {ARROW} {bytes_text(row.payload_bytes[1])}",
                f"{seconds_text(row.times_s[0])} {ARROW} {seconds_text(row.times_s[1])}",
            )
            for row in diff.communication
        ]
        yield _table("Communication", ("", "count and bytes per device", "time"), rows)
    if diff.num_ops:
        yield f'<p class="muted">{ops_text(diff.num_ops)}</p>'
    notes = [f"- {note}" for note in diff.notes_removed] + [f"+ {note}" for note in diff.notes_added]
    if notes:
        yield f"<h2>Notes</h2><ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, code: bool = False) -> str:
    names = "".join(f"<span>{name}</span>" for name in head)
    lines = ""
    for first, *rest in rows:
        cells = "".join(f"<span>{cell}</span>" for cell in rest)
        lines += f'<div class="row"><span>{f"<code>{first}</code>" if code else first}</span>{cells}</div>'
    return f'<h2>{title}</h2><div class="grid diff"><div class="row head">{names}</div>{lines}</div>'

"""Renders the audit as text and as a page."""

from __future__ import annotations

from html import escape

from spmdctx.audit.collectives import CompiledCollective
from spmdctx.audit.data import EXCUSED_BYTES, MAX_PEAK_RATIO, AuditData, AuditRow, MemoryUse
from spmdctx.ir.collective import AS_PLANNED, Collective
from spmdctx.wording import bytes_text, peak_text

_STYLE = (
    "<style>.spmdctx-audit table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".spmdctx-audit th,.spmdctx-audit td{padding:.2em .8em;text-align:right;border-bottom:1px solid #8884}"
    ".spmdctx-audit th:first-child,.spmdctx-audit td:first-child,.spmdctx-audit th:last-child,.spmdctx-audit td:last-child{text-align:left}"
    ".spmdctx-audit.ok>p:first-of-type>b{color:#2a8f4a}.spmdctx-audit.differs>p:first-of-type>b{color:#c4541c}</style>"
)
_COLUMN_NAMES = ("collective", "axes", "planned", "bytes", "found", "compiled", "unplanned", "bytes", "realised")


def report_text(report: AuditData) -> str:
    """The verdict, the table, and every difference."""
    lines = [_verdict(report), *_text_table([_COLUMN_NAMES, *map(_cells, report.rows)] if report.rows else [])]
    lines += [f"  unplanned: {text}" for text in _unplanned_lines(report.unplanned)]
    lines += [f"  missing:   {text}" for text in _missing_lines(report.missing)]
    lines += [f"  memory:    {_memory_text(report.memory)}"] if report.memory else []
    lines += [f"  note:      {note}" for note in report.notes]
    return "\n".join(lines)


def report_html(report: AuditData) -> str:
    """The same as a self-contained piece of a page."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in report.rows)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in _COLUMN_NAMES)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if report.rows else ""
    memory = f"<p>Memory: {escape(_memory_text(report.memory))}</p>" if report.memory else ""
    lists = _html_list("Unplanned", _unplanned_lines(report.unplanned)) + _html_list("Planned, not found", _missing_lines(report.missing))
    mark = "ok" if report.ok else "differs"
    verdict = f"<p><b>{mark}</b> {escape(_verdict(report))}</p>"
    return f'<div class="spmdctx-audit {mark}">{_STYLE}{verdict}{table}{lists}{memory}{_html_list("Notes", list(report.notes))}</div>'


def _verdict(report: AuditData) -> str:
    fits = report.memory is None or report.memory.ok
    word = "differs from" if not report.ok else "agrees with" if fits else "takes more memory than"
    return (
        f"The compiled program {word} the plan: {report.found_share:.1%} of {bytes_text(report.planned_bytes)} planned was found; "
        f"{report.unplanned_share:.1%} of {bytes_text(report.compiled_bytes)} compiled is unplanned{_peak_text(report.memory)}."
    )


def _peak_text(memory: MemoryUse | None) -> str:
    """Compares the peaks; empty where the compiler says nothing of its own."""
    if memory is None or memory.ratio is None:
        return ""
    text = f"; its peak of memory is {memory.ratio:.2f} of the planned one"
    if not memory.is_judged:
        return f"{text}, which is for another machine"
    if memory.is_excused:
        return f"{text}, which is less than {bytes_text(EXCUSED_BYTES)} above it"
    if memory.safe_bytes:
        return f"{text}, {'within' if memory.ok else 'above'} the {bytes_text(memory.safe_bytes)} that are safe"
    return text if memory.ok else f"{text}, and may be {MAX_PEAK_RATIO:g} of it"


def _cells(row: AuditRow) -> tuple[str, ...]:
    planned = (str(row.planned_count), bytes_text(row.planned_bytes)) if row.planned_count else ("-", "-")
    found = (str(row.found_count), bytes_text(row.compiled_bytes)) if row.found_count else ("-", "-")
    extra = (str(row.unplanned_count), bytes_text(row.unplanned_bytes)) if row.unplanned_count else ("-", "-")
    ways = "; ".join(name if len(row.ways) == 1 else f"{name} ({count})" for name, count in row.ways if row.ways != ((AS_PLANNED, count),))
    return (row.kind, "+".join(row.axes), *planned, *found, *extra, ways)


def _text_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (0, 1, len(_COLUMN_NAMES) - 1)

    def pad(index: int, cell: str) -> str:
        return cell.ljust(widths[index]) if index in left else cell.rjust(widths[index])

    return [("  " + "  ".join(pad(index, cell) for index, cell in enumerate(row))).rstrip() for row in rows]


def _unplanned_lines(unplanned: tuple[CompiledCollective, ...]) -> list[str]:
    ordered = sorted(unplanned, key=lambda one: -one.total_bytes)
    return [
        f"{one.kind} over {'+'.join(one.axes)}, {one.repeats} x {bytes_text(one.payload_bytes)} {one.dtype}, "
        f"from {one.source or 'no source line'} ({one.name}{', ' + one.note if one.note else ''})"
        for one in ordered
    ]


def _missing_lines(missing: tuple[Collective, ...]) -> list[str]:
    ordered = sorted(missing, key=lambda one: -one.payload_bytes * one.repeats)
    return [
        f"{one.kind} over {'+'.join(one.axes)}, {one.repeats} x {bytes_text(one.payload_bytes)}, "
        f"for {one.cause}{' at ' + one.source if one.source else ''}"
        for one in ordered
    ]


def _memory_text(memory: MemoryUse) -> str:
    parts = (
        f"arguments {bytes_text(memory.argument_bytes)} + results {bytes_text(memory.output_bytes)} "
        f"- shared by both {bytes_text(memory.alias_bytes)} + temporaries {bytes_text(memory.temporary_bytes)}"
    )
    planned = peak_text(memory.planned_bytes, memory.safe_bytes)
    return f"planned {planned}, compiled {bytes_text(memory.peak_bytes)} ({parts})"


def _html_list(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details open><summary>{title} ({len(lines)})</summary><ul>{items}</ul></details>" if lines else ""

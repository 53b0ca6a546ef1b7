"""Renders the audit of a pipeline as text and as a page: stage by stage, then what crosses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from spmdctx.audit.render import report_text as program_text
from spmdctx.pipeline.audit.data import PipelineAuditData, ProgramAudit, StageRow, TransferRow
from spmdctx.wording import bytes_text, counted

_PROGRAM_COLUMNS = ("program", "runs", "done", "collectives", "planned", "found", "unplanned", "memory", "compiled")
_MOVE_COLUMNS = ("crosses", "from", "to", "planned", "bytes", "done", "bytes")


def report_text(report: PipelineAuditData) -> str:
    """The verdict, a table for each stage, what crosses, and every difference."""
    lines = [_verdict(report)]
    for row in report.stages:
        lines += [
            _stage_line(row),
            *_text_table([_PROGRAM_COLUMNS, *(_program_cells(one) for one in _of_stage(report, row.stage))], "    "),
        ]
    lines += ["transfers", *_text_table([_MOVE_COLUMNS, *map(_transfer_cells, report.transfers)], "    ")] if report.transfers else []
    lines += [f"  differs:   {text}" for text in report.faults]
    for one in report.programs:
        lines += [f"  {one.name}: {line}" for line in _details(one)]
    lines += [f"  note:      {note}" for note in report.notes]
    return "\n".join(lines)


def report_html(report: PipelineAuditData) -> str:
    """The same as a self-contained piece of a page."""
    tables = "".join(
        f"<h4>{escape(_stage_line(row))}</h4>{_html_table(_PROGRAM_COLUMNS, [_program_cells(one) for one in _of_stage(report, row.stage)])}"
        for row in report.stages
    )
    moves = f"<h4>transfers</h4>{_html_table(_MOVE_COLUMNS, [_transfer_cells(row) for row in report.transfers])}"
    texts = [*report.faults, *(f"{one.name}: {line.strip()}" for one in report.programs for line in _details(one)), *report.notes]
    rest = f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""
    mark = "ok" if report.ok else "differs"
    style = "<style>.spmdctx-audit td,.spmdctx-audit th{padding:.2em .8em;text-align:right}</style>"
    return f'<div class="spmdctx-audit {mark}">{style}<p><b>{mark}</b> {escape(_verdict(report))}</p>{tables}{moves}{rest}</div>'


def _verdict(report: PipelineAuditData) -> str:
    word = "agrees with" if report.ok else "differs from"
    done = sum(row.done_count for row in report.transfers)
    planned = sum(row.planned_count for row in report.transfers)
    return (
        f"The pipeline {word} its plan: {sum(one.ok for one in report.programs)} of {counted(len(report.programs), 'compiled program')} "
        f"agree; {done} arrays were moved, and {planned} planned."
    )


def _of_stage(report: PipelineAuditData, stage: int) -> list[ProgramAudit]:
    return [one for one in report.programs if one.stage == stage]


def _stage_line(row: StageRow) -> str:
    compiled = "not known" if row.compiled_bytes is None else bytes_text(row.compiled_bytes)
    return (
        f"stage {row.stage}: in flight {row.planned_in_flight} planned, {row.in_flight} counted; "
        f"memory {bytes_text(row.planned_bytes)} planned, {compiled} compiled"
    )


def _program_cells(one: ProgramAudit) -> tuple[str, ...]:
    report, memory = one.report, one.report.memory
    return (
        one.name,
        str(one.planned_runs),
        str(one.runs),
        str(sum(row.planned_count for row in report.rows)),
        bytes_text(report.planned_bytes),
        f"{report.found_share:.1%}",
        bytes_text(report.unplanned_bytes),
        "-" if memory is None else bytes_text(memory.planned_bytes),
        "-" if memory is None else bytes_text(memory.peak_bytes),
    )


def _transfer_cells(row: TransferRow) -> tuple[str, ...]:
    done = (str(row.done_count), bytes_text(row.done_bytes))
    return (str(row.what), str(row.source), str(row.target), str(row.planned_count), bytes_text(row.planned_bytes), *done)


def _details(one: ProgramAudit) -> Iterator[str]:
    """Gives the lines of a program that is not as planned."""
    if not one.report.ok:
        yield from program_text(one.report).splitlines()
    if one.misplaced:
        yield f"lies elsewhere than planned: {', '.join(dict.fromkeys(one.misplaced))}"


def _text_table(rows: Sequence[tuple[str, ...]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def _html_table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead><tbody>{body}</tbody></table>"

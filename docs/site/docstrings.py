"""Turns docstrings, which are plain text with Markdown's code, lists and tables, into what autodoc reads."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([*|])")
_FENCE = "```"


def _plain(line: str) -> str:
    """Escapes what would be emphasis or a substitution, and parts code from letters that follow it; code keeps its text."""
    parts = _CODE.split(line)
    line = "".join(part if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts)
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)


def _table(rows: Iterable[str]) -> Iterator[str]:
    """Yields a Markdown table as a list-table with one row of heads."""
    lines = [row for row in rows if not set(row) <= set("|-: ")]
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    yield from ("", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", "")
    for row in lines:
        for place, cell in enumerate(row.strip().strip("|").split("|")):
            yield f"{indent}   {'  -' if place else '* -'} {_plain(cell.strip())}"
    yield ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _text(lines: Iterable[str]) -> Iterator[str]:
    """Yields prose and code blocks, both those between fences and those that stand four spaces to the right after an empty line."""
    is_fenced, code, before, was_empty = False, None, 0, False
    for line in lines:
        if code is not None and line.strip() and _indent(line) < code:
            code = None
        if line.lstrip().startswith(_FENCE):
            is_fenced = not is_fenced
            yield from ("", f"{' ' * _indent(line)}.. code-block:: {line.strip()[3:] or 'text'}", "") if is_fenced else ("",)
        elif is_fenced or code is not None:
            yield f"    {line}" if is_fenced else line
        elif was_empty and line.strip() and _indent(line) >= before + 4:
            code = _indent(line)
            yield from (f"{' ' * before}.. code-block:: python", "", line)
        else:
            yield _plain(line)
        before = _indent(line) if line.strip() and code is None else before
        was_empty = not line.strip()


def as_rst(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText."""
    found: list[str] = []
    for is_row, group in groupby(lines, lambda line: line.lstrip().startswith("|")):
        rows = list(group)
        found += _table(rows) if is_row else _text(rows)
    return found


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replaces the lines of a docstring, as autodoc's event has it."""
    lines[:] = as_rst(lines)

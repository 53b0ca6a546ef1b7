"""Draws small charts as inline SVG, in the colours of the page's style."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 1000, 200
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 14, 24


class Mark(NamedTuple):
    """A point of a scatter chart: its coordinates, its CSS class, the text of its tooltip, and whether it is filled."""

    x: float
    y: float
    style: str
    title: str
    filled: bool


def thinned(values: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Returns at most `count` pairs of position and value.

    Each of equal runs of positions gives its largest value, so that no peak is lost.
    """
    size = len(values)
    runs = (
        [(size * part // count, size * (part + 1) // count) for part in range(count)] if size > count else [(i, i + 1) for i in range(size)]
    )
    return [max(((position, int(values[position])) for position in range(*run)), key=lambda pair: pair[1]) for run in runs]


def area_chart(values: Sequence[int], limit: float | None, labels: tuple[str, str, str], title: str) -> str:
    """Draws one value per position as a filled line from zero, and marks the largest.

    Args:
        values: one or more, not negative.
        limit: a line across, None for none.
        labels: texts for the largest value, the limit and the horizontal axis.
        title: text for readers who do not see the picture.
    """
    pairs = thinned(values, (WIDTH - LEFT - RIGHT) // 2)
    top = max(max(value for _, value in pairs), limit or 0.0, 1.0) * 1.08
    across = max(len(values) - 1, 1)

    def place(position: float, value: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * position / across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*pair) for pair in pairs))
    base = HEIGHT - BOTTOM
    first, last = place(pairs[0][0], 0)[0], place(pairs[-1][0], 0)[0]
    peak = max(pairs, key=lambda pair: pair[1])
    x, y = place(*peak)
    parts = [
        f'<polygon class="area" points="{first:.1f},{base} {points} {last:.1f},{base}"/>',
        f'<polyline class="line" points="{points}"/>',
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>',
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        _text(x, max(y - 8, 11), labels[0], "middle" if LEFT + 90 < x < WIDTH - 110 else "start" if x < WIDTH / 2 else "end", "strong"),
        _text(WIDTH - RIGHT, HEIGHT - 6, labels[2], "end"),
        _text(LEFT - 8, base + 4, "0", "end"),
    ]
    if limit is not None:
        y = place(0, limit)[1]
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, labels[1], "end"))
    return _svg("".join(parts), title)


def scatter_chart(marks: Sequence[Mark], labels: tuple[str, str, str, str], title: str) -> str:
    """Draws marks from the origin outwards; `labels` are the largest x and y as text, and the names of the axes."""
    right, top = max(mark.x for mark in marks) * 1.08 or 1.0, max(mark.y for mark in marks) * 1.15 or 1.0
    base = HEIGHT - BOTTOM
    dots = []
    for mark in marks:
        x, y = LEFT + (WIDTH - LEFT - RIGHT) * mark.x / right, TOP + (base - TOP) * (1 - mark.y / top)
        kind = "dot filled" if mark.filled else "dot"
        dots.append(f'<circle class="{kind} {mark.style}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(mark.title)}</title></circle>')
    parts = [
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>',
        f'<line class="rule" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{base}"/>',
        *dots,
        _text(LEFT - 8, TOP + (base - TOP) * (1 - 1 / 1.15) + 4, labels[1], "end"),
        _text(LEFT + (WIDTH - LEFT - RIGHT) / 1.08, HEIGHT - 6, labels[0], "middle"),
        _text(LEFT + 6, TOP + 6, labels[3], "start"),
        _text(LEFT + 6, HEIGHT - 6, labels[2], "start"),
        _text(LEFT - 8, base + 4, "0", "end"),
    ]
    return _svg("".join(parts), title)


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(body: str, title: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'

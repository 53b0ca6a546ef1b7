"""Reads where the figures of a run go."""

from __future__ import annotations

from typing import NamedTuple

TARGETS = "FILE.jsonl, tensorboard:FOLDER, wandb:PROJECT"
"""What a target may be."""

_PREFIXES = ("tensorboard", "wandb")


class MetricsTarget(NamedTuple):
    """A place for figures: its kind ("lines", "tensorboard" or "wandb"), and the file, folder or project there."""

    kind: str
    where: str


def metrics_target(text: str) -> MetricsTarget | None:
    """Returns a place for figures from its text, None if it is none of `TARGETS`."""
    prefix, colon, rest = text.partition(":")
    if colon and rest and prefix in _PREFIXES:
        return MetricsTarget(prefix, rest)
    return MetricsTarget("lines", text) if text.endswith((".jsonl", ".ndjson")) else None

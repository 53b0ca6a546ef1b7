"""What crosses between the stages of a pipeline, by why it crosses."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Moved(StrEnum):
    """Why an array crosses."""

    ACTIVATION = "activations"
    COTANGENT = "their gradients"
    WEIGHT = "shared inputs"
    """Parameters and batches that chunks on several stages read."""
    GRADIENT = "gradients of shared inputs"
    VALUE = "values after the loss"
    """Scalars, such as norms and counts of steps."""


class Route(NamedTuple):
    """What crosses, and from which stage to which."""

    what: Moved
    source: int
    target: int

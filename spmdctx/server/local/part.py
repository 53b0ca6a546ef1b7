"""What a step has that stays with workers, and what the rest of it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jexc

from spmdctx.pipeline.capture.around import Around


@dataclass(frozen=True)
class Local:
    """State that stays with workers, and the program that renews it: each worker runs it on what servers have summed.

    Attributes:
        around: the step's program around its loss without this; after its results it gives what is taken.
        held: the inputs of the step that stay with workers, by number; scalars do not.
        given: the inputs of the step that the program reads and that are no state, by number.
        taken: the variables of `around` that it reads: sums over the parts, and scalars.
        jaxpr: the program; it takes what is held, given and taken, and gives the next values of what is held, and results.
        results: the results of the step that it makes, by number.
        like: for each of what is held or taken, by its place among the program's inputs, the parameter of its shape that it belongs to.
    """

    around: Around
    held: tuple[int, ...]
    given: tuple[int, ...]
    taken: tuple[Any, ...]
    jaxpr: jexc.ClosedJaxpr
    results: tuple[int, ...]
    like: Mapping[int, int]

"""The results of a step besides its state: they are kept for workers that start later, so they are to be small."""

from __future__ import annotations

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.cut.line import num_bytes
from spmdctx.trace.capture.capture import Captured
from spmdctx.wording import bytes_text

MOST_BYTES = 1 << 20
"""The bytes that the results of one step may have."""


def check_results(captured: Captured) -> None:
    """Refuses results that are too large to be kept for each step.

    Raises:
        UnsupportedError: they are named, the largest first.
    """
    body = captured.jaxpr.jaxpr
    carried = {leaf.carried_from for leaf in captured.outputs}
    given = [var for number, var in enumerate(body.invars) if number not in carried]
    sizes = {
        leaf.path: num_bytes(var)
        for leaf, var in zip(captured.outputs, body.outvars, strict=True)
        if leaf.carried_from is None and not isinstance(var, jexc.Literal) and not any(var is own for own in given)
    }
    if sum(sizes.values()) <= MOST_BYTES:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])
    raise UnsupportedError(
        f"The results of {captured.name} are kept for workers that start later, and they are too large.",
        got=", ".join(f"{path}: {bytes_text(sizes[path])}" for path in largest[:3]),
        need=f"at most {bytes_text(MOST_BYTES)} in a step, besides its state",
        fix="return a mean or a sum of them",
    )

"""Traces a planned step once more, to see that it is still the step that was planned."""

from __future__ import annotations

import warnings

from spmdctx.errors import ContextWarning, PlanError
from spmdctx.gradients.capture import capture_step
from spmdctx.pipeline.capture.stage import marks_met
from spmdctx.step.entry import Entry
from spmdctx.step.export.checked import difference
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.marker import tracing_in
from spmdctx.trace.scope.mesh import auto_axes, traced_for


def check_unchanged(entry: Entry, target: Target, static: Static, call: Call) -> None:
    """Checks that a step computes what it computed when it was planned; what it closes over may have changed.

    Raises:
        PlanError: it computes something else, cannot be traced any more, or returns another tree.
    """
    captured, settings = entry.captured, entry.environment.settings
    try:
        with (
            auto_axes(),
            tracing_in(settings.context.parallel_mode),
            traced_for(entry.environment),
            marks_met(records=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", ContextWarning)  # they were said when the step was planned
            again = capture_step(target, call, static, settings)
        found = _difference(captured, again)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise _changed(captured, f"{type(error).__name__}: {error}") from error
    if found:
        raise _changed(captured, f"of the plan and of the step now: {found}")


def _difference(one: Captured, other: Captured) -> str:
    paths, others = ([leaf.path for leaf in captured.outputs] for captured in (one, other))
    return difference(one.jaxpr, other.jaxpr) or ("" if paths == others else f"results {', '.join(paths)} and {', '.join(others)}")


def _changed(captured: Captured, got: str) -> PlanError:
    return PlanError(
        'export("jax") writes the step that was planned, and the step has changed since.',
        where=captured.name,
        got=got if len(got) < 400 else f"{got[:400]}...",
        fix="step.clear_cache(), then plan it again",
    )

"""`report` and `profile` of a step: what its calls took."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spmdctx.step.report.calls import Calls

if TYPE_CHECKING:
    from spmdctx.step.report.profile import Profile
    from spmdctx.step.report.report import StepReport


class MeasuredMethods:
    """What can be asked of a step that was called."""

    _calls: Calls | None = None
    _profile: Profile | None = None

    def report(self) -> StepReport:
        """Returns what the calls with the shapes of the last one took, beside the plan: seconds, samples, FLOP/s, memory.

        Waits until the devices have run what was queued.

        Raises:
            PlanError: the step was not called.
        """
        from spmdctx.step.report.report import report_of

        return report_of(self._calls)

    def profile(self, folder: str | os.PathLike[str]) -> Profile:
        """Returns a context whose calls JAX's profiler traces into `folder`; it then says where the devices' time went, beside the plan.

        A step that was not called before compiles in its first call, and the trace begins behind that. At its end the context raises a
        PlanError if no call was traced.
        """
        from spmdctx.step.report.profile import Profile

        return Profile(folder, lambda: self._calls, self._watched_by)

    def _watched_by(self, profile: Profile | None) -> None:
        self._profile = profile

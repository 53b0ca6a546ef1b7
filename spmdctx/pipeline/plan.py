"""The plan of a pipelined step, which shows itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from rich.console import RenderableType

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.data import PipelineData
from spmdctx.pipeline.show.table import pipeline_table
from spmdctx.plan.data import PlanData
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.terminal import plain_text


@dataclass(frozen=True, repr=False)
class PipelinePlan(PipelineData):
    """The plan of a step on a pipeline; the attributes are those of `PipelineData`."""

    def __getattr__(self, name: str) -> NoReturn:
        if (not name.startswith("_") and hasattr(Plan, name)) or name in PlanData.__dataclass_fields__:
            raise UnsupportedError(
                f"The plan of a pipeline has no '{name}' so far.",
                fix="look at plan.stages, whose tasks have plans of their own, or leave pipeline_stages out",
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<spmdctx.PipelinePlan {self.simulation.schedule.name} of {len(self.stages)} stages on {self.topology}>"

    def __str__(self) -> str:
        return plain_text(pipeline_table(self))

    def __rich__(self) -> RenderableType:
        return pipeline_table(self)

"""The plan of a pipelined step, which shows itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rich.console import RenderableType

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.data import PipelineData
from spmdctx.pipeline.diff import diff_pipelines
from spmdctx.pipeline.file import FORMAT, pipeline_json, pipeline_of, read_pipeline, write_pipeline
from spmdctx.pipeline.show.explanation import StageExplanation, explained
from spmdctx.pipeline.show.page import pipeline_document, pipeline_page
from spmdctx.pipeline.show.plain import plain_plan
from spmdctx.pipeline.show.summary import pipeline_sentence
from spmdctx.pipeline.show.table import pipeline_table
from spmdctx.pipeline.show.timeline import Timeline
from spmdctx.plan.data import PlanData
from spmdctx.plan.file import reads_format
from spmdctx.plan.pareto import Progress
from spmdctx.plan.plan import Plan, weighed
from spmdctx.plan.show.diff import PlanDiff
from spmdctx.plan.show.pareto import Pareto
from spmdctx.plan.show.terminal import plain_text
from spmdctx.wording import counted
from spmdctx.wording.files import write_file
from spmdctx.wording.reports import stamped


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

    @property
    def summary(self) -> str:
        """What the plan is, such as "4 pipeline stages by 1f1b, each ZeRO-1 over 2 devices"."""
        return pipeline_sentence(self)

    def timeline(self) -> Timeline:
        """Returns the schedule over time, drawn from the tasks that run: a picture in a notebook, text in a terminal."""
        return Timeline(self.simulation)

    def explain(self, pattern: str) -> StageExplanation:
        """Explains a stage: what it holds, why it is cut there, what else was possible and what would make that win.

        Args:
            pattern: "stage 3", or what `Plan.explain` takes, which is then asked of each stage's programs.
        """
        return explained(self, pattern)

    def certify(self) -> PipelinePlan:
        """Returns this plan, whose certificate was made with it: `lower_bound_s`, below which no cut into as many chunks takes, and `gap`.

        Raises:
            UnsupportedError: the plan is from a file, or was not searched for; plan the step again.
        """
        if self.lower_bound_s is not None:
            return self
        raise UnsupportedError(
            "This plan of a pipeline cannot be certified: no search has made it here, or the loss multiplies no matrices.",
            got=f"a plan of parallel_mode {self.mode!r} on {counted(len(self.stages), 'stage')}",
            fix="plan the step in auto_parallel, and certify that plan; each of plan.joints has a certificate of its own",
        )

    def pareto(self, memory_bytes: Sequence[int] = (), num_devices: Sequence[int] = (), *, progress: Progress | None = None) -> Pareto[Any]:
        """Weighs time against memory, as `Plan.pareto` does: plans the step again, on as many stages and by the same schedule.

        With `auto_pipeline` each point has the number of stages that is best there; one of a single stage has a `Plan`.

        Args:
            memory_bytes: budgets per device; empty for this plan's memory and fractions of it, down to where nothing fits.
            num_devices: counts of devices of all stages; empty for half as many, as many and twice as many.
            progress: called with each point and each budget that no plan meets.

        Raises:
            UnsupportedError: the plan is from a file; plan the step again.
            TypeError: budgets or counts that are no numbers, or a progress that cannot be called.
            ContextError: a budget or count that is not positive.
        """
        return weighed(self.replan, self.num_devices, memory_bytes, num_devices, progress)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the tables say as plain data, in seconds and bytes, with its versioned "schema"."""
        return stamped("pipeline_plan", plain_plan(self))

    def diff(self, other: PipelineData | PlanData) -> PlanDiff:
        """Returns the changes from this plan to `other`: another pipeline's, or a plan without stages."""
        return diff_pipelines(self, other)

    def changes_from(self, before: PlanData) -> PlanDiff:
        """Returns the changes to this plan from one without stages."""
        return diff_pipelines(before, self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one JSON file, and makes the file's folder; strategy_ckpt_load_file takes it.

        Raises:
            FileError: the file cannot be written; a former one is as it was.
        """
        write_pipeline(self, path)

    def to_json(self) -> str:
        """Returns the text of the plan's file."""
        return pipeline_json(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelinePlan:
        """Reads what `save` wrote.

        Raises:
            PlanFormatError: the file is no plan of a pipeline, is damaged, or has another format version.
            OSError: the file cannot be read.
        """
        return read_pipeline(path, cls)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan with its timeline as one self-contained page, and makes the file's folder.

        Raises:
            FileError: the file cannot be written; a former one is as it was.
        """
        write_file(path, pipeline_document(self))

    def _repr_html_(self) -> str:
        return pipeline_page(self)

    def __str__(self) -> str:
        return plain_text(pipeline_table(self))

    def __rich__(self) -> RenderableType:
        return pipeline_table(self)


reads_format(FORMAT, lambda body, where: pipeline_of(body, where, PipelinePlan))

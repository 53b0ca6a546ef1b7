"""What a step took, beside what its plan foretold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from rich import box
from rich.table import Table

from spmdctx.errors import PlanError
from spmdctx.machine.presets import rated_flops_per_s
from spmdctx.pipeline.data import PipelineData
from spmdctx.plan.data import PlanData
from spmdctx.plan.show.terminal import plain_text
from spmdctx.plan.summary.rates import batch_sizes
from spmdctx.server.plan import ServedPlan
from spmdctx.step.planning.about import flops_of_products, flops_of_region
from spmdctx.step.report.calls import Calls
from spmdctx.wording import bytes_text, counted, rate_text, seconds_text
from spmdctx.wording.reports import Report


@dataclass(frozen=True)
class StepReport(Report):
    """What calls of a step took, beside the plan. Figures that nothing measured are None.

    Attributes:
        name: The step's.
        topology: The machine of the plan.
        num_devices: Of the step.
        num_calls: Calls with the shapes of the last one.
        first_call_s: Seconds of the first of them, compilation among it, and what follows unless something asked for the plan before.
        trace_s: Seconds that JAX took to trace the step.
        search_s: Seconds of planning; None for pipelines.
        step_s: Seconds of a step after the first, as called: what a loop does between its calls counts too.
        planned_step_s: The plan's.
        samples_per_s: Rows of the batch a second.
        tokens_per_s: Elements of its largest array of whole numbers a second, if that has two dimensions or more.
        flops: Operations of the step's matrix products, on all devices, recomputed ones too.
        flops_per_s: Of one device.
        utilization: The part of the data sheet's rate of a device that this is (MFU; with recomputation, hardware FLOPs). None on CPUs.
        peak_bytes: The most memory that a device of this process has had in use, whatever used it.
        planned_peak_bytes: The plan's, for this step alone.
    """

    name: str
    topology: str
    num_devices: int
    num_calls: int
    first_call_s: float
    trace_s: float
    search_s: float | None
    step_s: float | None
    planned_step_s: float
    samples_per_s: float | None
    tokens_per_s: float | None
    flops: int
    flops_per_s: float | None
    utilization: float | None
    peak_bytes: int | None
    planned_peak_bytes: int

    @property
    def step_ratio(self) -> float | None:
        """The planned seconds over those of a step."""
        return None if self.step_s is None else self.planned_step_s / self.step_s

    @property
    def peak_ratio(self) -> float | None:
        """The planned peak over the one in use."""
        return None if not self.peak_bytes else self.planned_peak_bytes / self.peak_bytes

    kind = "step_report"

    def _figures(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "step_ratio": self.step_ratio, "peak_ratio": self.peak_ratio}

    def __str__(self) -> str:
        return plain_text(self.__rich__())

    def __rich__(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", title_justify="left")
        table.title = f"{self.name}, {counted(self.num_calls, 'call')} on {counted(self.num_devices, 'device')} ({self.topology})"
        for column in ("", "measured", "planned", "planned / measured"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("step", _text(self.step_s, seconds_text), seconds_text(self.planned_step_s), _ratio(self.step_ratio))
        table.add_row(
            "peak memory of a device", _text(self.peak_bytes, bytes_text), bytes_text(self.planned_peak_bytes), _ratio(self.peak_ratio)
        )
        table.add_row("first call, with compilation", seconds_text(self.first_call_s), "", "")
        table.add_row(
            "  tracing and planning, once", ", ".join(seconds_text(own) for own in (self.trace_s, self.search_s) if own is not None), "", ""
        )
        table.add_row("samples a second", _text(self.samples_per_s, rate_text), "", "")
        if self.tokens_per_s is not None:
            table.add_row("tokens a second", _text(self.tokens_per_s, rate_text), "", "")
        table.add_row("TFLOP/s of a device", _text(self.flops_per_s, lambda rate: f"{rate / 1e12:.3g}"), "", "")
        table.add_row("of the data sheet's (MFU)", _text(self.utilization, lambda part: f"{100 * part:.1f} %"), "", "")
        return table


def report_of(calls: Calls | None) -> StepReport:
    """Returns what calls took.

    Raises:
        PlanError: The step was not called.
    """
    if calls is None or not calls.count:
        raise PlanError(
            "The step was not called, so there is nothing to report.", fix="call it three times or more, then ask for the report"
        )
    entry = calls.entry
    environment, captured, plan = entry.environment, entry.captured, entry.plan
    num_devices = environment.settings.num_devices
    here = [device for device in environment.devices[:num_devices] if device.process_index == jax.process_index()]
    step_s = calls.step_s(here)
    flops = _flops(plan) + sum(map(flops_of_region, entry.regions if isinstance(plan, PlanData) else ()))
    rate = None if step_s is None else flops / step_s / num_devices
    rated = rated_flops_per_s(environment.settings.topology)
    samples, tokens = batch_sizes(captured.inputs)
    return StepReport(
        name=captured.name,
        topology=environment.settings.topology.device,
        num_devices=num_devices,
        num_calls=calls.count,
        first_call_s=calls.first_s,
        trace_s=captured.trace_s,
        search_s=plan.timing.search_s if isinstance(plan, PlanData) else None,
        step_s=step_s,
        planned_step_s=getattr(plan, "step_s", plan.cost.total_s),
        samples_per_s=samples / step_s if samples and step_s else None,
        tokens_per_s=tokens / step_s if tokens and step_s else None,
        flops=flops,
        flops_per_s=rate,
        utilization=None if rate is None or rated is None else rate / rated,
        peak_bytes=max((_peak(device) for device in here), default=0) or None,
        planned_peak_bytes=entry.peak_bytes,
    )


def _flops(plan: Any) -> int:
    """Returns the operations of a step's matrix products, on all devices."""
    if isinstance(plan, PipelineData):
        runs = plan.simulation.schedule.num_micro
        return sum(runs * sum(map(_flops, stage.tasks.values())) + sum(map(_flops, stage.after.values())) for stage in plan.stages)
    counted_once = flops_of_products(plan.op_table.operations)
    return counted_once * plan.num_parts if isinstance(plan, ServedPlan) else counted_once


def _peak(device: Any) -> int:
    return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))


def _text(value: Any, form: Any) -> str:
    return "not measured" if value is None else form(value)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

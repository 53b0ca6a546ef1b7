"""The plan of a pipelined step: its stages, their schedule, and what crosses between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spmdctx.errors import UnsupportedError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.schedule.simulate import Simulation
from spmdctx.plan.data import PlanData
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.terminal import plain_text
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text


@dataclass(frozen=True)
class StagePlan:
    """One stage: the chunks that it runs, for each kind of task of each chunk the plan, and its seconds and bytes for each device.

    Attributes:
        chunks: the parts of the loss, by number.
        tasks: the plan of each program, by its name.
        num_equations: of the loss.
        num_parameters: leaves of the loss that the stage owns.
        forward_s: seconds of all its chunks' forward passes of one micro-batch.
        backward_s: of the backward passes.
        in_flight: the most micro-batches of single chunks that it holds.
        state_bytes: parameters and sums of gradients.
        kept_bytes: what all micro-batches in flight keep.
        memory_bytes: the planned peak.
    """

    chunks: tuple[int, ...]
    tasks: dict[str, Plan]
    num_equations: int
    num_parameters: int
    forward_s: float
    backward_s: float
    in_flight: int
    state_bytes: int
    kept_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Transfer:
    """What crosses from one chunk to another, in one step: arrays and their bytes."""

    source: int
    target: int
    count: int
    bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of a step on a pipeline.

    Attributes:
        mode: the parallel mode.
        topology: the machine's name.
        logical_mesh: of each stage.
        simulation: the schedule with the planned times of its tasks.
        bubble_formula: the idle share that theory gives for stages alike, None if it gives none.
        stages: one for each.
        transfers: what crosses.
        notes: what a user would want to know.
    """

    mode: str
    topology: str
    logical_mesh: LogicalMesh
    simulation: Simulation
    bubble_formula: float | None
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]

    def __getattr__(self, name: str) -> NoReturn:
        if (not name.startswith("_") and hasattr(Plan, name)) or name in PlanData.__dataclass_fields__:
            raise UnsupportedError(
                f"The plan of a pipeline has no '{name}' so far.",
                fix="look at plan.stages, whose tasks have plans of their own, or leave pipeline_stages out",
            )
        raise AttributeError(name)

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return self.logical_mesh.num_devices * len(self.stages)

    @property
    def memory_bytes(self) -> int:
        """The planned peak of the fullest stage, per device."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """The longest stage over the mean, in planned seconds of a micro-batch."""
        seconds = [stage.forward_s + stage.backward_s for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds)

    def __str__(self) -> str:
        return plain_text(pipeline_table(self))

    def __rich__(self) -> RenderableType:
        return pipeline_table(self)


def pipeline_table(plan: PipelinePlan) -> Group:
    """Returns the plan for a rich console: a summary, a row for each stage, and notes."""
    schedule = plan.simulation.schedule
    formula = "" if plan.bubble_formula is None else f", {plan.bubble_formula:.1%} by formula for stages alike"
    lines = [
        Text.assemble(("Pipeline  ", "bold"), f"{counted(len(plan.stages), 'stage')} of {mesh_text(plan.logical_mesh)} on {plan.topology}"),
        Text(
            f"{schedule.name}, {schedule.num_micro} micro-batches: {seconds_text(plan.simulation.makespan_s)}, "
            f"{plan.simulation.bubble:.1%} idle{formula}"
        ),
        Text(f"longest stage / mean {plan.imbalance:.3f}, {bytes_text(plan.memory_bytes)} per device at most"),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "chunks", "equations", "parameters", "forward", "backward", "in flight", "state", "kept", "peak"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(
            *(str(number), ", ".join(map(str, stage.chunks)), str(stage.num_equations), str(stage.num_parameters)),
            *(seconds_text(stage.forward_s), seconds_text(stage.backward_s), str(stage.in_flight)),
            *map(bytes_text, (stage.state_bytes, stage.kept_bytes, stage.memory_bytes)),
        )
    moves = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("from chunk", "to chunk", "arrays", "bytes"):
        moves.add_column(name, justify="right")
    for one in plan.transfers:
        moves.add_row(str(one.source), str(one.target), str(one.count), bytes_text(one.bytes))
    notes: Sequence[RenderableType] = [Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in plan.notes]
    return Group(*lines, table, moves, *notes)

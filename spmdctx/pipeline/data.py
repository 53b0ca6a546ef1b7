"""Holds the data of a pipelined step's plan: its stages, their schedule, and what crosses between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdctx.ir.graph import Role, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.cut.reasons import ChunkReason, CutReason
from spmdctx.pipeline.programs.transfers import Moved
from spmdctx.pipeline.schedule.simulate import Simulation
from spmdctx.plan.data import Cost
from spmdctx.plan.plan import Plan
from spmdctx.wording import bytes_text


@dataclass(frozen=True)
class StagePlan:
    """One stage: the chunks that it runs, the plan of each of its programs, and its seconds and bytes for each device.

    Attributes:
        chunks: the parts of the loss, by number.
        tasks: the plan of each program that micro-batches run through, by its name, such as `forward0`.
        after: the plan of each program after the last micro-batch: `reduce0_1` completes gradients of the first chunk of stage 1, and
            `after1_0`, or `after1_all` of what all stages share by layers, follow the loss.
        num_equations: of the loss.
        num_parameters: leaves of the loss by which it is differentiated and which the stage reads.
        forward_s: seconds of all its chunks' forward passes of one micro-batch.
        backward_s: of the backward passes.
        in_flight: the most micro-batches of single chunks that it holds.
        state_bytes: inputs of the step that lie there, copies of shared ones, and sums of gradients.
        kept_bytes: the most that the micro-batches in flight hold.
        live_bytes: for each program, the most that lies there when it begins, its own operands among it.
        memory_bytes: the planned peak.
    """

    chunks: tuple[int, ...]
    tasks: dict[str, Plan]
    after: dict[str, Plan]
    num_equations: int
    num_parameters: int
    forward_s: float
    backward_s: float
    in_flight: int
    state_bytes: int
    kept_bytes: int
    live_bytes: Mapping[str, int]
    memory_bytes: int


class StagedTensor(NamedTuple):
    """One leaf of the step's arguments or results, and the first stage whose devices hold it; all stages hold scalars.

    Where all stages share stacked layers, the sharding names an axis `stage` before those of each stage.
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    stage: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class Transfer:
    """What crosses from one stage to another in one step, and why: arrays and their bytes."""

    what: Moved
    source: int
    target: int
    count: int
    bytes: int


@dataclass(frozen=True)
class PipelineData:
    """The fields of a pipelined step's plan.

    Attributes:
        mode: the parallel mode.
        search_mode: the search that planned the stages, empty if there was none.
        topology: the machine's name.
        logical_mesh: of each stage.
        simulation: the schedule with the planned times of its tasks.
        bubble_formula: the idle share that theory gives for stages alike, None if it gives none.
        inputs, outputs: the leaves of the step's arguments and results.
        stages: one for each.
        transfers: what crosses.
        joints: the plan of both passes of each chunk together, by which its shardings were decided.
        cuts: the numbers of the last equations before the cuts.
        chunk_reasons: what each chunk of the loss holds.
        cut_reasons: why each cut is where it is.
        notes: what a user would want to know.
        lower_bound_s: seconds below which no cut into as many chunks on as many stages runs a step, by any splits and any order of tasks;
            proven under the cost model. None if nothing was searched.
        replan: plans the step again for a budget and a number of devices, like that of a plan without stages.

    The last two are neither compared nor saved.
    """

    mode: str
    search_mode: str
    topology: str
    logical_mesh: LogicalMesh
    simulation: Simulation
    bubble_formula: float | None
    inputs: tuple[StagedTensor, ...]
    outputs: tuple[StagedTensor, ...]
    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]
    joints: tuple[Plan, ...]
    cuts: tuple[int, ...]
    chunk_reasons: tuple[ChunkReason, ...]
    cut_reasons: tuple[CutReason, ...]
    notes: tuple[str, ...]
    lower_bound_s: float | None = field(default=None, compare=False)
    replan: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "replan": None}

    @property
    def gap(self) -> float | None:
        """How far a step is above `lower_bound_s`, which counts neither what devices exchange nor what follows the loss."""
        return None if self.lower_bound_s is None else max(0.0, self.step_s / self.lower_bound_s - 1)

    @property
    def told_transfers(self) -> tuple[tuple[str, ...], ...]:
        """What crosses, as words: what, from where, to where, arrays, bytes; scalars between all stages together."""
        values = [one for one in self.transfers if one.what is Moved.VALUE]
        rows = [
            (str(one.what), str(one.source), str(one.target), str(one.count), bytes_text(one.bytes))
            for one in self.transfers
            if one.what is not Moved.VALUE
        ]
        total = (str(sum(one.count for one in values)), bytes_text(sum(one.bytes for one in values)))
        return (*rows, *([(str(Moved.VALUE), "all", "all", *total)] if values else []))

    @property
    def whole_mesh(self) -> LogicalMesh:
        """The mesh of all devices: an axis `stage` before those of each stage."""
        return LogicalMesh((("stage", len(self.stages)), *self.logical_mesh.axes))

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and sizes of each stage's mesh."""
        return dict(self.logical_mesh.axes)

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return self.logical_mesh.num_devices * len(self.stages)

    @property
    def memory_bytes(self) -> int:
        """The planned peak of the fullest stage, per device."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def safe_memory_bytes(self) -> int:
        """The likely peak: that of pipelines is no interval."""
        return self.memory_bytes

    @property
    def after_s(self) -> float:
        """Seconds of what follows the loss: in each round, those of what all stages do together, and of the slowest stage."""
        rounds: dict[str, float] = {}
        for stage in self.stages:
            for name, plan in stage.after.items():
                own = name if name.endswith("_all") else name.partition("_")[0]
                rounds[own] = max(rounds.get(own, 0.0), plan.cost.total_s)
        return sum(rounds.values())

    @property
    def step_s(self) -> float:
        """Planned seconds of a step."""
        return self.simulation.makespan_s + self.after_s

    @property
    def cost(self) -> Cost:
        """Seconds of a step and the planned peak; `compute_s` and `communication_s` are those of the stage that computes longest.

        What `total_s` has beside them is waiting: for micro-batches, and for arrays that cross.
        """
        runs, rows = self.simulation.schedule.num_micro, []
        for stage in self.stages:
            costs = [*[(runs, own.cost) for own in stage.tasks.values()], *[(1, own.cost) for own in stage.after.values()]]
            parts = ((count * own.compute_s, count * own.communication_s, count * own.hidden_communication_s) for count, own in costs)
            rows.append(tuple(map(sum, zip(*parts, strict=True))))
        compute_s, communication_s, hidden_s = max(rows)
        return Cost(compute_s, communication_s, self.step_s, self.memory_bytes, hidden_s)

    @property
    def imbalance(self) -> float:
        """The longest stage over the mean, in planned seconds of a micro-batch."""
        seconds = [stage.forward_s + stage.backward_s for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds)

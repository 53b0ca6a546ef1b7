"""Holds the data of a plan: the rows of its tables, and the fields of the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.errors import Sentence, read_gaps
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Graph, Op, Origin, Role, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.rule import OpRule, factor_name
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.machine.xla.memory.spread import safe_bytes
from spmdctx.plan.alternatives import Alternatives
from spmdctx.plan.rows import Rows
from spmdctx.search.problem.fold import FEW, ROUNDS, SMALL

FORMAT_VERSION = 1
"""The version of plan files; readers refuse other versions."""


class WorkForm(Enum):
    """Sentences about the work of devices."""

    REPEATED = (
        "Devices repeat each other's work: the step's FLOPs are split {ways} ways on average over {devices} devices; the largest op that "
        "is not split over all of them is {place}. {remedy}"
    )


class PeakForm(Enum):
    """Sentences about the predicted peak of a plan.

    They are part of the file format: the note of an older file is not recognized once its sentence is reworded.
    """

    OVER_DEVICE = "The predicted peak of {peak} per device is over the {capacity} that a program may use of a {device}."
    OVER_BUDGET = "The predicted peak of {peak} per device is over memory_bytes={budget}; only auto_parallel can meet a budget."
    MAY_BE_OVER = "The predicted peak of {peak} per device may be up to {safe} once compiled, which is over {limit}."
    WOULD_FIT = "{option} would let the step fit: its peak would be {peak} instead of {now}, and a step would take {seconds}{why}."
    OTHER_THAN_SAVED = "The predicted peak is {peak} per device, and not {saved} as in the strategy file: {why}."


class PeakNote(Sentence):
    """A note on the predicted peak of a plan, which holds for one machine and one set of donated arguments."""

    form: PeakForm

    @classmethod
    def read(cls, text: str) -> str:
        """Returns a note whose sentence a plan file holds, as a PeakNote if it has one of the forms."""
        for form in PeakForm:
            gaps = read_gaps(text, form, {})
            if gaps is not None:
                return cls(form, **gaps)
        return text


class PlannedTensor(NamedTuple):
    """One leaf of the step's arguments or results; `reason` says where its sharding came from, if that is known."""

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    reason: str = ""

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return _num_bytes(self.shape, self.dtype)

    def local_bytes(self, mesh: LogicalMesh) -> int:
        """Returns the bytes of one device's block."""
        return _num_bytes(local_shape(self.shape, self.sharding, mesh), self.dtype)


class PlannedGradient(NamedTuple):
    """The gradient of the parameter at `path`, and the bucket in which it is reduced, None if it has none."""

    path: str
    bucket: int | None = None


class PlannedOp(NamedTuple):
    """One op: its rule and, as text, the axes of each split factor (`i=data, k=model`)."""

    name: str
    primitive: str
    source: str
    rule: OpRule
    sharding: str
    repeats: int
    flops: int


class Reshard(NamedTuple):
    """A value that changes its sharding on the way to (or from) the op called `op`; `time_s` is for the whole step."""

    value: str
    source_sharding: TensorSharding
    target_sharding: TensorSharding
    op: str
    location: str
    time_s: float


class Cost(NamedTuple):
    """Predicted seconds of one step and peak bytes of one device.

    `communication_s` counts all collectives, one after the other; `total_s` only what does not hide behind compute. `memory_bytes` is the
    likely peak; `Plan.safe_memory_bytes` is what it may be.
    """

    compute_s: float
    communication_s: float
    total_s: float
    memory_bytes: int
    hidden_communication_s: float = 0.0

    @property
    def exposed_communication_s(self) -> float:
        """The seconds of communication that do not hide behind compute."""
        return self.communication_s - self.hidden_communication_s


class Timing(NamedTuple):
    """The seconds spent on making the plan."""

    trace_s: float = 0.0
    search_s: float = 0.0


class About(NamedTuple):
    """What a plan was made for and by; empty for plans from files.

    Attributes:
        step: the name of the step.
        model: the class of its model, if it has one.
        versions: of spmdctx, jax and the compiler.
        region_flops: operations of matrix products inside `shard_map`s, on all devices, which the ops of the plan leave out.
        device_bytes: what a program may use of a device's memory.
        rated_flops_per_s: the data sheet's rate of a device, None if there is none.
    """

    step: str = ""
    model: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    region_flops: int = 0
    device_bytes: int | None = None
    rated_flops_per_s: float | None = None


class OpTable(Rows[PlannedOp]):
    """The ops of a plan as columns; a row is made when it is read.

    `inputs` and `outputs` are the value ids of the plan's inputs and outputs.
    """

    __slots__ = ("choices", "inputs", "operations", "origins", "outputs")

    def __init__(
        self,
        operations: Sequence[Op],
        origins: Sequence[Origin],
        choices: Sequence[OpSharding],
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
    ) -> None:
        if not len(operations) == len(origins) == len(choices):
            raise ValueError(f"{len(operations)} ops, {len(origins)} origins and {len(choices)} shardings do not fit together.")
        self.operations, self.origins, self.choices = operations, origins, choices
        self.inputs, self.outputs = inputs, outputs

    @classmethod
    def of(cls, graph: Graph, assignment: Assignment) -> OpTable:
        """Returns the table of a graph under an assignment, in no time, whatever the size of the graph."""
        return cls(graph.ops, graph.origins, assignment.ops, graph.inputs, graph.outputs)

    def __len__(self) -> int:
        return len(self.operations)

    def row(self, index: int) -> PlannedOp:
        """Returns the op at a place."""
        op, origin = self.operations[index], self.origins[index]
        sharding = sharding_text(self.choices[index])
        return PlannedOp(origin.name, op.primitive, origin.source, op.rule, sharding, op.repeats, op.flops)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpTable):
            return NotImplemented
        if self is other:
            return True
        return (
            (self.inputs, self.outputs, len(self)) == (other.inputs, other.outputs, len(other))
            and all(left[:7] == right[:7] for left, right in zip(self.operations, other.operations, strict=True))
            and tuple(self.choices) == tuple(other.choices)
            and all(left == right for left, right in zip(self.origins, other.origins, strict=True))
        )


@dataclass(frozen=True)
class PlanData:
    """The fields of a plan of one step on one mesh.

    Attributes:
        fingerprint: The fingerprint of the traced program; a plan is lowered for that program only.
        mode: The parallel mode.
        search_mode: The search that made the plan, empty if there was none.
        logical_mesh: Axes and sizes; `mesh` gives them as a dictionary.
        topology: Name of the machine that the prices are for.
        inputs, outputs: The leaves of the step's arguments and results.
        op_table: The ops; `ops` gives them as rows.
        assignment: All shardings, enough to lower the plan without a search.
        reshards, collectives: Predicted communication, by value and by collective.
        gradients: The gradients in the order of the parameters' first use in the forward pass; a gradient's index is its place here.
        cost: Predicted time and memory.
        options: Context options that differ from their defaults.
        memory_limit_bytes: The budget per device, if there was one.
        lower_bound_s, gap: The search counts every plan of `declared_space` at this bound or above. Moves that the compiler shares, which
            the search overcounts for this plan, are subtracted. `gap` is total / lower bound - 1. None if not computed.
        notes: Every guess, fallback, padding and replication.
        timing: How long planning took.
        about: What the plan was made for and by.
        alternatives: The other choices, priced on request.
        memory_profile: Bytes of one device that are alive at each op.
        early: Updates of state for which the rest of the step waits, to spare memory.
        replan: Plans the step again for a budget and a number of devices: `replan(memory_bytes=..., num_devices=...)`, None for no
            budget and for as many devices as before. Raises InfeasibleError if nothing fits.
        certifier: Returns this plan with `lower_bound_s` and `gap`.
        exporter: Returns the source of a module that runs the step so; None for plans that `step.plan` did not give.

    The last eight are neither compared nor saved; all but `timing` and `about` are None for plans from files.
    """

    fingerprint: str
    mode: str
    search_mode: str
    logical_mesh: LogicalMesh
    topology: str
    inputs: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    op_table: OpTable
    assignment: Assignment
    reshards: Sequence[Reshard]
    collectives: tuple[Collective, ...]
    cost: Cost
    options: tuple[tuple[str, Any], ...] = ()
    memory_limit_bytes: int | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    notes: tuple[str, ...] = ()
    gradients: Sequence[PlannedGradient] = ()
    timing: Timing = field(default=Timing(), compare=False)
    about: About = field(default=About(), compare=False)
    alternatives: Alternatives | None = field(default=None, compare=False, repr=False)
    memory_profile: Sequence[int] | None = field(default=None, compare=False, repr=False)
    early: tuple[EarlyUpdate, ...] | None = field(default=None, compare=False, repr=False)
    replan: Callable[..., Self] | None = field(default=None, compare=False, repr=False)
    certifier: Callable[[], Self] | None = field(default=None, compare=False, repr=False)
    exporter: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple((name, plain_option(value)) for name, value in self.options))

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.logical_mesh))

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return dict(self.logical_mesh.axes)

    @cached_property
    def safe_memory_bytes(self) -> int:
        """The safe end of the predicted peak, in bytes of one device: budgets are kept by it.

        Arguments are certain; the rest may be larger by a share that was measured on compiled programs. It is the likely end
        where nothing was measured: on CPU, and on machines of a name of their own.
        """
        arguments = sum(tensor.local_bytes(self.logical_mesh) for tensor in self.inputs)
        return safe_bytes(self.cost.memory_bytes, arguments, self.topology)

    @property
    def whole_mesh(self) -> LogicalMesh:
        """The mesh of all devices; that of a pipeline's plan has an axis of its stages, too."""
        return self.logical_mesh

    @property
    def ops(self) -> Sequence[PlannedOp]:
        """The ops as rows, which are made when they are read."""
        return self.op_table

    @property
    def declared_space(self) -> str:
        """The space of plans that the certificate covers, in words."""
        alike = f" (ops of which over {FEW} look alike for {ROUNDS} ops around are split alike)" if len(self.ops) > SMALL else ""
        return f"every legal split of every op and tensor{alike}, on the meshes that were tried"


AnyPlan = TypeVar("AnyPlan", bound=PlanData)
"""The class of plan that a reader returns, or that is planned again."""


def sharding_text(choice: OpSharding) -> str:
    """Returns the split factors of an op, such as `i=data, k=model+axis2`; empty if no factor is split."""
    return ", ".join(f"{factor_name(index)}={'+'.join(axes)}" for index, axes in enumerate(choice.axes) if axes)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    count = item_bytes(dtype)
    for size in shape:
        count *= size
    return count


def plain_option(value: Any) -> Any:
    """Returns an option's value as JSON could hold it, with tuples for lists; anything else becomes its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain_option(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): plain_option(item) for key, item in value.items()}
    return str(value)

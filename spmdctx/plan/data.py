"""What a plan holds: the rows of its tables and the fields of the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Graph, Op, Origin, Role, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.rule import OpRule, factor_name
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.plan.alternatives import Alternatives
from spmdctx.plan.rows import Rows
from spmdctx.search.problem.fold import ROUNDS, SMALL

FORMAT_VERSION = 1
"""Of plan files; a file of another version is refused."""


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
        """Bytes of the whole tensor."""
        return _num_bytes(self.shape, self.dtype)

    def local_bytes(self, mesh: LogicalMesh) -> int:
        """Bytes of one device's block."""
        return _num_bytes(local_shape(self.shape, self.sharding, mesh), self.dtype)


class PlannedGradient(NamedTuple):
    """The gradient of the parameter at `path`; `bucket` is that of the index mode of fusion, None without it."""

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

    `communication_s` is raw, one collective after the other; `total_s` counts what does not hide behind compute.
    """

    compute_s: float
    communication_s: float
    total_s: float
    memory_bytes: int
    hidden_communication_s: float = 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Communication that does not hide behind compute."""
        return self.communication_s - self.hidden_communication_s


class Timing(NamedTuple):
    """Seconds spent on making the plan."""

    trace_s: float = 0.0
    search_s: float = 0.0


class OpTable(Rows[PlannedOp]):
    """The ops of a plan as columns; a row is made when it is asked for.

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
        """The table of a graph under an assignment; takes no time, whatever the size of the graph."""
        return cls(graph.ops, graph.origins, assignment.ops, graph.inputs, graph.outputs)

    def __len__(self) -> int:
        return len(self.operations)

    def row(self, index: int) -> PlannedOp:
        """The op at a place."""
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
    """The fields of a plan: how one step runs on one mesh.

    Attributes:
        fingerprint: Of the traced program; a plan is lowered for that program only.
        mode: The parallel mode.
        search_mode: What searched, empty where nothing did.
        logical_mesh: Axes and sizes; `mesh` gives them as a dictionary.
        topology: Name of the machine the prices are for.
        inputs, outputs: The leaves of the step's arguments and results.
        op_table: The ops; `ops` gives them as rows.
        assignment: All shardings, enough to lower the plan without a search.
        reshards, collectives: Predicted communication, by value and by collective.
        gradients: In the order of the parameters' first use in the forward pass; a gradient's index is its place here.
        cost: Predicted time and memory.
        options: Context options that differ from their defaults.
        memory_limit_bytes: The budget per device, if there was one.
        lower_bound_s, gap: The search counts no plan of `declared_space` below it, less what it counts too much for this one (moves that
            the compiler shares); `gap` is total / lower bound - 1. None where not computed.
        notes: Every guess, fallback, padding and replication.
        timing: How long planning took.
        alternatives: What else could have been chosen, worked out when it is asked for.
        memory_profile: Bytes of one device that are alive at each op.
        early: Updates of state for which the rest of the step waits, to spare memory.
        replan: The same step under another budget or on another number of devices: `replan(memory_bytes=..., num_devices=...)`,
            None for a value that stays. Raises InfeasibleError where nothing fits.
        certifier: Returns this plan with `lower_bound_s` and `gap`.

    The last six are neither compared nor saved; all but `timing` are None for plans from files.
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
    alternatives: Alternatives | None = field(default=None, compare=False, repr=False)
    memory_profile: Sequence[int] | None = field(default=None, compare=False, repr=False)
    early: tuple[EarlyUpdate, ...] | None = field(default=None, compare=False, repr=False)
    replan: Callable[..., Self] | None = field(default=None, compare=False, repr=False)
    certifier: Callable[[], Self] | None = field(default=None, compare=False, repr=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple((name, plain_option(value)) for name, value in self.options))

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.logical_mesh))

    @property
    def mesh(self) -> dict[str, int]:
        """Axis names to sizes."""
        return dict(self.logical_mesh.axes)

    @property
    def ops(self) -> Sequence[PlannedOp]:
        """One row per op, made when it is asked for."""
        return self.op_table

    @property
    def declared_space(self) -> str:
        """What the certificate is about, in words."""
        alike = f" (ops that look alike for {ROUNDS} ops around are split alike)" if len(self.ops) > SMALL else ""
        return f"every legal split of every op and tensor{alike}, on the meshes that were tried"


AnyPlan = TypeVar("AnyPlan", bound=PlanData)
"""The class of plan that a reader makes or a search is asked for again."""


def sharding_text(choice: OpSharding) -> str:
    """`i=data, k=model+axis2`: the split factors of an op; empty where none is."""
    return ", ".join(f"{factor_name(index)}={'+'.join(axes)}" for index, axes in enumerate(choice.axes) if axes)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    count = item_bytes(dtype)
    for size in shape:
        count *= size
    return count


def plain_option(value: Any) -> Any:
    """An option's value as JSON could hold it, with tuples for lists; anything else becomes its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain_option(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): plain_option(item) for key, item in value.items()}
    return str(value)

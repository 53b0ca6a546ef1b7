"""The Plan: every decision about one step on one mesh, with what it is predicted to cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdctx.cost.memory.early_updates import EarlyUpdate
from spmdctx.errors import UnsupportedError
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Graph, Op, Origin, Role, item_bytes
from spmdctx.ir.mesh import LogicalMesh, local_shape
from spmdctx.ir.rule import OpRule, factor_name
from spmdctx.ir.sharding import Assignment, OpSharding, TensorSharding
from spmdctx.plan.rows import Rows
from spmdctx.search.problem.fold import ROUNDS, SMALL
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Group

    from spmdctx.plan.alternatives import Alternatives
    from spmdctx.plan.diff import PlanDiff
    from spmdctx.plan.explain import Explanation
    from spmdctx.plan.pareto import Pareto

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
class Plan:
    """How one step runs on one mesh.

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
    replan: Callable[..., Plan] | None = field(default=None, compare=False, repr=False)
    certifier: Callable[[], Plan] | None = field(default=None, compare=False, repr=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple((name, plain_option(value)) for name, value in self.options))

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.logical_mesh))

    def __repr__(self) -> str:
        cost = f"{seconds_text(self.cost.total_s)}, {bytes_text(self.cost.memory_bytes)} per device"
        return f"<spmdctx.Plan {mesh_text(self.logical_mesh)} on {self.topology}: {cost}>"

    @property
    def mesh(self) -> dict[str, int]:
        """Axis names to sizes."""
        return dict(self.logical_mesh.axes)

    @property
    def ops(self) -> Sequence[PlannedOp]:
        """One row per op, made when it is asked for."""
        return self.op_table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON: the same bytes for equal plans, no timing, no absolute path."""
        from spmdctx.plan.file import write_plan

        write_plan(self, path)

    def save_mindspore(self, path: str | os.PathLike[str], *, only_parameters: bool = True, several_axes: bool = False) -> None:
        """Writes the parameters' layouts and the strategies of the ops that read them as MindSpore's strategy JSON.

        Args:
            path: a file whose name ends in `.json`.
            only_parameters: leave out optimizer state and other state.
            several_axes: allow what only newer versions of MindSpore read: a dimension over axes that do not lie side by side.

        Raises:
            UnsupportedError: shardings that the format cannot hold, by name.
        """
        from spmdctx.plan.mindspore.file import write_mindspore

        write_mindspore(self, path, only_parameters=only_parameters, several_axes=several_axes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote.

        Raises:
            PlanFormatError: the file is no plan, is damaged, or has another format version.
        """
        from spmdctx.plan.file import read_plan

        return read_plan(path)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to `other`."""
        from spmdctx.plan.diff import diff_plans

        return diff_plans(self, other)

    @property
    def declared_space(self) -> str:
        """What the certificate is about, in words."""
        alike = f" (ops that look alike for {ROUNDS} ops around are split alike)" if len(self.ops) > SMALL else ""
        return f"every legal split of every op and tensor{alike}, on the meshes that were tried"

    def explain(self, pattern: str) -> Explanation:
        """Why the arguments or ops that match `pattern` are split as they are, the runner-up, and what would make it win.

        Args:
            pattern: part of a path ("layers/3/attn/q"), a glob over whole paths ("*/attn/*"), or an op's primitive
                ("dot_general"), name scope or source line ("model.py:41").
        """
        from spmdctx.plan.explain import explain_plan

        return explain_plan(self, pattern)

    def certify(self) -> Plan:
        """This plan with its certificate: `lower_bound_s`, below which nothing of the declared space is counted, and `gap`.

        A plan that has one is returned as it is.

        Raises:
            UnsupportedError: the plan is from a file, or was not searched for; plan the step again.
        """
        if self.lower_bound_s is not None:
            return self
        if self.certifier is None:
            searched = self.mode == "auto_parallel" and self.logical_mesh.num_devices > 1
            what = "it does not hold the step that it was made for" if searched else "nothing was searched for it"
            raise UnsupportedError(
                f"This plan cannot be certified: {what}.",
                got=f"a plan of parallel_mode {self.mode!r} on {counted(self.logical_mesh.num_devices, 'device')}",
                fix="plan the step again in auto_parallel on several devices, and certify that plan",
            )
        return self.certifier()

    def pareto(self, memory_bytes: Sequence[int] = (), num_devices: Sequence[int] = ()) -> Pareto:
        """Time against memory: the step planned again under each budget, and under none, on each number of devices.

        Args:
            memory_bytes: budgets per device; empty for this plan's memory and fractions of it, down to where nothing fits.
            num_devices: device counts; empty for half as many, as many and twice as many.

        Raises:
            UnsupportedError: the plan is from a file; plan the step again.
        """
        from spmdctx.plan.pareto import pareto

        return pareto(self, memory_bytes, num_devices)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one self-contained page."""
        from spmdctx.plan.show.page import plan_document

        with open(path, "w", encoding="utf-8") as file:
            file.write(plan_document(self))

    def __rich__(self) -> Group:
        from spmdctx.plan.show.table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from spmdctx.plan.show.table import rendered

        return rendered(self)

    def _repr_html_(self) -> str:
        from spmdctx.plan.show.page import plan_page

        return plan_page(self)


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

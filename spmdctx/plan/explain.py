"""Explains why a tensor or an op is split as it is: its readers, the runner-up, its price, and what would make it win.

A plan that knows its program prices whole steps: it forces the tensor or op, and chooses everything around it anew. A plan from a file
cannot do so. It gives a first-order answer, with everything else as planned. An argument has the chosen sharding `c`, another sharding
`a`, and the shardings `r` that its readers and its writer need. Then

    extra seconds of a = sum over distinct r of reshard(a, r) - reshard(c, r)

That leaves out what moves along, so the plan gives no answer that contradicts a proven optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from spmdctx.errors import message
from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import item_bytes
from spmdctx.ir.mesh import divides
from spmdctx.ir.primitives import CASTS
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import OpSharding, TensorSharding
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.reshard import reshard_time_s
from spmdctx.plan.alternatives import Alternative, Flip
from spmdctx.plan.data import PlanData, PlannedOp, PlannedTensor, Reshard, sharding_text
from spmdctx.plan.groups import group_tensors
from spmdctx.search.whatif.alternatives import rounded_s, slices
from spmdctx.wording import bytes_text, place_text, seconds_text

MAX_PRICED = 4
"""The number of groups of tensors, or kinds of ops, whose alternatives are priced as whole steps; each takes a moment."""


class Use(NamedTuple):
    """A use of a tensor by ops at one place, which read (or write) it in the sharding `needs`.

    `cast` says that they read a cast of it.
    """

    primitive: str
    source: str
    needs: TensorSharding
    writes: bool
    cast: bool
    num_ops: int


class Instead(NamedTuple):
    """Another choice, and the seconds per step and bytes per device that it takes more than the chosen one (less if negative).

    `split` is an op's axes as text, empty for a tensor. `num_moved` counts the tensors that move along, and `flips` tells what
    would make this the better choice; both are known for whole steps only. `same_slices`: only the axes' places differ from the
    chosen ones, not the numbers of slices. `outside`: it costs less than the plan's lower bound, so the search did not cover it.
    """

    sharding: TensorSharding
    extra_s: float
    extra_bytes: int
    split: str = ""
    num_moved: int = 0
    flips: tuple[str, ...] = ()
    same_slices: bool = False
    outside: bool = False


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """The explanation of one argument, or of equal ones of all layers (`paths`); alternatives come cheapest first.

    `whole_step` says whether alternatives are priced with everything that follows from them.
    """

    pattern: str
    paths: tuple[str, ...]
    tensor: PlannedTensor
    uses: tuple[Use, ...]
    reshards: tuple[Reshard, ...]
    alternatives: tuple[Instead, ...]
    whole_step: bool = False


@dataclass(frozen=True, slots=True)
class OpExplanation:
    """The explanation of ops of one kind at one place that are split alike: the first one, their runs, and its alternatives.

    `missing` says why there are no alternatives.
    """

    op: PlannedOp
    num_runs: int
    alternatives: tuple[Instead, ...]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class ExplanationData:
    """The answer of `Plan.explain` for a pattern; false if nothing matched."""

    pattern: str
    plan: PlanData
    tensors: tuple[TensorExplanation, ...]
    ops: tuple[PlannedOp, ...]
    collectives: tuple[Collective, ...]
    op_kinds: tuple[OpExplanation, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.ops)


Answer = TypeVar("Answer", bound=ExplanationData)


def explain_plan(plan: PlanData, pattern: str, kind: type[Answer]) -> Answer:
    """Explains the tensors whose path matches; if none does, the ops whose primitive, name or source line matches.

    The answer is of the class `kind`.
    """
    if not isinstance(pattern, str):
        raise TypeError(message("A plan is asked by a pattern.", got=repr(pattern), need="part of a path, or an op's name or line"))
    matching = [index for index, tensor in enumerate(plan.inputs) if _matches(tensor.path, pattern)]
    tensors = tuple(_explain_tensors(plan, matching, MAX_PRICED))
    ops: list[int] = []
    if tensors:
        places = {use.source for one in tensors for use in one.uses if use.source}
    else:
        ops = [
            number
            for number, op in enumerate(plan.ops)
            if op.primitive == pattern or any(_matches(text, pattern) for text in (op.name, op.source))
        ]
        places = {source for number in ops if (source := plan.op_table.origins[number].source)}
    collectives = tuple(row for row in plan.collectives if row.source in places)
    return kind(pattern, plan, tensors, tuple(plan.ops[number] for number in ops), collectives, tuple(_op_kinds(plan, ops)))


def _op_kinds(plan: PlanData, ops: Sequence[int]) -> Iterator[OpExplanation]:
    """Explains kinds of ops, the heaviest with their alternatives, the others without."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for number in ops:
        op = plan.ops[number]
        groups.setdefault((op.primitive, place_text(op.source), op.sharding, str(op.rule)), []).append(number)
    operations = plan.op_table.operations
    runs = [sum(operations[number].repeats for number in rows) for rows in groups.values()]
    weights = [operations[rows[0]].flops * count for rows, count in zip(groups.values(), runs, strict=True)]
    heaviest = sorted(range(len(weights)), key=lambda index: -weights[index])[:MAX_PRICED]
    for index, (rows, count) in enumerate(zip(groups.values(), runs, strict=True)):
        found: tuple[Instead, ...] = ()
        if plan.alternatives is not None and index in heaviest:
            found = _instead(plan, plan.alternatives.of_op(rows[0]), plan.op_table.choices[rows[0]].axes)
        yield OpExplanation(plan.ops[rows[0]], count, found, "" if found else _missing(plan, index in heaviest))


def _missing(plan: PlanData, heavy: bool) -> str:
    """Returns the reason why an op has no runner-up."""
    if plan.logical_mesh.num_devices == 1:
        return "there is one device"
    if plan.alternatives is None:
        return "not known: the plan does not hold the step that it was made for"
    if heavy:
        return "none: no other split is free and divides"
    return f"not looked for: only the {MAX_PRICED} heaviest kinds that match have one; ask for fewer"


def _instead(plan: PlanData, found: Sequence[Alternative], own: TensorSharding) -> tuple[Instead, ...]:
    """Returns alternatives as rows, with what would flip the choice.

    Flips are found for alternatives that are faster but do not fit, and for the first that something flips. Those that only permute axes
    are tried if there are no others. A budget flips nothing where no alternatives were weighed.
    """
    mesh, total_s, bound_s = plan.logical_mesh, plan.cost.total_s, plan.lower_bound_s
    same = [slices(row.sharding if row.axes is None else row.axes, mesh) == slices(own, mesh) for row in found]
    rows: list[Instead] = []
    for row, is_same in zip(found, same, strict=True):
        asked = row.delta_s < 0 or (not (is_same and not all(same)) and not any(one.flips for one in rows if one.extra_s > 0))
        found_flips = plan.alternatives.flips(row) if plan.alternatives is not None and asked else ()
        flips = tuple([flip_text(flip) for flip in found_flips if weighs(plan) or flip.figure != "memory_bytes"])
        split = "" if row.axes is None else sharding_text(OpSharding(row.axes)) or "nothing"
        delta_s = rounded_s(row.delta_s, total_s)
        outside = delta_s < 0 and not flips and bound_s is not None and rounded_s(total_s + delta_s - bound_s, total_s) < 0
        rows.append(Instead(row.sharding, delta_s, row.delta_bytes, split, row.num_moved, flips, is_same, outside))
    return tuple(rows)


def weighs(plan: PlanData) -> bool:
    """Returns whether what made the plan weighs one choice against another, as searches do but for propagation."""
    return plan.search_mode not in ("", "sharding_propagation")


def flip_text(flip: Flip) -> str:
    """Returns a flip as the condition under which it holds: `with links below 12.5 GB/s (now 45 GB/s)`."""
    side = "below" if flip.below else "above"
    if flip.figure == "link_bytes_per_s":
        return f"with links {side} {flip.value / 1e9:.3g} GB/s (now {(flip.now or 0) / 1e9:.3g} GB/s)"
    if flip.figure == "memory_bytes":
        now = "no budget" if flip.now is None else bytes_text(flip.now)
        what = "what is chosen no longer fits" if flip.below else "this fits"
        return f"with memory_bytes {side} {bytes_text(flip.value)} (now {now}), where {what}"
    return f"at a batch of {flip.value:.0f} (now {flip.now:.0f}): {seconds_text(-flip.delta_s)} faster there"


def _matches(text: str, pattern: str) -> bool:
    return pattern in text or fnmatchcase(text, f"*{pattern}*")


def described_tensors(plan: PlanData) -> Iterator[TensorExplanation]:
    """Explains all argument leaves without whole-step prices, which takes next to no time."""
    return _explain_tensors(plan, range(len(plan.inputs)), 0)


def _explain_tensors(plan: PlanData, indices: Sequence[int], num_priced: int) -> Iterator[TensorExplanation]:
    numbers = {plan.inputs[index].path: index for index in indices}
    touching = _ops_by_value(plan)
    for position, group in enumerate(group_tensors(plan.inputs[index] for index in indices)):
        paths = tuple(tensor.path for tensor in group.tensors)
        values = _values_of(plan, numbers[paths[0]])
        uses = tuple(_uses(plan, values, touching))
        reshards = tuple(row for row in plan.reshards if row.value in paths)
        whole_step = plan.alternatives is not None and bool(values) and position < num_priced
        if plan.alternatives is not None and whole_step:
            rows = _instead(plan, plan.alternatives.of_value(values[0]), group.first.sharding)
        else:
            rows = tuple(_first_order(plan, group.first, uses))
        yield TensorExplanation(group.pattern, paths, group.first, uses, reshards, rows, whole_step)


def _values_of(plan: PlanData, index: int) -> tuple[int, ...]:
    """Returns the argument's value, and that of the result that carries it to the next step."""
    table = plan.op_table
    if index >= len(table.inputs):
        return ()
    own = plan.inputs[index]
    _, _, carried = own.path.partition("/")
    results = list(zip(plan.outputs, table.outputs, strict=False))
    same = [value for tensor, value in results if (tensor.path, tensor.shape) == (own.path, own.shape)]
    if not same and carried:
        # A moment's path ends like its parameter's.
        alike = [(tensor, value) for tensor, value in results if (tensor.role, tensor.shape) == (own.role, own.shape)]
        same = [value for tensor, value in alike if tensor.path.endswith("/" + carried)]
    return (table.inputs[index], *same[:1])


def _ops_by_value(plan: PlanData) -> dict[int, list[int]]:
    touching: dict[int, list[int]] = {}
    for number, op in enumerate(plan.op_table.operations):
        for value in {*op.operands, *op.results}:
            touching.setdefault(value, []).append(number)
    return touching


def _uses(plan: PlanData, values: Sequence[int], touching: dict[int, list[int]]) -> Iterator[Use]:
    counts: dict[tuple[str, str, TensorSharding, bool, bool], int] = {}
    table = plan.op_table
    # A carried result is only written here: its readers are the next step's.
    visits = [(value, position > 0, False) for position, value in enumerate(values)]
    for value, writes, cast in visits:
        for number in touching.get(value, ()):
            op, axes = table.operations[number], table.choices[number].axes
            ids, dims = (op.results, op.rule.results) if writes else (op.operands, op.rule.operands)
            for own, rule_dims in zip(ids, dims, strict=True):
                if own == value:
                    key = (op.primitive, table.origins[number].source, project(rule_dims, axes), writes, cast)
                    counts[key] = counts.get(key, 0) + op.repeats
            if op.primitive in CASTS and value in op.operands and not cast and not writes:
                visits.append((op.results[0], False, True))
    return (Use(*key, num_ops) for key, num_ops in counts.items())


def _first_order(plan: PlanData, tensor: PlannedTensor, uses: Sequence[Use]) -> Iterator[Instead]:
    """Gives the whole tensor, and every single axis on every dimension that it divides, with first-order prices."""
    mesh, topology = plan.logical_mesh, PRESETS.get(plan.topology)
    if topology is None or not tensor.shape or not uses:
        return
    rank, size = len(tensor.shape), item_bytes(tensor.dtype)
    options: list[TensorSharding] = [((),) * rank]
    options += [((),) * dim + ((name,),) + ((),) * (rank - dim - 1) for dim in range(rank) for name, count in mesh.axes if count > 1]
    rows = []
    for option in options:
        if option != tensor.sharding and divides(tensor.shape, option, mesh):
            extra_s = 0.0
            for needs, writes in dict.fromkeys((use.needs, use.writes) for use in uses if not use.cast):
                for sharding, sign in ((option, 1), (tensor.sharding, -1)):
                    ends = (needs, sharding) if writes else (sharding, needs)
                    extra_s += sign * reshard_time_s(tensor.shape, size, *ends, mesh, topology)
            extra_s = rounded_s(extra_s, plan.cost.total_s)
            extra_bytes = tensor._replace(sharding=option).local_bytes(mesh) - tensor.local_bytes(mesh)
            same = slices(option, mesh) == slices(tensor.sharding, mesh)
            if not _contradicts(plan, extra_s, extra_bytes):
                rows.append(Instead(option, extra_s, extra_bytes, same_slices=same))
    yield from sorted(rows, key=lambda row: (row.extra_s, row.extra_bytes, row.sharding))


def _contradicts(plan: PlanData, extra_s: float, extra_bytes: int) -> bool:
    """Returns whether a choice that keeps to the budget would cost less than the plan's lower bound."""
    if plan.lower_bound_s is None or extra_s >= 0:
        return False
    limit = plan.memory_limit_bytes
    fits = limit is None or plan.safe_memory_bytes + extra_bytes <= limit
    return fits and rounded_s(plan.cost.total_s + extra_s - plan.lower_bound_s, plan.cost.total_s) < 0

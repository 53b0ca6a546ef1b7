"""Why a tensor or an op is split as it is: what reads it, what that costs, and what another split of it alone would cost.

For an argument with chosen sharding `c`, other sharding `a`, and the shardings `r` its readers and its writer need:

    extra seconds of a = sum over distinct r of reshard(a, r) - reshard(c, r)

with everything else as planned. It is a first-order answer: a search may move the neighbours along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from spmdctx.cost.reshard import reshard_time_s
from spmdctx.cost.topology import PRESETS
from spmdctx.ir import Collective, TensorSharding, item_bytes
from spmdctx.mesh import axes_of, divides
from spmdctx.plan.groups import by_cause, group_tensors
from spmdctx.plan.plan import Plan, PlannedOp, PlannedTensor, Reshard
from spmdctx.plan.units import TIMES, bytes_text, place_text, seconds_text, split_text, tensor_text
from spmdctx.search.transfer import project

CASTS = ("convert_element_type", "reduce_precision", "copy")
MAX_USES = 6
MAX_ALTERNATIVES = 4
MAX_OPS = 12


class Use(NamedTuple):
    """How ops at one place read (or write) a tensor: `needs` is the sharding they work on; `cast` says that they read a cast of it."""

    primitive: str
    source: str
    needs: TensorSharding
    writes: bool
    cast: bool
    num_ops: int


class Alternative(NamedTuple):
    """Another sharding of the tensor alone: seconds per step and bytes per device more than the chosen one (less if negative)."""

    sharding: TensorSharding
    extra_s: float
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """One argument, or equal ones of all layers (`paths`); alternatives come cheapest first."""

    pattern: str
    paths: tuple[str, ...]
    tensor: PlannedTensor
    uses: tuple[Use, ...]
    reshards: tuple[Reshard, ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Plan.explain` found for a pattern; false where nothing matched."""

    pattern: str
    plan: Plan
    tensors: tuple[TensorExplanation, ...]
    ops: tuple[PlannedOp, ...]
    collectives: tuple[Collective, ...]

    def __bool__(self) -> bool:
        return bool(self.tensors or self.ops)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain_plan(plan: Plan, pattern: str) -> Explanation:
    """Explains the tensors whose path matches; where none does, the ops whose name or source line does."""
    matching = [index for index, tensor in enumerate(plan.inputs) if _matches(tensor.path, pattern)]
    tensors = tuple(_explain_tensors(plan, matching))
    ops: tuple[PlannedOp, ...] = ()
    if tensors:
        places = {use.source for one in tensors for use in one.uses if use.source}
    else:
        ops = tuple(op for op in plan.ops if _matches(op.name, pattern) or _matches(op.source, pattern))
        places = {op.source for op in ops if op.source}
    collectives = tuple(row for row in plan.collectives if row.source in places)
    return Explanation(pattern, plan, tensors, ops, collectives)


def _matches(text: str, pattern: str) -> bool:
    return pattern in text or fnmatchcase(text, f"*{pattern}*")


def _explain_tensors(plan: Plan, indices: Sequence[int]) -> Iterator[TensorExplanation]:
    numbers = {plan.inputs[index].path: index for index in indices}
    touching = _ops_by_value(plan)
    for group in group_tensors(plan.inputs[index] for index in indices):
        paths = tuple(tensor.path for tensor in group.tensors)
        values = _values_of(plan, numbers[paths[0]])
        uses = tuple(_uses(plan, values, touching))
        reshards = tuple(row for row in plan.reshards if row.value in paths)
        yield TensorExplanation(group.pattern, paths, group.first, uses, reshards, tuple(_alternatives(plan, group.first, uses)))


def _values_of(plan: Plan, index: int) -> tuple[int, ...]:
    """The argument's value, and that of the result that carries it to the next step."""
    table = plan.op_table
    if index >= len(table.inputs):
        return ()
    _, _, carried = plan.inputs[index].path.partition("/")
    results = [
        number for tensor, number in zip(plan.outputs, table.outputs, strict=False) if carried and tensor.path.endswith("/" + carried)
    ]
    return (table.inputs[index], *results)


def _ops_by_value(plan: Plan) -> dict[int, list[int]]:
    touching: dict[int, list[int]] = {}
    for number, op in enumerate(plan.op_table.operations):
        for value in {*op.operands, *op.results}:
            touching.setdefault(value, []).append(number)
    return touching


def _uses(plan: Plan, values: Sequence[int], touching: dict[int, list[int]]) -> Iterator[Use]:
    counts: dict[tuple[str, str, TensorSharding, bool, bool], int] = {}
    table = plan.op_table
    # Of a carried result only the writing counts: its readers are the next step's.
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


def _alternatives(plan: Plan, tensor: PlannedTensor, uses: Sequence[Use]) -> Iterator[Alternative]:
    """Whole, and every single axis on every dimension, if it divides."""
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
            other = tensor._replace(sharding=option)
            rows.append(Alternative(option, extra_s, other.local_bytes(mesh) - tensor.local_bytes(mesh)))
    yield from sorted(rows, key=lambda row: (row.extra_s, row.extra_bytes, row.sharding))


def _lines(explanation: Explanation) -> Iterator[str]:
    if not explanation:
        yield f"Nothing in the plan matches {explanation.pattern!r}."
        some = [tensor.path for tensor in explanation.plan.inputs[:3]]
        yield f"  Patterns are parts of paths such as {', '.join(some)}, globs, op names or source lines."
        return
    for one in explanation.tensors:
        yield from _tensor_lines(one, explanation.plan)
    if explanation.ops:
        yield from _op_lines(explanation.ops)
        yield ""
    if explanation.collectives:
        yield "communication at the same places in the program"
        for group in by_cause(explanation.collectives)[:MAX_USES]:
            payload = f"{group.count} {TIMES} {group.kind} over {'+'.join(group.axes)}, {bytes_text(group.payload_bytes)}"
            yield f"  {payload}, {seconds_text(group.time_s)}: {group.cause} ({place_text(group.source)})"


def _tensor_lines(one: TensorExplanation, plan: Plan) -> Iterator[str]:
    tensor = one.tensor
    count = f"  {TIMES}{len(one.paths)}" if len(one.paths) > 1 else ""
    yield f"{one.pattern}{count}"
    local = bytes_text(tensor.local_bytes(plan.logical_mesh))
    whole = bytes_text(tensor.num_bytes)
    yield f"  chosen   {split_text(tensor.sharding)} for {tensor_text(tensor.shape, tensor.dtype)}, {local} of {whole} per device"
    yield f"  because  {tensor.reason or f'{plan.assignment.mode} found it'}"
    yield from _use_lines(one)
    for row in _distinct(one.reshards):
        yield f"  moves    {split_text(row.source_sharding)} to {split_text(row.target_sharding)} for {row.op} ({place_text(row.location)})"
    if not one.reshards:
        yield "  moves    nothing: every op takes it as it is stored"
    yield from _alternative_lines(one)
    yield ""


def _use_lines(one: TensorExplanation) -> Iterator[str]:
    for label, writes in (("read", False), ("written", True)):
        uses = [use for use in one.uses if use.writes is writes]
        for use in uses[:MAX_USES]:
            cast = ", after a cast" if use.cast else ""
            yield f"  {label:<8} as {split_text(use.needs)} by {use.primitive} ({place_text(use.source)}){cast}"
        if len(uses) > MAX_USES:
            yield f"           and by {len(uses) - MAX_USES} more"


def _alternative_lines(one: TensorExplanation) -> Iterator[str]:
    for position, row in enumerate(one.alternatives[:MAX_ALTERNATIVES]):
        label = "instead" if position == 0 else ""
        time = "as fast" if row.extra_s == 0 else f"{seconds_text(abs(row.extra_s))} {'slower' if row.extra_s > 0 else 'faster'}"
        memory = (
            "as much memory" if row.extra_bytes == 0 else f"{bytes_text(abs(row.extra_bytes))} {'more' if row.extra_bytes > 0 else 'less'}"
        )
        each = " each" if len(one.paths) > 1 else ""
        yield f"  {label:<8} {split_text(row.sharding)}: {time}, {memory} per device{each}"
    if one.alternatives:
        used = axes_of(one.tensor.sharding)
        yield f"           (with all else as planned{'' if used else ', the gain of splitting other ops along with it not counted'})"


def _distinct(reshards: Sequence[Reshard]) -> list[Reshard]:
    seen = {(row.source_sharding, row.target_sharding, row.op, row.location): row for row in reversed(reshards)}
    return list(reversed(seen.values()))[:MAX_USES]


def _op_lines(ops: Sequence[PlannedOp]) -> Iterator[str]:
    groups: dict[tuple[str, str, str, str], int] = {}
    for op in ops:
        key = (op.primitive, place_text(op.source), op.sharding, str(op.rule))
        groups[key] = groups.get(key, 0) + op.repeats
    for (primitive, place, sharding, rule), count in list(groups.items())[:MAX_OPS]:
        yield f"{primitive}  {TIMES}{count}  ({place})"
        yield f"  split    {sharding or 'nothing: every device does all of it'}"
        yield f"  rule     {rule}"
    if len(groups) > MAX_OPS:
        yield f"and {len(groups) - MAX_OPS} more kinds of op"

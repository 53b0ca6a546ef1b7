"""Checks that a plan is for this program, on this machine, in this context, and names the first things that differ.

Checks, too, that what a file holds is a plan. Its checksum tells that it is as it was written, and not that a plan was written. All that
reads a plan relies on these checks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdctx.context.options import OPTIONS
from spmdctx.errors import PlanMismatchError, shown
from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.graph import LITERAL, Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import FactorKind
from spmdctx.plan.data import PlanData, plain_option
from spmdctx.wording import bytes_text, counted, mesh_text, place_text, tensor_text
from spmdctx.wording.forms import (
    Form,
    among,
    anything,
    as_long_as,
    check_at,
    integer,
    list_of,
    number,
    number_of,
    or_none,
    parts_of,
    row_of,
    text,
)

MAX_DIFFERENCES = 4
_MOST_DEVICES = 1 << 20
SEARCH_OPTIONS = frozenset(
    {
        "search_mode",
        "sharding_propagation",
        "auto_pipeline",
        "mem_coeff",
        "fully_use_devices",
        "elementwise_op_strategy_follow",
        "tensor_slice_align_enable",
        "tensor_slice_align_size",
        "enable_algo_approxi",
        "algo_approxi_epsilon",
    }
)
"""Options that say how a search finds a plan, and nothing about the plan itself."""


LeafKind = tuple[str, tuple[int, ...], str]
"""The path, shape and dtype of one argument leaf."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The step that a plan is wanted for; `mesh` is None if any mesh of `num_devices` will do."""

    num_devices: int
    mesh: LogicalMesh | None
    topology: str
    mode: str
    options: tuple[tuple[str, Any], ...]
    memory_bytes: int | None = None


def check_plan(plan: PlanData, wanted: Wanted, graph: Graph | None, where: str) -> None:
    """Refuses a plan that was made for something else.

    Args:
        plan: the plan, from a file.
        wanted: the step that it is wanted for.
        graph: the traced step; None if only the machine and the context can be compared.
        where: name of the file, for the message.

    Raises:
        PlanMismatchError: the plan does not fit; the message names the first things that differ.
    """
    parts = {
        "program": [] if graph is None else list(program_differences(plan, graph)),
        "mesh": list(_mesh_differences(plan, wanted)),
        "topology": [] if plan.topology == wanted.topology else [f"topology: {plan.topology} in the file, {wanted.topology} here"],
        "context": list(_context_differences(plan, wanted)),
        "memory budget": list(_memory_differences(plan, wanted)),
    }
    found = [name for name, rows in parts.items() if rows]
    if found:
        raise PlanMismatchError(
            f"The plan was made for another {' and another '.join(found)}.",
            where=where,
            got=differences_text([row for rows in parts.values() for row in rows[:MAX_DIFFERENCES]]),
            fix="leave strategy_ckpt_load_file out to plan again, and save the new plan with strategy_ckpt_save_file",
        )


def differences_text(rows: Sequence[str]) -> str:
    """Returns one row per line, aligned with the label of the message that holds them."""
    return "\n         ".join(rows)


def program_differences(plan: PlanData, graph: Graph) -> Iterator[str]:
    """Gives the differences of a traced program from that of a plan: inputs, then ops, then all else."""
    if plan.fingerprint == graph.fingerprint:
        return
    here = [(value.path, value.shape, value.dtype) for value in map(graph.values.__getitem__, graph.inputs)]
    rows = list(leaf_differences([(leaf.path, leaf.shape, leaf.dtype) for leaf in plan.inputs], here))
    rows += _role_differences(plan, graph)
    yield from _counted(rows)
    op = _op_difference(plan, graph, by_size=not rows)
    if op:
        yield op
    elif not rows:
        yield (
            f"fingerprint: {plan.fingerprint[:12]} in the file, {graph.fingerprint[:12]} here; all inputs and ops have equal shapes, so "
            "it is a parameter of an op, a literal, a dtype inside of the step, a shard() strategy or a sharding constraint; or an older "
            "version of spmdctx wrote the file"
        )


def leaf_differences(saved: Iterable[LeafKind], here: Iterable[LeafKind]) -> Iterator[str]:
    """Gives the argument leaves that differ in shape or dtype, or that only one side has."""
    old = {path: (shape, dtype) for path, shape, dtype in saved}
    new = {path: (shape, dtype) for path, shape, dtype in here}
    for path, kind in old.items():
        if path in new and new[path] != kind:
            yield f"input '{path}': {tensor_text(*kind)} in the file, {tensor_text(*new[path])} here"
    gone, added = [path for path in old if path not in new], [path for path in new if path not in old]
    for path in gone:
        yield f"input '{path}' {tensor_text(*old[path])} is in the file, but not here{nearest(path, added)}"
    for path in added:
        yield f"input '{path}' {tensor_text(*new[path])} is here, but not in the file{nearest(path, gone)}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns ` (nearest: 'a', 'b')`, empty if no name is near."""
    close = difflib.get_close_matches(name, list(names), n=2, cutoff=0.6)
    return f" (nearest: {', '.join(map(repr, close))})" if close else ""


def _role_differences(plan: PlanData, graph: Graph) -> list[str]:
    roles = {graph.values[value].path: graph.values[value].role for value in graph.inputs}
    return [
        f"input '{leaf.path}': {leaf.role.value} in the file, {roles[leaf.path].value} here"
        for leaf in plan.inputs
        if leaf.path in roles and roles[leaf.path] is not leaf.role
    ]


def _op_difference(plan: PlanData, graph: Graph, *, by_size: bool) -> str:
    """Names the first op, in execution order, that is not the plan's.

    Sizes of ops are compared only `by_size`: if inputs have other sizes, those of ops say nothing new.
    """
    table = plan.op_table
    for index, (old, new) in enumerate(zip(table.operations, graph.ops, strict=False)):
        if old.primitive != new.primitive:
            kinds = (old.primitive, new.primitive)
        elif by_size and old.rule != new.rule:
            kinds = (f"{old.primitive} {old.rule}", f"{new.primitive} {new.rule}")
        elif old.repeats != new.repeats:
            kinds = (f"{old.primitive} {old.repeats} times", f"{new.primitive} {new.repeats} times")
        elif old[2:4] != new[2:4]:
            kinds = (f"{old.primitive} of {_names(old, plan)}", f"{new.primitive} of {_names(new, plan)}")
        else:
            continue
        saved, here = place_text(table.origins[index].source), place_text(graph.origins[index].source)
        return f"op {index + 1}: {kinds[0]} ({saved}) in the file, {kinds[1]} ({here}) here"
    if len(table) == len(graph.ops):
        return ""
    rest, side = (table.operations, "in the file") if len(table) > len(graph.ops) else (graph.ops, "here")
    origins = table.origins if rest is table.operations else graph.origins
    first = min(len(table), len(graph.ops))
    more = abs(len(table) - len(graph.ops))
    return f"op {first + 1}: {rest[first].primitive} ({place_text(origins[first].source)}) is only {side}, {more} ops more"


def _names(op: Op, plan: PlanData) -> str:
    paths = {value: leaf.path for value, leaf in zip(plan.op_table.inputs, plan.inputs, strict=False)}
    return ", ".join("a literal" if value == LITERAL else paths.get(value, f"value {value}") for value in op.operands)


def _mesh_differences(plan: PlanData, wanted: Wanted) -> Iterator[str]:
    mesh = plan.logical_mesh
    if wanted.mesh is None:
        if mesh.num_devices != wanted.num_devices:
            yield f"mesh: {mesh_text(mesh)} in the file, {counted(wanted.num_devices, 'device')} here"
        return
    for name, size in mesh.axes:
        if name not in wanted.mesh.sizes:
            yield f"mesh axis '{name}': {size} in the file, none of that name here (the mesh is {mesh_text(wanted.mesh)})"
        elif wanted.mesh.sizes[name] != size:
            yield f"mesh axis '{name}': {size} in the file, {wanted.mesh.sizes[name]} here"
    for name, size in wanted.mesh.axes:
        if name not in mesh.sizes:
            yield f"mesh axis '{name}': none of that name in the file, {size} here"
    if sorted(mesh.axes) == sorted(wanted.mesh.axes) and mesh.axes != wanted.mesh.axes:
        yield f"mesh: {mesh_text(mesh)} in the file, {mesh_text(wanted.mesh)} here"


def _context_differences(plan: PlanData, wanted: Wanted) -> Iterator[str]:
    if plan.mode != wanted.mode:
        yield f"parallel_mode: {plan.mode!r} in the file, {wanted.mode!r} here"
    skipped = SEARCH_OPTIONS | {"parallel_mode", "device_num"}
    # What the mode does not use is in no program.
    skipped |= {option.name for option in OPTIONS if wanted.mode not in option.modes}
    old: Mapping[str, Any] = dict(plan.options)
    new: Mapping[str, Any] = {name: plain_option(value) for name, value in wanted.options}
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in skipped and old.get(name) != new.get(name):
            texts = [repr(side[name]) if name in side else "its default" for side in (old, new)]
            yield f"{name}: {texts[0]} in the file, {texts[1]} here"


def _memory_differences(plan: PlanData, wanted: Wanted) -> Iterator[str]:
    if wanted.memory_bytes is not None and plan.safe_memory_bytes > wanted.memory_bytes:
        yield f"memory per device: the plan needs {bytes_text(plan.safe_memory_bytes)}, memory_bytes is {bytes_text(wanted.memory_bytes)}"


def _counted(rows: Sequence[str]) -> Iterator[str]:
    yield from rows[: MAX_DIFFERENCES - 1]
    if len(rows) > MAX_DIFFERENCES - 1:
        yield f"and {len(rows) - MAX_DIFFERENCES + 1} more"


def check_body(body: dict[str, Any]) -> None:
    """Refuses the content of a plan file if it is no plan.

    Raises:
        ValueError: a part has a wrong type, names a row or an axis that is not there, or parts do not fit together.
        KeyError: a part is missing.
    """
    for name in ("fingerprint", "mode", "search_mode", "topology"):
        check_at(name, text, body[name])
    check_at("mesh", list_of(row_of(text, integer(1, _MOST_DEVICES))), body["mesh"])
    axes = dict(body["mesh"])
    check_at("mesh", integer(1, _MOST_DEVICES), math.prod(axes.values()))
    check_at("options", list_of(row_of(text, _option)), body["options"])
    check_at("shardings", list_of(_sharding(axes)), body["shardings"])
    for name in ("texts", "notes"):
        check_at(name, list_of(text), body[name])
    sharding, words = number_of(body["shardings"]), number_of(body["texts"])
    check_at("values", list_of(sharding), body["values"])
    tensor = row_of(text, among([role.value for role in Role]), list_of(integer(0)), text, sharding, words)
    for name in ("inputs", "outputs"):
        check_at(name, list_of(tensor), body[name])
        for row in body[name]:
            check_at(name, as_long_as(row[2]), body["shardings"][row[4]])
    check_at("reshards", list_of(row_of(words, sharding, sharding, words, words, _seconds)), body["reshards"])
    kinds = among(COLLECTIVE_KINDS)
    check_at("collectives", list_of(row_of(kinds, _axes(axes), integer(0), _seconds, integer(0), words, words)), body["collectives"])
    check_at("gradients", list_of(row_of(text, or_none(integer(0)))), body.get("gradients", []))
    check_at("assignment", parts_of(mode=text, notes=list_of(text)), body["assignment"])
    seconds = dict.fromkeys(("compute_s", "communication_s", "total_s", "hidden_communication_s"), _seconds)
    check_at("cost", parts_of(**seconds, memory_bytes=integer(0)), body["cost"])
    check_at("memory_limit_bytes", or_none(integer(1)), body["memory_limit_bytes"])
    for name in ("lower_bound_s", "gap"):
        check_at(name, or_none(number), body[name])
    _check_ops(body, body["ops"], axes)


def _check_ops(body: dict[str, Any], ops: Any, axes: dict[str, int]) -> None:
    columns = ("primitive", "rule", "axes", "name", "source", "repeats", "flops", "operands", "results")
    check_at("ops", parts_of(**dict.fromkeys((*columns, "inputs", "outputs", "rules", "choices", "texts"), list_of(anything))), ops)
    check_at("ops texts", list_of(text), ops["texts"])
    check_at("ops rules", list_of(_rule), ops["rules"])
    check_at("ops choices", list_of(list_of(_axes(axes))), ops["choices"])
    words, value = number_of(ops["texts"]), number_of(body["values"])
    operand = integer(LITERAL, len(body["values"]) - 1)
    checks = {
        **dict.fromkeys(("primitive", "name", "source"), words),
        "rule": number_of(ops["rules"]),
        "axes": number_of(ops["choices"]),
        "repeats": integer(0),
        "flops": integer(0),
        "operands": list_of(operand),
        "results": list_of(value),
    }
    for name, check in checks.items():
        check_at(f"ops {name}", list_of(check), ops[name])
        check_at(f"ops {name}", as_long_as(ops["primitive"]), ops[name])
    for name, one in (("inputs", value), ("outputs", operand)):  # a result may be a constant
        check_at(f"ops {name}", list_of(one), ops[name])
        check_at(f"ops {name}", as_long_as(body[name]), ops[name])
    for rule, choice, operands, results in zip(*(ops[name] for name in ("rule", "axes", "operands", "results")), strict=True):
        check_at("ops axes", as_long_as(ops["rules"][rule][2]), ops["choices"][choice])
        check_at("ops operands", as_long_as(ops["rules"][rule][0]), operands)
        check_at("ops results", as_long_as(ops["rules"][rule][1]), results)
    for row, value in zip(body["inputs"], ops["inputs"], strict=True):
        check_at("ops inputs", as_long_as(row[2]), body["shardings"][body["values"][value]] if value != LITERAL else row[2])


def _seconds(value: Any) -> None:
    number(value)
    if value < 0:
        raise ValueError(f"{shown(value)} is no time")


def _option(value: Any) -> None:
    if isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            _option(part)
    elif isinstance(value, int | float):
        number(value if not isinstance(value, bool) else 0)


def _axes(known: dict[str, int]) -> Form:
    def check(value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) and name in known for name in value):
            raise ValueError(f"{shown(value)} are no axes of the mesh")
        if len(set(value)) < len(value):
            raise ValueError(f"{shown(value)} holds an axis twice")

    return check


def _sharding(axes: dict[str, int]) -> Form:
    def check(value: Any) -> None:
        list_of(_axes(axes))(value)
        _axes(axes)([name for dim in value for name in dim])

    return check


def _rule(value: Any) -> None:
    side = list_of(list_of(list_of(integer(0))))
    row_of(side, side, list_of(integer(0)), list_of(among([kind.value for kind in FactorKind])), list_of(integer(0)), text, text)(value)
    operands, results, sizes, kinds, blocked, *_ = value
    as_long_as(sizes)(kinds)
    list_of(number_of(sizes))([*blocked, *(factor for side in (operands, results) for dims in side for own in dims for factor in own)])

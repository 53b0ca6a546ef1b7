"""Reads and writes plans as files: sorted JSON whose tables hold each sharding, rule and text once, with a checksum over everything."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Protocol, TypeVar

from spmdctx.errors import PlanFormatError, shown
from spmdctx.ir.collective import Cause, Collective
from spmdctx.ir.graph import Op, Origin, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import Assignment, AxisNames, OpSharding, TensorSharding
from spmdctx.plan.data import FORMAT_VERSION, AnyPlan, Cost, OpTable, PeakNote, PlanData, PlannedGradient, PlannedTensor, Reshard
from spmdctx.plan.mindspore.file import MindSporeStrategy, is_mindspore, parse_mindspore
from spmdctx.plan.mismatch import check_body
from spmdctx.wording.files import read_file, write_file
from spmdctx.wording.text_data import read_json_text

FORMAT = "spmdctx plan"

T = TypeVar("T")


class SavedPlan(Protocol):
    """A plan of any kind that a file can hold."""

    def to_json(self) -> str:
        """Returns the text of the plan's file."""


_READERS: dict[str, Callable[[Any, str], Any]] = {}
"""What reads the files of other kinds of plans, by their format: it takes the file's body, and how errors call the file."""


def reads_format(name: str, reader: Callable[[Any, str], Any]) -> None:
    """Has files of another format read by `reader`, which takes the file's body and how errors call the file."""
    _READERS[name] = reader


class _Table(Generic[T]):
    """Distinct entries in the order of their first appearance."""

    def __init__(self, encode: Callable[[T], Any]) -> None:
        self.rows: list[Any] = []
        self._encode = encode
        self._known: dict[T, int] = {}

    def add(self, entry: T) -> int:
        number = self._known.get(entry)
        if number is None:
            number = self._known[entry] = len(self.rows)
            self.rows.append(self._encode(entry))
        return number

    def add_all(self, entries: Iterable[T]) -> list[int]:
        return [self.add(entry) for entry in entries]


def plan_json(plan: PlanData) -> str:
    """Returns the text of a plan's file."""
    body = _encode(plan)
    body["sha256"] = _checksum(body)
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def plan_state(plan: PlanData) -> dict[str, Any]:
    """Returns what a plan in another process shall have besides what its file holds: what is not about the program at hand."""
    names = {field.name for field in fields(plan)} - {field.name for field in fields(PlanData)}
    profile = None if plan.memory_profile is None else tuple(plan.memory_profile)
    return {"timing": plan.timing, "about": plan.about, "memory_profile": profile, **{name: getattr(plan, name) for name in names}}


def restored(kind: type[AnyPlan], text: str, state: Mapping[str, Any]) -> AnyPlan:
    """Returns the plan that was pickled: like one from a file, it is not planned again or certified."""
    return replace(parse_plan(text, "the pickled plan", kind), **state)


def write_plan(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Writes a plan file, and makes its folder; a reader never sees half of it.

    Raises:
        FileError: the file cannot be written; a former one is as it was.
    """
    write_file(path, plan_json(plan))


def read_plan(path: str | os.PathLike[str], kind: type[AnyPlan]) -> Any:
    """Reads a plan file, as a plan of the class `kind`, or of its own class if the file has another format.

    Raises:
        PlanFormatError: the file is no plan, is damaged, or has another format version.
        OSError: the file cannot be read.
    """
    return _any_plan_of(_read(path), os.fspath(path), kind)


def parse_any_plan(text: str | bytes, where: str, kind: type[AnyPlan]) -> Any:
    """Reads a plan as `read_plan` does, from the text of its file, which errors call `where`.

    Raises:
        PlanFormatError: the text is no plan, is damaged, or has another format version.
    """
    return _any_plan_of(_parsed(lambda: text, where), where, kind)


def _any_plan_of(body: Any, where: str, kind: type[AnyPlan]) -> Any:
    kind_of_file = body.get("format") if isinstance(body, dict) else None
    reader = _READERS.get(kind_of_file) if isinstance(kind_of_file, str) else None
    return _plan_of(body, where, kind) if reader is None else reader(body, where)


def parse_plan(text: str | bytes, where: str, kind: type[AnyPlan]) -> AnyPlan:
    """Reads a plan of the class `kind` from the text of its file, which errors call `where`.

    Raises:
        PlanFormatError: the text is no plan, is damaged, or has another format version.
    """
    return _plan_of(_parsed(lambda: text, where), where, kind)


def read_strategy(path: str | os.PathLike[str], kind: type[AnyPlan]) -> AnyPlan | MindSporeStrategy:
    """Reads a plan file, as a plan of the class `kind`, or a strategy file of MindSpore in JSON.

    The content of the file decides which it is, and not its name.

    Raises:
        PlanFormatError: the file is neither, is damaged, or has another format version.
        OSError: the file cannot be read.
    """
    where, body = os.fspath(path), _read(path)
    return parse_mindspore(body, where) if is_mindspore(body) else _plan_of(body, where, kind)


def _read(path: str | os.PathLike[str]) -> Any:
    return _parsed(lambda: read_file(path), os.fspath(path))


def _parsed(text: Callable[[], str | bytes], where: str) -> Any:
    try:
        return read_json_text(text())
    except ValueError as error:
        raise PlanFormatError(
            "The file is no plan: it does not hold JSON text.",
            where=where,
            got=str(error),
            fix="plan again and save the plan; of MindSpore's strategy files only those whose name ends in .json are JSON",
        ) from None


def _plan_of(body: Any, where: str, kind: type[AnyPlan]) -> AnyPlan:
    if is_mindspore(body):
        raise PlanFormatError(
            "The file is a strategy file of MindSpore, which holds layouts and no plan.",
            where=where,
            fix="give it as strategy_ckpt_load_file: its layouts are then pins of the step's parameters",
        )
    _check(body, where)
    try:
        check_body(body)
        return _decode(body, kind)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PlanFormatError(
            "The plan file does not have the parts of a plan.", where=where, got=f"{type(error).__name__}: {error}"
        ) from error


def _check(body: Any, where: str) -> None:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise PlanFormatError(f"The file is no plan: its format is not {FORMAT!r}.", where=where)
    version = body.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise PlanFormatError(
            "The plan file has another format version.",
            where=where,
            got=shown(version),
            need=str(FORMAT_VERSION),
            fix="make the plan again with this version of spmdctx",
        )
    known = body.pop("sha256", None)
    if known != _checksum(body):
        raise PlanFormatError(
            "The plan file is damaged: its checksum does not match what it holds.", where=where, fix="plan again and save the plan"
        )


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(plan: PlanData) -> dict[str, Any]:
    shardings: _Table[TensorSharding] = _Table(lambda sharding: sharding)
    texts: _Table[str] = _Table(str)

    def tensors(rows: Sequence[PlannedTensor]) -> list[Any]:
        return [[row.path, row.role.value, row.shape, row.dtype, shardings.add(row.sharding), texts.add(row.reason)] for row in rows]

    return {
        "format": FORMAT,
        "format_version": plan.format_version,
        "fingerprint": plan.fingerprint,
        "mode": plan.mode,
        "search_mode": plan.search_mode,
        "mesh": plan.logical_mesh.axes,
        "topology": plan.topology,
        "options": plan.options,
        "inputs": tensors(plan.inputs),
        "outputs": tensors(plan.outputs),
        "ops": _encode_ops(plan.op_table),
        "values": shardings.add_all(plan.assignment.values),
        "assignment": {"mode": plan.assignment.mode, "notes": plan.assignment.notes},
        "reshards": [
            [
                texts.add(row.value),
                shardings.add(row.source_sharding),
                shardings.add(row.target_sharding),
                texts.add(row.op),
                texts.add(row.location),
                row.time_s,
            ]
            for row in plan.reshards
        ],
        "collectives": [
            [row.kind, row.axes, row.payload_bytes, row.time_s, row.repeats, texts.add(row.cause), texts.add(row.source)]
            for row in plan.collectives
        ],
        "gradients": tuple(plan.gradients),
        "cost": plan.cost._asdict(),
        "memory_limit_bytes": plan.memory_limit_bytes,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "notes": plan.notes,
        "shardings": shardings.rows,
        "texts": texts.rows,
    }


def _encode_ops(table: OpTable) -> dict[str, Any]:
    rules: _Table[OpRule] = _Table(_encode_rule)
    choices: _Table[tuple[AxisNames, ...]] = _Table(lambda axes: axes)
    texts: _Table[str] = _Table(str)
    # Rules are shared objects; a look-up by identity first spares hashing one for each op.
    numbers = {id(op.rule): op.rule for op in table.operations}
    known = {key: rules.add(rule) for key, rule in numbers.items()}
    origins = list(table.origins)
    return {
        "primitive": texts.add_all(op.primitive for op in table.operations),
        "rule": [known[id(op.rule)] for op in table.operations],
        "axes": choices.add_all(choice.axes for choice in table.choices),
        "name": texts.add_all(origin.name for origin in origins),
        "source": texts.add_all(origin.source for origin in origins),
        "repeats": [op.repeats for op in table.operations],
        "flops": [op.flops for op in table.operations],
        "operands": [op.operands for op in table.operations],
        "results": [op.results for op in table.operations],
        "inputs": table.inputs,
        "outputs": table.outputs,
        "rules": rules.rows,
        "choices": choices.rows,
        "texts": texts.rows,
    }


def _encode_rule(rule: OpRule) -> list[Any]:
    kinds = [kind.value for kind in rule.kinds]
    return [rule.operands, rule.results, rule.sizes, kinds, sorted(rule.blocked), rule.combiner, rule.reason]


def _decode(body: dict[str, Any], kind: type[AnyPlan]) -> AnyPlan:
    shardings = [_tuples(row) for row in body["shardings"]]
    texts = body["texts"]

    def tensors(rows: list[Any]) -> tuple[PlannedTensor, ...]:
        return tuple(
            PlannedTensor(path, Role(role), tuple(shape), dtype, shardings[number], texts[reason])
            for path, role, shape, dtype, number, reason in rows
        )

    table = _decode_ops(body["ops"])
    values = tuple(shardings[number] for number in body["values"])
    causes = {number: Cause.read(texts[number]) for number in {row[5] for row in body["collectives"]}}
    return kind(
        fingerprint=body["fingerprint"],
        mode=body["mode"],
        search_mode=body["search_mode"],
        logical_mesh=LogicalMesh(_tuples(body["mesh"])),
        topology=body["topology"],
        inputs=tensors(body["inputs"]),
        outputs=tensors(body["outputs"]),
        op_table=table,
        assignment=Assignment(tuple(table.choices), values, body["assignment"]["mode"], tuple(body["assignment"]["notes"])),
        reshards=tuple(
            Reshard(texts[value], shardings[source], shardings[target], texts[op], texts[place], time_s)
            for value, source, target, op, place, time_s in body["reshards"]
        ),
        collectives=tuple(
            Collective(kind, tuple(axes), payload, time_s, repeats, causes[cause], texts[source])
            for kind, axes, payload, time_s, repeats, cause, source in body["collectives"]
        ),
        gradients=tuple(PlannedGradient(path, bucket) for path, bucket in body.get("gradients", ())),
        cost=Cost(**body["cost"]),
        options=_tuples(body["options"]),
        memory_limit_bytes=body["memory_limit_bytes"],
        lower_bound_s=body["lower_bound_s"],
        gap=body["gap"],
        notes=tuple(map(PeakNote.read, body["notes"])),
        format_version=body["format_version"],
    )


def _decode_ops(columns: dict[str, Any]) -> OpTable:
    rules = [_decode_rule(row) for row in columns["rules"]]
    choices = [OpSharding(_tuples(row)) for row in columns["choices"]]
    texts = columns["texts"]
    names = ("primitive", "operands", "results", "rule", "flops", "repeats")
    operations = tuple(
        Op(number, texts[primitive], tuple(operands), tuple(results), rules[rule], flops, repeats)
        for number, (primitive, operands, results, rule, flops, repeats) in enumerate(zip(*(columns[name] for name in names), strict=True))
    )
    origins = tuple(Origin(texts[name], texts[source]) for name, source in zip(columns["name"], columns["source"], strict=True))
    chosen = tuple(choices[number] for number in columns["axes"])
    return OpTable(operations, origins, chosen, tuple(columns["inputs"]), tuple(columns["outputs"]))


def _decode_rule(row: list[Any]) -> OpRule:
    operands, results, sizes, kinds, blocked, combiner, reason = row
    return OpRule(_tuples(operands), _tuples(results), tuple(sizes), tuple(map(FactorKind, kinds)), frozenset(blocked), combiner, reason)


def _tuples(value: Any) -> Any:
    """Returns lists as tuples, all the way down."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value

"""Checks that what a plan file holds is a plan: types, ranges, and numbers of rows that are there.

A checksum tells that a file is as it was written, and not that a plan was written. All that reads a plan relies on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from spmdctx.errors import shown
from spmdctx.ir.collective import COLLECTIVE_KINDS
from spmdctx.ir.graph import LITERAL, Role
from spmdctx.ir.rule import FactorKind

Check = Callable[[Any], object]
"""Takes a value; raises ValueError if it has no place in a plan."""

_MOST = 1 << 63
"""No count, size or number of bytes is larger."""
_MOST_S = 1e30
_MOST_DEVICES = 1 << 20


def check_body(body: dict[str, Any]) -> None:
    """Refuses the content of a plan file if it is no plan.

    Raises:
        ValueError: a part has a wrong type, names a row or an axis that is not there, or parts do not fit together.
        KeyError: a part is missing.
    """
    for name in ("fingerprint", "mode", "search_mode", "topology"):
        _at(name, text, body[name])
    _at("mesh", _list(_row(text, integer(1, _MOST_DEVICES))), body["mesh"])
    axes = dict(body["mesh"])
    _at("mesh", integer(1, _MOST_DEVICES), math.prod(axes.values()))
    _at("options", _list(_row(text, _option)), body["options"])
    _at("shardings", _list(_sharding(axes)), body["shardings"])
    for name in ("texts", "notes"):
        _at(name, _list(text), body[name])
    sharding, words = _number_of(body["shardings"]), _number_of(body["texts"])
    _at("values", _list(sharding), body["values"])
    tensor = _row(text, _among([role.value for role in Role]), _list(integer(0)), text, sharding, words)
    for name in ("inputs", "outputs"):
        _at(name, _list(tensor), body[name])
        for row in body[name]:
            _at(name, _as_long_as(row[2]), body["shardings"][row[4]])
    _at("reshards", _list(_row(words, sharding, sharding, words, words, _seconds)), body["reshards"])
    kinds = _among(COLLECTIVE_KINDS)
    _at("collectives", _list(_row(kinds, _axes(axes), integer(0), _seconds, integer(0), words, words)), body["collectives"])
    _at("gradients", _list(_row(text, _or_none(integer(0)))), body.get("gradients", []))
    _at("assignment", _parts(mode=text, notes=_list(text)), body["assignment"])
    seconds = dict.fromkeys(("compute_s", "communication_s", "total_s", "hidden_communication_s"), _seconds)
    _at("cost", _parts(**seconds, memory_bytes=integer(0)), body["cost"])
    _at("memory_limit_bytes", _or_none(integer(1)), body["memory_limit_bytes"])
    for name in ("lower_bound_s", "gap"):
        _at(name, _or_none(_number), body[name])
    _check_ops(body, body["ops"], axes)


def _check_ops(body: dict[str, Any], ops: Any, axes: dict[str, int]) -> None:
    columns = ("primitive", "rule", "axes", "name", "source", "repeats", "flops", "operands", "results")
    _at("ops", _parts(**dict.fromkeys((*columns, "inputs", "outputs", "rules", "choices", "texts"), _list(_anything))), ops)
    _at("ops texts", _list(text), ops["texts"])
    _at("ops rules", _list(_rule), ops["rules"])
    _at("ops choices", _list(_list(_axes(axes))), ops["choices"])
    words, value = _number_of(ops["texts"]), _number_of(body["values"])
    operand = integer(LITERAL, len(body["values"]) - 1)
    checks = {
        **dict.fromkeys(("primitive", "name", "source"), words),
        "rule": _number_of(ops["rules"]),
        "axes": _number_of(ops["choices"]),
        "repeats": integer(0),
        "flops": integer(0),
        "operands": _list(operand),
        "results": _list(value),
    }
    for name, check in checks.items():
        _at(f"ops {name}", _list(check), ops[name])
        _at(f"ops {name}", _as_long_as(ops["primitive"]), ops[name])
    for name in ("inputs", "outputs"):
        _at(f"ops {name}", _list(operand), ops[name])
        _at(f"ops {name}", _as_long_as(body[name]), ops[name])
    for rule, choice, operands, results in zip(*(ops[name] for name in ("rule", "axes", "operands", "results")), strict=True):
        _at("ops axes", _as_long_as(ops["rules"][rule][2]), ops["choices"][choice])
        _at("ops operands", _as_long_as(ops["rules"][rule][0]), operands)
        _at("ops results", _as_long_as(ops["rules"][rule][1]), results)
    for row, number in zip(body["inputs"], ops["inputs"], strict=True):
        _at("ops inputs", _as_long_as(row[2]), body["shardings"][body["values"][number]] if number != LITERAL else row[2])


def _at(place: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def text(value: Any) -> None:
    """Accepts a string."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")


def integer(low: int, high: int = _MOST) -> Check:
    """Makes a check that accepts an int from `low` to `high`."""

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{shown(value)} is no whole number from {low} to {high}")

    return check


def _anything(value: Any) -> None:
    pass


def _number(value: Any) -> None:
    if type(value) not in (int, float) or not -_MOST_S <= value <= _MOST_S:
        raise ValueError(f"{shown(value)} is no number in the range of a plan's")


def _seconds(value: Any) -> None:
    _number(value)
    if value < 0:
        raise ValueError(f"{shown(value)} is no time")


def _option(value: Any) -> None:
    if isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            _option(part)
    elif isinstance(value, int | float):
        _number(value if not isinstance(value, bool) else 0)


def _list(check: Check) -> Check:
    def whole(value: Any) -> None:
        if not isinstance(value, list):
            raise ValueError(f"{shown(value)} is no list")
        for part in value:
            check(part)

    return whole


def _row(*checks: Check) -> Check:
    def row(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"{shown(value)} is no row of {len(checks)} parts")
        for check, part in zip(checks, value, strict=True):
            check(part)

    return row


def _parts(**checks: Check) -> Check:
    def parts(value: Any) -> None:
        if not isinstance(value, dict) or set(value) != set(checks):
            got = shown(sorted(value)) if isinstance(value, dict) else shown(value)
            raise ValueError(f"{got}, and not the parts {', '.join(checks)}")
        for name, check in checks.items():
            _at(name, check, value[name])

    return parts


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _among(known: Sequence[object]) -> Check:
    def check(value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in known):
            raise ValueError(f"{shown(value)} is none of {', '.join(map(str, known))}")

    return check


def _number_of(rows: Sequence[Any]) -> Check:
    return integer(0, len(rows) - 1)


def _as_long_as(other: Sequence[Any]) -> Check:
    def check(value: Sequence[Any]) -> None:
        if len(value) != len(other):
            raise ValueError(f"{len(value)} entries, and not {len(other)}")

    return check


def _axes(known: dict[str, int]) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) and name in known for name in value):
            raise ValueError(f"{shown(value)} are no axes of the mesh")
        if len(set(value)) < len(value):
            raise ValueError(f"{shown(value)} holds an axis twice")

    return check


def _sharding(axes: dict[str, int]) -> Check:
    def check(value: Any) -> None:
        _list(_axes(axes))(value)
        _axes(axes)([name for dim in value for name in dim])

    return check


def _rule(value: Any) -> None:
    side = _list(_list(_list(integer(0))))
    _row(side, side, _list(integer(0)), _list(_among([kind.value for kind in FactorKind])), _list(integer(0)), text, text)(value)
    operands, results, sizes, kinds, blocked, *_ = value
    _as_long_as(sizes)(kinds)
    _list(_number_of(sizes))([*blocked, *(factor for side in (operands, results) for dims in side for own in dims for factor in own)])

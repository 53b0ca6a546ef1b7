"""Checks of `shard()` strategies against their tensors, their op and the devices; every error proposes a strategy that fits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmdctx.errors import StrategyError
from spmdctx.ir.graph import LITERAL, Mark, Op
from spmdctx.ir.layout import FREE, Layout, fitting_strategy
from spmdctx.search.setup.regions import Links, base_side

_REGION_SCOPE = re.compile(r"shard\d*:")
"""The text with which a region begins in name scopes."""


def check_mark(links: Links, members: Sequence[Mark], mark: Mark, op: Op | None, num_devices: int) -> None:
    """Checks one strategy against the shape of its tensor and the number of devices.

    Args:
        links: of the graph.
        members: all marks of the region.
        mark: the mark to check.
        op: the op that is all of the region, if it is one.
        num_devices: devices of the mesh.

    Raises:
        StrategyError: the rank differs, a dimension does not divide, or the slices do not divide the devices.
    """
    if mark.strategy is None:
        return
    shape = links.graph.values[mark.value].shape
    slices = _slices(mark)
    if len(slices) != len(shape):
        raise _error(links, members, mark, f"{_verb(mark)} has {_entries(len(slices))}, but the tensor has {len(shape)} dimensions.")
    fault = ""
    for dim, (size, number) in enumerate(zip(shape, slices, strict=True)):
        if number and size % number:
            fault = fault or f"splits dimension {dim} into {number} slices, but its size {size} is not divisible by {number}."
    product = math.prod(mark.strategy.device_matrix if isinstance(mark.strategy, Layout) else [number for number in slices if number])
    if not fault and num_devices % product:
        fault = f"needs {product} devices, which {num_devices} devices are no multiple of."
    if fault:
        fixes = {mark.position: fitting_strategy(shape, slices, num_devices)}
        if op is not None and base_side(mark) == "in":
            fixes = _fitting_op(op, members, num_devices)
        raise _error(links, members, mark, f"{_verb(mark)} {fault}", fixes)


def check_single_op(links: Links, members: Sequence[Mark], op: Op, num_devices: int) -> None:
    """Checks MindSpore's rules for a region of one op: operands agree on shared dimensions, and all slices fit at once.

    Raises:
        StrategyError: two operands disagree, or the device matrix does not divide the devices.
    """
    chosen: dict[int, _FactorSplit] = {}
    for item in _splits(op, members):
        known = chosen.setdefault(item.factor, item)
        if known.slices != item.slices:
            whose = f"dimension {known.dim} of operand {known.mark.position}, which has {known.slices}"
            fault = f"splits dimension {item.dim} into {item.slices} slices, but it belongs to {whose}."
            raise _error(links, members, item.mark, f"{_verb(item.mark)} {fault}", _fitting_op(op, members, num_devices))
    matrix = [item.slices for item in chosen.values()]
    if num_devices % math.prod(matrix):
        fault = f"in_strategy needs {math.prod(matrix)} devices as device matrix {matrix}, which {num_devices} devices are no multiple of."
        first = next(iter(chosen.values())).mark
        raise _error(links, members, first, fault, _fitting_op(op, members, num_devices))


class _FactorSplit(NamedTuple):
    """The part of a strategy that splits one factor of an op."""

    factor: int
    slices: int
    mark: Mark
    dim: int


def _splits(op: Op, members: Sequence[Mark]) -> list[_FactorSplit]:
    """Reads the splits of an op's factors from the strategies of its operands, operand by operand."""
    by_value = {mark.value: mark for mark in members if mark.side == "in"}
    found = []
    for value, dims in zip(op.operands, op.rule.operands, strict=True):
        if value == LITERAL:
            continue
        for dim, (factors, slices) in enumerate(zip(dims, _slices(by_value[value]), strict=False)):
            if factors and slices != FREE:
                found.append(_FactorSplit(factors[0], slices, by_value[value], dim))
    return found


def _fitting_op(op: Op, members: Sequence[Mark], num_devices: int) -> dict[int, tuple[int, ...]]:
    """Returns strategies that fit the op and the devices, by operand.

    The first operand that names a factor decides its split.
    """
    splits = _splits(op, members)
    wanted = {item.factor: item.slices for item in reversed(splits)}
    fitting = dict(
        zip(wanted, fitting_strategy([op.rule.sizes[factor] for factor in wanted], list(wanted.values()), num_devices), strict=True)
    )
    result = {mark.position: list(_slices(mark)) for mark in members if mark.side == "in" and mark.strategy is not None}
    for item in splits:
        result[item.mark.position][item.dim] = fitting[item.factor]
    return {index: tuple(slices) for index, slices in result.items()}


def _slices(mark: Mark) -> tuple[int, ...]:
    if isinstance(mark.strategy, Layout):
        return mark.strategy.strategy
    return mark.strategy if isinstance(mark.strategy, tuple) else ()


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _verb(mark: Mark) -> str:
    """Returns the words with which a message begins."""
    side = base_side(mark)
    if side == "parameter":
        return f"parameter_plan of '{mark.label.partition('/')[2]}'"
    return f"in_strategy of operand {mark.position}" if side == "in" else f"out_strategy of result {mark.position}"


def _error(
    links: Links, members: Sequence[Mark], mark: Mark, fault: str, fixes: Mapping[int, tuple[int, ...]] | None = None
) -> StrategyError:
    """Builds the error: it names the op, the strategy it got, and the same argument with the entries of `fixes` put in."""
    side = base_side(mark)
    own = {member.position: member for member in reversed(members) if base_side(member) == side}
    if side == "parameter":
        own = {mark.position: mark}
    texts = {index: strategy_text(own[index].strategy) for index in sorted(own)}
    shapes = " and ".join(str(links.graph.values[own[index].value].shape) for index in texts)
    fixed = {**texts, **{index: str(entry) for index, entry in (fixes or {}).items()}}
    return StrategyError(
        fault,
        where=_where(links, mark),
        got=f"{_argument(side, texts)}, shape{'s' if len(texts) > 1 else ''} {shapes}",
        fix=f"use {_argument(side, fixed)}" if fixes else "",
    )


def _argument(side: str, texts: Mapping[int, str]) -> str:
    if side == "parameter":
        return "".join(texts.values())
    return f"{side}_strategy ({', '.join(texts.values())}{',' if len(texts) == 1 else ''})"


def strategy_text(strategy: object) -> str:
    """Writes a strategy as messages show it: `(1, 2, 4)`, `Layout(2, 4)(None, h, w)`."""
    if isinstance(strategy, Layout):
        dims = ", ".join("None" if not dim else "+".join(dim) for dim in strategy.alias_tensor_map or ())
        return f"Layout{strategy.device_matrix}({dims})"
    return str(strategy)


def _where(links: Links, mark: Mark) -> str:
    op = links.reader(mark)
    if op is None and mark.op < 0:
        return f"'{links.graph.values[mark.value].path}'"
    origin = links.graph.origins[op.id if op is not None else mark.op]
    name = _REGION_SCOPE.sub("", origin.name) or mark.label
    source = f" ({origin.source})" if origin.source else ""
    return f"{op.primitive if op is not None else 'shard'} '{name}'{source}"

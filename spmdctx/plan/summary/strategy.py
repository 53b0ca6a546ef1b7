"""Finds out what the axes of a plan's mesh are for: rows of the batch, parts of weights, or storage alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import NamedTuple, Protocol

from spmdctx.ir.collective import Collective
from spmdctx.ir.graph import Role
from spmdctx.ir.primitives import LOOKED_UP, MATRIX_PRODUCTS
from spmdctx.ir.rule import DimFactors
from spmdctx.ir.sharding import OpSharding, TensorSharding
from spmdctx.plan.data import OpTable, PlannedTensor
from spmdctx.plan.summary.flow import Origin, Walk, Walked, input_dims


class Part(StrEnum):
    """The dimension by which the first op that reads a parameter splits it."""

    OUTPUT = auto()
    """The output features of a product, or of a look-up."""
    INPUT = auto()
    """The input features of a product."""
    VOCABULARY = auto()
    """The rows of a table that is looked up."""
    EXPERT = auto()
    """A dimension of independent products."""


@dataclass
class Weight:
    """A parameter that a product or a look-up reads.

    Attributes:
        path: its path.
        num_bytes: of the whole.
        is_table: whether it is looked up before anything else.
        parts: the axes that split it where it is first read, by what they split.
        stored: the axes that split it in memory alone.
    """

    path: str
    num_bytes: int
    is_table: bool = False
    parts: dict[Part, tuple[str, ...]] = field(default_factory=dict)
    stored: tuple[str, ...] = ()


class Kept(NamedTuple):
    """How arrays lie in memory.

    Attributes:
        num_bytes: of the whole arrays.
        ways: the bytes of those that axes of the batch split in memory alone, by these axes.
    """

    num_bytes: int
    ways: Mapping[tuple[str, ...], int]

    @property
    def split(self) -> int:
        """The bytes that some axis splits."""
        return sum(self.ways.values())


@dataclass(frozen=True)
class Strategy:
    """What the axes of a mesh are for in one step.

    Attributes:
        shares: for each axis, the share of the products' work that it splits by each origin.
        weights: the parameters that products and look-ups read.
        rows: the axes that split the rows of the batch.
        beside: the axes that split other dimensions of the batch where it is stored, by what they count.
        parameters, states: of each parameter, by path, how it and its optimizer state lie in memory, where some axis of the batch does
            not split them where they are used.
        gradients: the share of the bytes of sums over the batch that leave a device a part of the sum.
    """

    shares: Mapping[str, Mapping[Origin, float]]
    weights: tuple[Weight, ...]
    rows: tuple[str, ...]
    beside: Mapping[Origin, tuple[str, ...]]
    parameters: Mapping[str, Kept]
    states: Mapping[str, Kept]
    gradients: float


_MOST = 0.5
"""The share of the work from which an axis counts as one of the batch."""


def strategy_of(
    sizes: Mapping[str, int], inputs: Sequence[PlannedTensor], tables: Iterable[OpTable], collectives: Sequence[Collective]
) -> Strategy:
    """Returns what the axes of a mesh are for.

    Args:
        sizes: of the axes, by name, in the order of the mesh.
        inputs: the arguments of the step, in the sharding in which they are stored.
        tables: the ops of the step, or of each of its parts.
        collectives: planned communication.
    """
    # An axis of size 1 splits nothing, whatever a sharding names.
    names = [name for name, size in sizes.items() if size > 1]
    work: dict[str, dict[Origin, float]] = {name: defaultdict(float) for name in names}
    found: dict[int, Weight] = {}
    total = 0.0
    for table in tables:
        for walked in Walk(inputs, table):
            choice = table.choices[walked.op.id]
            if walked.op.primitive in MATRIX_PRODUCTS:
                flops = float(walked.op.flops * walked.op.repeats)
                total += flops
                _count(walked, choice, flops, work)
            _note_weights(walked, choice, inputs, found, names)
    shares = {name: {origin: part / total for origin, part in own.items()} for name, own in work.items()} if total else {}
    stored = _stored(inputs, names)
    rows = tuple(name for name in names if shares.get(name, {}).get(Origin.ROWS, 0.0) >= _MOST) or stored.pop(Origin.ROWS, ())
    for number, weight in found.items():
        used = {axis for axes in weight.parts.values() for axis in axes}
        weight.stored = tuple(axis for dim in inputs[number].sharding for axis in dim if axis not in used and axis in names)
    return Strategy(shares, tuple(found.values()), rows, stored, *_zero(inputs, found, rows), _scattered(collectives, rows))


def _count(walked: Walked, choice: OpSharding, flops: float, work: dict[str, dict[Origin, float]]) -> None:
    for origin, axes in zip(walked.origins, choice.axes, strict=True):
        for axis in axes:
            if origin is not None and axis in work:
                work[axis][origin] += flops


def _note_weights(
    walked: Walked, choice: OpSharding, inputs: Sequence[PlannedTensor], found: dict[int, Weight], names: Collection[str]
) -> None:
    """Notes how an op splits the parameters that it is the first to read."""
    op = walked.op
    if op.primitive not in MATRIX_PRODUCTS and op.primitive != LOOKED_UP:
        return
    for position, own in enumerate(walked.operands):
        if own.weight is None or own.weight in found or (op.primitive == LOOKED_UP and position):
            continue
        tensor = inputs[own.weight]
        weight = found[own.weight] = Weight(tensor.path, tensor.num_bytes, op.primitive == LOOKED_UP)
        for part, axes in _parts(walked, choice, position):
            own_axes = [axis for axis in axes if axis in names]
            if own_axes:
                weight.parts[part] = tuple(dict.fromkeys((*weight.parts.get(part, ()), *own_axes)))


def _parts(walked: Walked, choice: OpSharding, position: int) -> Iterator[tuple[Part, tuple[str, ...]]]:
    rule, is_table = walked.op.rule, walked.op.primitive == LOOKED_UP
    others = _all_factors(dims for number, dims in enumerate(rule.operands) if number != position)
    kept = _all_factors(rule.results)
    for factor in sorted(_all_factors([rule.operands[position]])):
        axes = choice.axes[factor]
        if axes and factor not in kept:
            yield Part.VOCABULARY if is_table else Part.INPUT, axes
        elif axes:
            yield Part.EXPERT if factor in others else Part.OUTPUT, axes


def _all_factors(tensors: Iterable[Sequence[DimFactors]]) -> Collection[int]:
    return {factor for dims in tensors for own in dims for factor in own}


def _stored(inputs: Sequence[PlannedTensor], names: Sequence[str]) -> dict[Origin, tuple[str, ...]]:
    """Returns the axes that split dimensions of the batch as it is stored, by what they count."""
    found: dict[Origin, set[str]] = {}
    for tensor in inputs:
        if tensor.role is Role.BATCH:
            for atoms, axes in zip(input_dims(tensor), tensor.sharding, strict=True):
                if axes and atoms[0][0] is not None:
                    found.setdefault(atoms[0][0], set()).update(axes)
    return {origin: tuple(name for name in names if name in axes) for origin, axes in found.items()}


def _zero(
    inputs: Sequence[PlannedTensor], weights: Mapping[int, Weight], rows: Collection[str]
) -> tuple[Mapping[str, Kept], Mapping[str, Kept]]:
    """Returns how parameters and their optimizer state lie in memory, where axes of the batch could split them in memory alone."""
    used = {
        inputs[number].path: {axis for part in weight.parts.values() for axis in part if axis in rows} for number, weight in weights.items()
    }
    shapes: dict[tuple[int, ...], str] = {}
    for number in weights:
        shapes.setdefault(inputs[number].shape, inputs[number].path)
    found: dict[Role, dict[str, Kept]] = {Role.PARAMETER: {}, Role.OPTIMIZER: {}}
    for tensor in inputs:
        if tensor.role not in found or not tensor.shape:
            continue
        path = tensor.path if tensor.role is Role.PARAMETER else _parameter_of(tensor, used, shapes)
        free = [axis for axis in rows if axis not in used.get(path, ())]
        if free:
            found[tensor.role][path] = kept(tensor, free, found[tensor.role].get(path))
    return found[Role.PARAMETER], found[Role.OPTIMIZER]


class _Leaf(Protocol):
    @property
    def num_bytes(self) -> int: ...
    @property
    def sharding(self) -> TensorSharding: ...


def kept(leaf: _Leaf, free: Sequence[str], before: Kept | None = None) -> Kept:
    """Returns how an array lies in memory by those of the axes `free` that split it, together with what was found `before`."""
    num_bytes, ways = before or Kept(0, {})
    own = {axis for dim in leaf.sharding for axis in dim}
    axes = tuple(axis for axis in free if axis in own)
    more = {axes: ways.get(axes, 0) + leaf.num_bytes} if axes else {}
    return Kept(num_bytes + leaf.num_bytes, {**ways, **more})


def _parameter_of(tensor: PlannedTensor, known: Mapping[str, object], shapes: Mapping[tuple[int, ...], str]) -> str:
    """Returns the path of the parameter to which a leaf of the optimizer's state belongs, by the end of its path, else by its shape."""
    parts = tensor.path.split("/")
    for path in known:
        own = path.split("/")
        if len(own) > 1 and own[1:] == parts[-len(own) + 1 :]:
            return path
    return shapes.get(tensor.shape, tensor.path)


def _scattered(collectives: Sequence[Collective], rows: Collection[str]) -> float:
    """Returns the share of bytes of the sums over the batch that leave each device a part of the sum."""
    sums = {"reduce_scatter": 0, "all_reduce": 0}
    for row in collectives:
        if row.kind in sums and row.axes and set(row.axes) <= set(rows):
            sums[row.kind] += row.payload_bytes * row.repeats
    return sums["reduce_scatter"] / total if (total := sum(sums.values())) else 0.0


def slices(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns into how many parts some axes split."""
    return math.prod(sizes[axis] for axis in axes)

"""Follows dimensions of the batch and of parameters through the ops of a plan, which needs no shapes besides those in the rules.

A dimension is a list of atoms, major first: pieces of one origin. Ops that join or cut dimensions, such as a reshape, join and cut atoms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Op, Role
from spmdctx.ir.primitives import SCAN_ENTER
from spmdctx.ir.rule import DimFactors, OpRule
from spmdctx.plan.data import OpTable, PlannedTensor


class Origin(Enum):
    """What a dimension counts."""

    ROWS = auto()
    """The samples of a batch."""
    SEQUENCE = auto()
    SPACE = auto()
    """Height and width, and what else lies beside the samples of a batch of four dimensions or more."""
    FEATURES = auto()
    """A dimension of a parameter, or the last one of a batch of numbers."""


_OF_BATCH = (Origin.ROWS, Origin.SEQUENCE, Origin.SPACE)

Atoms = tuple[tuple[Origin | None, int], ...]
"""The pieces of a dimension or factor, major first, and their sizes."""

Tensor = tuple[Atoms, ...]


class Flow(NamedTuple):
    """What reaches a value.

    Attributes:
        dims: the atoms of its dimensions.
        weight: the number of the only parameter that it is made of, None if there is none, or more, or any of the batch.
        is_data: whether some of the batch reaches it.
    """

    dims: Tensor
    weight: int | None
    is_data: bool


_NOTHING = Flow((), None, False)


class Walked(NamedTuple):
    """An op with what its factors count, and what reaches its operands."""

    op: Op
    origins: tuple[Origin | None, ...]
    operands: tuple[Flow, ...]


class Walk:
    """Goes through the ops of a plan in the order in which they run."""

    def __init__(self, inputs: Sequence[PlannedTensor], table: OpTable) -> None:
        self._table = table
        self._known: dict[tuple[object, ...], tuple[tuple[Atoms, ...], tuple[Tensor, ...]]] = {}
        stacked = set(_stacked(table))
        self._flows: dict[int, Flow] = {
            value: Flow(input_dims(tensor, value in stacked), number if tensor.role is Role.PARAMETER else None, tensor.role is Role.BATCH)
            for number, (tensor, value) in enumerate(zip(inputs, table.inputs, strict=False))
        }

    def __iter__(self) -> Iterator[Walked]:
        flows = self._flows
        for op in self._table.operations:
            operands = tuple([flows.get(value, _NOTHING) for value in op.operands])
            factors, results = self._through(op.rule, operands)
            weights = {own.weight for value, own in zip(op.operands, operands, strict=True) if value != LITERAL and own is not _NOTHING}
            is_data = any(own.is_data for own in operands)
            weight = weights.pop() if len(weights) == 1 and not is_data else None
            for value, dims in zip(op.results, results, strict=True):
                flows[value] = Flow(dims, weight, is_data)
            yield Walked(op, tuple([_main(atoms) for atoms in factors]), operands)

    def _through(self, rule: OpRule, operands: Sequence[Flow]) -> tuple[tuple[Atoms, ...], tuple[Tensor, ...]]:
        key = (id(rule), *[own.dims for own in operands])
        known = self._known.get(key)
        if known is None:
            factors = _factors(rule, [own.dims for own in operands])
            results = tuple(tuple(tuple(atom for one in dim for atom in factors[one]) for dim in dims) for dims in rule.results)
            known = self._known[key] = tuple(factors), results
        return known


def _factors(rule: OpRule, operands: Sequence[Tensor]) -> list[Atoms]:
    """Returns what each factor of an op is made of; what comes from the batch goes first."""
    found: list[Atoms] = [((None, size),) for size in rule.sizes]
    for dims, own in zip(rule.operands, operands, strict=True):
        for factors, atoms in zip(dims, own, strict=False):
            for factor, piece in _cut(factors, atoms, rule.sizes).items():
                if _weight(piece) > _weight(found[factor]):
                    found[factor] = piece
    return found


def _cut(factors: DimFactors, atoms: Atoms, sizes: Sequence[int]) -> Mapping[int, Atoms]:
    """Returns the piece of a dimension that each of its factors is."""
    if len(factors) == 1:
        return {factors[0]: atoms}
    left, pieces = list(atoms), dict[int, Atoms]()
    for factor in factors:
        need, own = sizes[factor], list[tuple[Origin | None, int]]()
        while need > 1 and left:
            origin, size = left.pop(0)
            taken = min(size, need)
            own.append((origin, taken))
            need //= taken
            if size > taken:
                left.insert(0, (origin, size // taken))
        pieces[factor] = tuple(own)
    return pieces


def _main(atoms: Atoms) -> Origin | None:
    return next((origin for origin, _ in atoms if origin is not None), None)


def _weight(atoms: Atoms) -> int:
    main = _main(atoms)
    return 0 if main is None else 2 if main in _OF_BATCH else 1


def input_dims(tensor: PlannedTensor, is_stacked: bool = False) -> Tensor:
    """Returns what the dimensions of an argument count; `is_stacked` if a loop takes one slice of it after the other."""
    if tensor.role is Role.PARAMETER:
        origins: list[Origin | None] = [Origin.FEATURES] * len(tensor.shape)
    elif tensor.role is Role.BATCH:
        rank = len(tensor.shape) - is_stacked
        whole = tensor.dtype.startswith(("int", "uint"))
        origins = [None] * is_stacked
        origins += [Origin.ROWS, *[Origin.SEQUENCE if rank < 4 or whole else Origin.SPACE] * (rank - 1)] if rank > 0 else []
        if rank > 1 and not whole:
            origins[-1] = Origin.FEATURES
    else:
        origins = [None] * len(tensor.shape)
    return tuple(((origin, size),) for origin, size in zip(origins, tensor.shape, strict=True))


def _stacked(table: OpTable) -> Iterator[int]:
    """Gives inputs of which a loop takes one slice of the first dimension after the other."""
    inputs = set(table.inputs)
    for op in table.operations:
        if op.primitive == SCAN_ENTER:
            for value, before, after in zip(op.operands, op.rule.operands, op.rule.results, strict=False):
                if value in inputs and len(before) == len(after) + 1:
                    yield value

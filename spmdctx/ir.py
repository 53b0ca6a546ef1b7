"""The device-free program graph: values, ops, their sharding rules, and shardings. Data only: no mesh, no cost, no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from itertools import takewhile
from typing import Any, NamedTuple

AxisNames = tuple[str, ...]
"""Mesh axes that split one dimension or factor, major first."""

TensorSharding = tuple[AxisNames, ...]
"""Axes per dimension; always as long as the tensor's rank."""

DimFactors = tuple[int, ...]
"""Factors that make up one dimension, major first; empty where the dimension takes no part (size 1, or broadcast)."""

LITERAL = -1
"""Stands in `Op.operands` for a scalar literal, which is no value of the graph."""

_ITEM_BYTES = {
    "bool": 1,
    "int4": 1,
    "uint4": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element; PRNG keys count as their two uint32 words, float8 variants as one byte."""
    known = _ITEM_BYTES.get(dtype)
    if known is not None:
        return known
    if dtype.startswith("float8") or dtype.startswith("float4"):
        return 1
    return 8 if dtype.startswith("key") else 4


class FactorKind(StrEnum):
    """What splitting a factor of an op's iteration space means (Shardy's four kinds)."""

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    NEED_REPLICATION = "need_replication"
    PERMUTATION = "permutation"


@dataclass(frozen=True, slots=True)
class OpRule:
    """Which dimensions of an op's operands and results belong together.

    `operands[i][d]` and `results[i][d]` list the factors of dimension `d`, major first. `sizes` and `kinds` are per
    factor. A `blocked` factor keeps dimensions related, but is never split (the touched dimension of a slice, say).
    `combiner` is how partial results of a reduction factor combine. `reason` says why nothing can be split, if so.
    """

    operands: tuple[tuple[DimFactors, ...], ...]
    results: tuple[tuple[DimFactors, ...], ...]
    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    blocked: frozenset[int] = frozenset()
    combiner: str = "add"
    reason: str = ""

    @property
    def splittable(self) -> tuple[bool, ...]:
        """Per factor: whether mesh axes may split it at all."""
        return tuple(
            size > 1 and index not in self.blocked and kind in (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)
            for index, (size, kind) in enumerate(zip(self.sizes, self.kinds, strict=True))
        )

    def __str__(self) -> str:
        names = [factor_name(index) for index in range(len(self.sizes))]
        sides = [_side_text(side, names) for side in (self.operands, self.results)]
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=True))
        text = f"{sides[0]}->{sides[1]} {{{sizes}}}"
        for kind in (FactorKind.REDUCTION, FactorKind.NEED_REPLICATION, FactorKind.PERMUTATION):
            members = [name for name, own in zip(names, self.kinds, strict=True) if own is kind]
            if members:
                text += f" {kind.value}={{{', '.join(members)}}}"
        if self.blocked:
            text += f" blocked_propagation={{{', '.join(names[index] for index in sorted(self.blocked))}}}"
        return text


def factor_name(index: int) -> str:
    """Shardy's names: i, j, k, ... z, then z_1, z_2, ..."""
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"


def _side_text(side: tuple[tuple[DimFactors, ...], ...], names: list[str]) -> str:
    tensors = []
    for dims in side:
        parts = []
        for factors in dims:
            text = " ".join(names[index] for index in factors)
            parts.append(f"({text})" if len(factors) > 1 else text or "1")
        tensors.append(f"[{', '.join(parts)}]")
    return f"({', '.join(tensors)})"


class Role(StrEnum):
    """What a value is to the step."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    STATE = "state"
    BATCH = "batch"
    KEY = "key"
    ARGUMENT = "argument"
    CONSTANT = "constant"
    INTERMEDIATE = "intermediate"


class Value(NamedTuple):
    """One tensor of the program; `shape` is global. `path` names arguments, results and constants."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    role: Role
    path: str


class Work(NamedTuple):
    """What the fusion around an op does, unsplit: bytes moved per element of each operand, then result, and vector operations.

    Of an op inside another's fusion `moved` is empty, and `vector_flops` what is left of its price.
    """

    moved: tuple[float, ...]
    vector_flops: float


class Op(NamedTuple):
    """One equation of the program, or one boundary of a control-flow body (primitive `scan.enter`, `scan.next`, ...).

    `operands` holds value ids, `LITERAL` for scalar literals. `repeats` counts executions in one step. `pinned` gives the
    sharding the user fixed per result, None for those that are free. `fused` has a bit per operand, then per result, set
    where the tensor is literal, computed inside a fusion and never in memory, or read or made by the fusion before. `work` is
    that of its fusion, None where the op is priced on its own.
    """

    id: int
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: OpRule
    flops: int
    repeats: int
    pinned: tuple[TensorSharding | None, ...] | None = None
    fused: int = 0
    work: Work | None = None


class Mark(NamedTuple):
    """One `shard()` marker in the graph: the identity op that stands for it and the value it marks (the op's result).

    `side` is "in", "out" or "parameter", with "_grad" appended on the cotangent's marker. `position` counts the region's
    flattened arguments or results. `strategy` is None (free), a tuple of slices per dimension, or a Layout.
    """

    op: int
    value: int
    region: int
    side: str
    position: int
    strategy: object
    label: str


_FUSION = "~fusion"


def fusion_scope(fusion: int) -> str:
    """What a region's name scope ends in where `shard(fusion=)` gives its gradients a bucket of their own."""
    return f"{_FUSION}{fusion}" if fusion else ""


class Origin(NamedTuple):
    """Where an op comes from: its name scope and `file.py:line`."""

    name: str
    source: str

    @property
    def fusion(self) -> int:
        """The number of the innermost `shard(fusion=)` around the op, 0 where there is none."""
        digits = self.name.rpartition(_FUSION)[2] if _FUSION in self.name else ""
        return int("".join(takewhile(str.isdigit, digits)) or 0)


@dataclass(frozen=True)
class Graph:
    """A traced step. Every value has at most one producing op; ops are in execution order.

    `ties` are pairs of values that must have one sharding (loop carries, carried training state). `origins` is indexed by
    op id and may compute its entries when asked.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    origins: Sequence[Origin]
    fingerprint: str
    notes: tuple[str, ...] = ()

    @cached_property
    def producers(self) -> dict[int, int]:
        """Value id to the id of the op that makes it."""
        return {value: op.id for op in self.ops for value in op.results}

    @cached_property
    def kinds(self) -> list[int]:
        """Per op a number that it shares with the ops of the same rule, primitive, types, FLOPs, `fused` and `work`."""
        dtypes = [value.dtype for value in self.values]
        dtypes.append("")  # that of literals
        dtype, numbers = dtypes.__getitem__, dict[tuple[object, ...], int]()
        # Equal rules and works are one object as a rule, and so spare hashing what they hold.
        keys = [
            (id(rule), primitive, flops, fused, id(work), *map(dtype, operands), *map(dtype, results))
            for _, primitive, operands, results, rule, flops, _, _, fused, work in self.ops
        ]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def readers(self) -> tuple[tuple[Op, ...], ...]:
        """Per value the ops that read it, one that reads it twice twice."""
        found: list[list[Op]] = [[] for _ in range(len(self.values) + 1)]
        for op in self.ops:
            for value in op.operands:
                found[value].append(op)
        return tuple(map(tuple, found[:-1]))

    @cached_property
    def facts(self) -> dict[object, Any]:
        """What was worked out of the graph alone and is asked for again, by a key of whoever works it out."""
        return {}


@dataclass(frozen=True, slots=True)
class OpSharding:
    """Axes per factor of the op's rule, major first."""

    axes: tuple[AxisNames, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a search decides: an OpSharding per op, the sharding each value is stored in, and the mode that found it."""

    ops: tuple[OpSharding, ...]
    values: tuple[TensorSharding, ...]
    mode: str
    notes: tuple[str, ...] = field(default=())


LOSS_REDUCTION = "joined by value_and_grad"
"""The cause of collectives that join what devices computed by losses of their own."""

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """One planned or compiled collective.

    `payload_bytes` is per device and per execution: the operand of an all_reduce, reduce_scatter, all_to_all or
    collective_permute, the result of an all_gather. `time_s` is one execution's; `repeats` counts executions in a step.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    time_s: float
    repeats: int
    cause: str
    source: str = ""

"""The device-free program graph: values, ops, their sharding rules, and shardings. Data only: no mesh, no cost, no JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from spmdctx.ir.primitives import BOUNDARY_OF, Boundary
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import TensorSharding

LITERAL = -1
"""Stands in `Op.operands` for a scalar literal, which is no value of the graph."""

_ITEM_BYTES = {
    "bool": 1,
    "int2": 1,
    "uint2": 1,
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

NARROW_FLOATS = ("float8_", "float6_", "float4_")
"""How the names of floating types begin that take a byte or less."""

LOW = frozenset({"bfloat16", "float16"})
"""Types of low precision, whose sums are less exact than those of float32."""


@cache
def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element; PRNG keys count as their uint32 words, two or (`rbg`) four, `NARROW_FLOATS` as one byte."""
    known = _ITEM_BYTES.get(dtype)
    if known is not None:
        return known
    if dtype.startswith(NARROW_FLOATS):
        return 1
    if dtype.startswith("key"):
        return 16 if dtype.endswith("rbg>") else 8
    return 4


class Role(StrEnum):
    """The role of a value in the step."""

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

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype)


class Work(NamedTuple):
    """The work of the fusion around an op, unsplit: bytes moved per element of each operand, then result, and vector operations.

    For an op inside the fusion of another, `moved` is empty, and `vector_flops` is the part of its price that remains.
    `passing` are those of `moved` whose tensors live for few ops, `again` others, which an earlier fusion has read: a place among the
    operands and results with the bytes per element there, for each tensor.
    """

    moved: tuple[float, ...]
    vector_flops: float
    passing: tuple[tuple[int, float], ...] = ()
    again: tuple[tuple[int, float], ...] = ()


class Op(NamedTuple):
    """One equation of the program, or one boundary of a control-flow body (`boundary`).

    `operands` holds value ids, `LITERAL` for scalar literals. `repeats` counts executions in one step. `pinned` gives the
    sharding that the user fixed for each result, None for those that are free. `fused` has a bit per operand, then per
    result. A bit is set where the tensor is a literal, or never in memory because a fusion computes it inside, or was read or
    made by the same fusion before. `work` is that of the op's fusion, None where the op is priced on its own.
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

    @property
    def boundary(self) -> Boundary | None:
        """The boundary that the op stands for, None for an equation."""
        return BOUNDARY_OF.get(self.primitive)


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
    """Returns the end of a region's name scope: the number of its bucket where `shard(fusion=)` gives it one, else nothing."""
    return f"{_FUSION}{fusion}" if fusion else ""


class Origin(NamedTuple):
    """The origin of an op: its name scope and `file.py:line`."""

    name: str
    source: str

    @property
    def fusion(self) -> int:
        """The number of the innermost `shard(fusion=)` around the op, 0 where there is none."""
        digits = self.name.rpartition(_FUSION)[2] if _FUSION in self.name else ""
        return int("".join(takewhile(str.isdigit, digits)) or 0)


class Accumulator(NamedTuple):
    """An argument to which each of several runs of a program adds, and the result that the next run takes; they are tied."""

    before: int
    after: int
    runs: int


@dataclass(frozen=True)
class Graph:
    """A traced step. Every value has at most one producing op; ops are in execution order.

    `ties` are pairs of values that must have one sharding (loop carries, carried training state). `origins` is indexed by
    op id and may compute its entries when asked. `accumulators` are sums that several runs of the program complete. `body` is a
    fingerprint that leaves out the names of inputs. `inlined` pairs the computation of each call that compilers inline with its caller's
    (`Program.scopes`), and `copies` the ops that then compute what an earlier one does with that one.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    origins: Sequence[Origin]
    fingerprint: str
    notes: tuple[str, ...] = ()
    accumulators: tuple[Accumulator, ...] = ()
    body: str = ""
    inlined: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @cached_property
    def producers(self) -> dict[int, int]:
        """The id of the op that makes each value, by value id."""
        return {value: op.id for op in self.ops for value in op.results}

    @cached_property
    def kinds(self) -> list[int]:
        """A number for each op, shared by the ops of the same rule, primitive, shapes, types, FLOPs, `fused` and `work`."""
        tensors, numbers = dict[tuple[tuple[int, ...], str], int](), dict[tuple[object, ...], int]()
        tensor = [*(tensors.setdefault((shape, dtype), len(tensors)) for _, shape, dtype, _, _ in self.values), LITERAL].__getitem__
        # Equal rules and works are usually one object: their ids spare hashing what they hold.
        keys = [
            (id(rule), primitive, flops, fused, id(work), *map(tensor, operands), *map(tensor, results))
            for _, primitive, operands, results, rule, flops, _, _, fused, work in self.ops
        ]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def readers(self) -> tuple[tuple[Op, ...], ...]:
        """The ops that read each value; an op that reads it twice is there twice."""
        found: list[list[Op]] = [[] for _ in range(len(self.values) + 1)]
        for op in self.ops:
            for value in op.operands:
                found[value].append(op)
        return tuple(map(tuple, found[:-1]))

    @cached_property
    def facts(self) -> dict[object, Any]:
        """Results that depend on the graph alone, kept for the next call by a key of the function that computed them."""
        return {}

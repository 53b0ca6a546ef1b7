"""Reads the collectives that a compiled program executes: kind, mesh axes, bytes, repeats in a step, and source line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from spmdctx.audit.groups import Span, read_span
from spmdctx.audit.hlo import Instruction, Leaf, Module, read_module
from spmdctx.audit.loops import trip_count
from spmdctx.audit.provenance import Place, Scope, operands, parts, terms
from spmdctx.audit.provenance import source as find_source
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
}
"""Maps HLO's collectives to our kinds."""

_CALLED_BY = {"fusion": "calls", "call": "to_apply", "async-start": "calls", "custom-call": "called_computations"}
_BRANCH_BODIES = ("branch_computations", "true_computation", "false_computation")


OPEN_LOOP = "in a loop of unknown length"


class Remarks(str):
    """Remarks on a collective, printed one after the other; programs read `parts`."""

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Self:
        """Joins remarks."""
        self = super().__new__(cls, ", ".join(parts))
        self.parts = parts
        return self

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]  # that of str holds one text
        """Pickles the remarks."""
        return self.parts


_NO_REMARKS = Remarks()


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One tensor moved by a compiled collective.

    `payload_bytes` is per device and execution, as in `ir.collective.Collective`: the operand, for an all_gather the result.
    `repeats` counts executions in a step. `note` says what is unusual: a part of an axis, a loop of unknown length. `summands`
    counts the terms that the program adds up to make the operand. It shows where the compiler joined the reductions of several
    terms into one reduction of their sum.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    dtype: str
    repeats: int
    source: str
    name: str
    note: Remarks = _NO_REMARKS
    summands: int = 1

    @property
    def total_bytes(self) -> int:
        """Payload of all executions in a step."""
        return self.payload_bytes * self.repeats


def parse_collectives(hlo_text: str, mesh: LogicalMesh) -> tuple[CompiledCollective, ...]:
    """Returns the collectives of a compiled program, in printed order.

    Each tensor of a combined collective is an entry of its own. A started and awaited collective counts once, as do the copies
    of one all-gather in TPU's async collective fusions. Bodies of loops count once per iteration, and each branch of a
    conditional once. Collectives among groups of one device move nothing and are left out.

    Args:
        hlo_text: What `compiled.as_text()` returns, from the CPU, TPU or GPU compiler.
        mesh: The mesh for which the program was compiled; device i of the program is device i of the mesh, row-major.
    """
    return tuple(_Walk(read_module(hlo_text), mesh).run())


@dataclass
class _Walk:
    module: Module
    mesh: LogicalMesh
    spans: dict[str, Span] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def run(self) -> Iterator[CompiledCollective]:
        yield from self.visit(Scope(self.module.computations[self.module.entry]), set())

    def visit(self, scope: Scope, fused: set[tuple[str, ...]]) -> Iterator[CompiledCollective]:
        """Yields the collectives of one execution. `fused` are the async ones already seen in fusions of the same caller."""
        computation = scope.computation
        if computation.name in self.silent:
            return
        silent = not fused
        for instruction in computation.instructions.values():
            for found in self.visit_instruction(Place(instruction, scope), fused):
                silent = False
                yield found
        if silent:
            self.silent.add(computation.name)

    def visit_instruction(self, place: Place, fused: set[tuple[str, ...]]) -> Iterator[CompiledCollective]:
        instruction, scope = place
        opcode = instruction.opcode
        if opcode == "while":
            yield from self.visit_loop(place, fused)
        elif opcode == "conditional":
            for name in (name for key in _BRANCH_BODIES for name in instruction.callees(key)):
                yield from (_noted(one, "in a branch") for one in self.visit(Scope(self.module.computations[name]), set()))
        elif opcode in _CALLED_BY:
            for name in instruction.callees(_CALLED_BY[opcode]):
                called = Scope(self.module.computations[name], scope, instruction)
                source = self.module.source(instruction)
                for one in self.visit(called, fused if opcode == "fusion" else set()):
                    yield one if one.source else replace(one, source=source)
        else:
            kind = KINDS.get(opcode.removesuffix("-start"))
            if kind is not None and not _is_repeated(instruction, fused):
                yield from self.read(kind, place)

    def visit_loop(self, place: Place, fused: set[tuple[str, ...]]) -> Iterator[CompiledCollective]:
        loop, scope = place
        count = trip_count(loop, scope.computation, self.module)
        for key in ("condition", "body"):
            for name in loop.callees(key):
                # What was started before the loop goes on beside its iterations.
                for one in self.visit(Scope(self.module.computations[name]), set(fused)):
                    yield _noted(one, OPEN_LOOP) if count is None else replace(one, repeats=one.repeats * count)

    def read(self, kind: str, place: Place) -> Iterator[CompiledCollective]:
        span = self.span(place.instruction)
        if span.group_size < 2 or not span.axes:
            return
        if kind == "all_reduce" and place.scope.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        own_source = self.module.source(place.instruction)
        note = Remarks(span.note) if span.note else _NO_REMARKS
        made = list(self.tensors(kind, place))
        for one, leaf in made:
            payload = leaf.num_bytes * (span.group_size if kind == "all_gather" else 1)
            if payload:
                # A combined collective carries the line of one of its tensors only.
                source = own_source if own_source and len(made) == 1 else find_source(one, self.module) or own_source
                summands = terms(one, self.module) if kind in ("all_reduce", "reduce_scatter") else 1
                yield CompiledCollective(kind, span.axes, payload, leaf.dtype, 1, source, place.instruction.name, note, summands)

    def tensors(self, kind: str, place: Place) -> Iterator[tuple[Place, Leaf]]:
        """Yields the tensors that a collective moves, and the ops that made them.

        The pieces of an all_to_all over a tuple are one tensor. A concatenation that the compiler made to reduce several
        tensors at once is split again.
        """
        made = list(operands(place))
        if kind == "all_to_all" and made:
            leaves = [leaf for one in made for leaf in one.instruction.leaves]
            yield made[0], Leaf(leaves[0].dtype, (len(leaves), *leaves[0].shape))
            return
        for one in made:
            for part in parts(one, self.module) if kind == "all_reduce" else [one]:
                yield from ((part, leaf) for leaf in part.instruction.leaves)

    def span(self, instruction: Instruction) -> Span:
        found = re.search(r"(?:replica_groups|source_target_pairs)=.*?(?=, (?!device_ids=)\w+=|$)", instruction.attributes)
        key = found.group(0) if found else ""
        if key not in self.spans:
            self.spans[key] = read_span(instruction.attributes, self.mesh)
        return self.spans[key]


def _is_repeated(instruction: Instruction, fused: set[tuple[str, ...]]) -> bool:
    """Returns whether this is another copy, in a concurrent fusion, of a collective that was already counted."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return False
    channel = re.search(r"channel_id=(\d+)", instruction.attributes)
    key = (instruction.opcode, channel.group(1) if channel else "", *map(str, instruction.leaves))
    seen = key in fused
    fused.add(key)
    return seen


def _noted(collective: CompiledCollective, note: str) -> CompiledCollective:
    known = collective.note.parts
    return collective if note in known else replace(collective, note=Remarks(*known, note))

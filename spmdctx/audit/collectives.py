"""The collectives that a compiled program executes: kind, mesh axes, bytes, times in a step, and the source line behind each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from spmdctx.audit.groups import Span, read_span
from spmdctx.audit.hlo import Computation, Instruction, Leaf, Module, read_module
from spmdctx.audit.loops import trip_count
from spmdctx.ir import AxisNames
from spmdctx.mesh import LogicalMesh

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
}
_CALLS = {"fusion": "calls", "call": "to_apply", "async-start": "calls", "custom-call": "called_computations"}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_WIRE_COPIES = ("copy", "bitcast", "reshape", "convert", "copy-done", "copy-start", "transpose", "get-tuple-element")
_MAX_SOURCE_STEPS = 32


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One tensor moved by a compiled collective.

    `payload_bytes` is per device and execution, as in `ir.Collective`: the operand, for an all_gather the result.
    `repeats` counts executions in a step. `note` says what is unusual: a part of an axis, a loop of unknown length.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    dtype: str
    repeats: int
    source: str
    name: str
    note: str = ""

    @property
    def total_bytes(self) -> int:
        """Payload of all executions in a step."""
        return self.payload_bytes * self.repeats


def parse_collectives(hlo_text: str, mesh: LogicalMesh) -> tuple[CompiledCollective, ...]:
    """The collectives of a compiled program, in printed order.

    Each tensor of a combined collective is an entry of its own. A started and awaited collective counts once, as do the
    copies that TPU's async collective fusions hold of one all-gather. Bodies of loops count once per iteration, each
    branch of a conditional once. Collectives among groups of one device move nothing and are left out.

    Args:
        hlo_text: What `compiled.as_text()` returns, from the CPU, TPU or GPU compiler.
        mesh: The mesh that the program was compiled for; device i of the program is device i of the mesh, row-major.
    """
    return tuple(_Walk(read_module(hlo_text), mesh).run())


@dataclass
class _Walk:
    module: Module
    mesh: LogicalMesh
    spans: dict[str, Span] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def run(self) -> Iterator[CompiledCollective]:
        yield from self.visit(self.module.computations[self.module.entry], set())

    def visit(self, computation: Computation, fused: set[tuple[str, str, str]]) -> Iterator[CompiledCollective]:
        """Collectives of one execution. `fused` are the async ones already seen in fusions of the same caller."""
        if computation.name in self.silent:
            return
        silent = True
        for instruction in computation.instructions.values():
            for found in self.visit_instruction(instruction, computation, fused):
                silent = False
                yield found
        if silent and not fused:
            self.silent.add(computation.name)

    def visit_instruction(
        self, instruction: Instruction, computation: Computation, fused: set[tuple[str, str, str]]
    ) -> Iterator[CompiledCollective]:
        opcode = instruction.opcode
        if opcode == "while":
            yield from self.visit_loop(instruction, computation)
        elif opcode == "conditional":
            for name in (name for key in _BRANCHES for name in instruction.callees(key)):
                yield from (_noted(one, "in a branch") for one in self.visit(self.module.computations[name], set()))
        elif opcode in _CALLS:
            for name in instruction.callees(_CALLS[opcode]):
                own = self.visit(self.module.computations[name], fused if opcode == "fusion" else set())
                source = self.module.source(instruction)
                yield from (one if one.source else replace(one, source=source) for one in own)
        else:
            kind = _KINDS.get(opcode.removesuffix("-start"))
            if kind is not None and not self.is_repeated(instruction, fused):
                yield from self.read(kind, instruction, computation)

    def visit_loop(self, loop: Instruction, computation: Computation) -> Iterator[CompiledCollective]:
        count = trip_count(loop, computation, self.module)
        for key in ("condition", "body"):
            for name in loop.callees(key):
                for one in self.visit(self.module.computations[name], set()):
                    yield _noted(one, "in a loop of unknown length") if count is None else replace(one, repeats=one.repeats * count)

    def is_repeated(self, instruction: Instruction, fused: set[tuple[str, str, str]]) -> bool:
        """Whether this is a further copy, in a fusion that runs beside it, of a collective already counted."""
        if "async_collective_fusion_config" not in instruction.attributes:
            return False
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        shape = "".join(map(str, instruction.leaves))
        key = (instruction.opcode, channel.group(1) if channel else "", shape)
        seen = key in fused
        fused.add(key)
        return seen

    def read(self, kind: str, instruction: Instruction, computation: Computation) -> Iterator[CompiledCollective]:
        span = self.span(instruction)
        if span.group_size < 2 or not span.axes:
            return
        if kind == "all_reduce" and computation.name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        own_source = self.module.source(instruction)
        several = len(instruction.operands) > 1
        for leaf, source in self.tensors(kind, instruction, computation):
            payload = leaf.num_bytes * (span.group_size if kind == "all_gather" else 1)
            chosen = (source or own_source) if several else (own_source or source)
            if payload:
                yield CompiledCollective(kind, span.axes, payload, leaf.dtype, 1, chosen, instruction.name, span.note)

    def span(self, instruction: Instruction) -> Span:
        found = re.search(r"(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)", instruction.attributes)
        key = found.group(0) if found else ""
        if key not in self.spans:
            self.spans[key] = read_span(instruction.attributes, self.mesh)
        return self.spans[key]

    def tensors(self, kind: str, instruction: Instruction, computation: Computation) -> Iterator[tuple[Leaf, str]]:
        """Operand tensors, each with the source line of what made it.

        The pieces of an all_to_all written over a tuple are one tensor. A concatenation that the compiler made to reduce
        several tensors at once is taken apart again.
        """
        made = [computation.instructions[name] for name in instruction.operands]
        if kind == "all_to_all" and made:
            leaves = [leaf for one in made for leaf in one.leaves]
            whole = Leaf(leaves[0].dtype, (sum(leaf.num_bytes for leaf in leaves) // max(1, leaves[0].num_bytes), *leaves[0].shape))
            yield whole, self.find_source(made[0], computation)
            return
        for one in made:
            for part, home in self.parts(one, computation) if kind == "all_reduce" else [(one, computation)]:
                source = self.find_source(part, home)
                yield from ((leaf, source) for leaf in part.leaves)

    def parts(self, instruction: Instruction, computation: Computation) -> list[tuple[Instruction, Computation]]:
        """The tensors that `instruction` concatenates, or itself."""
        root, names, home = instruction, instruction.operands, computation
        if instruction.opcode == "fusion":
            called = self.module.computations[instruction.callees("calls")[0]]
            if called.root is None:
                return [(instruction, computation)]
            root, home = called.root, called
            arguments = dict(zip(called.parameters, instruction.operands, strict=True))
            names = tuple(arguments.get(name, name) for name in root.operands)
            home = computation if set(names) <= set(instruction.operands) else called
        if root.opcode != "concatenate":
            return [(instruction, computation)]
        return [(home.instructions[name], home) for name in names]

    def find_source(self, instruction: Instruction, computation: Computation) -> str:
        """Source line of an instruction, or of the nearest one before it that has one."""
        for _ in range(_MAX_SOURCE_STEPS):
            source = self.module.source(instruction)
            if source or not instruction.operands:
                return source
            if instruction.opcode == "fusion":
                called = self.module.computations.get("".join(instruction.callees("calls")[:1]))
                source = self.module.source(called.root) if called and called.root else ""
                if source:
                    return source
            if instruction.opcode not in (*_WIRE_COPIES, "fusion"):
                return ""
            following = computation.instructions.get(instruction.operands[0])
            if following is None:
                return ""
            instruction = following
        return ""


def _noted(collective: CompiledCollective, note: str) -> CompiledCollective:
    known = collective.note.split(", ") if collective.note else []
    return collective if note in known else replace(collective, note=", ".join([*known, note]))

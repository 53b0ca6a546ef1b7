"""Seconds by kind of op: what the judge says of each instruction of a compiled program, and what its plan says of each op.

products, convolutions, reductions (a fusion that holds one), transposes and copies, gathers and scatters, sorts,
fusions (all other element-wise work), collectives
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.judge_library import is_collective, library_kind
from benchmarks.judge_timeline import COPIES, COPY_DONES
from benchmarks.judge_work import FREE, Work, work_of
from spmdctx.audit.hlo import Computation, Instruction, Module
from spmdctx.audit.loops import trip_count
from spmdctx.cost.roofline import compute_time_s
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CONTRACTIONS, KERNELS

ORDER = ("product", "convolution", "fusion", "reduction", "transpose", "gather", "sort", "collective")
"""The kinds, of which an instruction has the first that fits: a fusion that holds a product is a product."""

_HOLDERS = frozenset({"while", "conditional", "call", "async-start", "async-done", "async-update"})


class Judged(NamedTuple):
    """One instruction, its work in one execution, and how often a step executes it."""

    instruction: Instruction
    work: Work
    repeats: int

    @property
    def kind(self) -> str:
        """The kind of the instruction."""
        return "collective" if is_collective(self.instruction) else self.work.kind


def judged_instructions(module: Module) -> Iterator[Judged]:
    """What a program executes, with the bodies of its loops; of branches the first is taken."""
    yield from _judged(module.computations[module.entry], module, 1)


def _judged(computation: Computation, module: Module, repeats: int) -> Iterator[Judged]:
    for one in computation.instructions.values():
        if one.opcode == "while":
            times = repeats * (trip_count(one, computation, module) or 1)
            for name in (*one.callees("condition"), *one.callees("body")):
                yield from _judged(module.computations[name], module, times)
        elif one.opcode in _HOLDERS:
            called = one.callees("to_apply") or one.callees("branch_computations") or one.callees("calls")
            for name in called[:1]:
                yield from _judged(module.computations[name], module, repeats)
        elif one.opcode not in FREE or library_kind(one):
            yield Judged(one, work_of(one, computation, module), repeats)


def judged_by_kind(module: Module, seconds: Callable[[Work], float]) -> dict[str, float]:
    """Seconds of a step by kind, without its collectives and its copies to and from the chip, which take time only where it waits."""
    found: dict[str, float] = defaultdict(float)
    for one in judged_instructions(module):
        if one.kind != "collective" and one.instruction.opcode not in (*COPIES, *COPY_DONES):
            found[one.kind] += seconds(one.work) * one.repeats
    return dict(found)


def planned_by_kind(planned: Any) -> dict[str, float]:
    """Seconds of a step by kind, from what a step planned (`Entry.planned`) and its machine, with the seconds of communication."""
    entry, topology = planned
    found: dict[str, float] = defaultdict(float)

    def add(graph: Any, choices: Sequence[Any] | None, mesh: LogicalMesh, times: int) -> None:
        for op in graph.ops:
            axes = ((),) * len(op.rule.sizes) if choices is None else choices[op.id].axes
            found[planned_kind(op.primitive)] += times * op.repeats * compute_time_s(graph, op, axes, mesh, topology)

    def add_bodies(regions: Any, times: int) -> None:
        for region in regions:
            add(region.body.graph, None, LogicalMesh(()), times * region.repeats)
            add_bodies(region.body.manual, times * region.repeats)

    add(entry.program.graph, entry.assignment.ops, entry.mesh, 1)
    add_bodies(entry.program.manual, 1)
    found["collective"] += entry.plan.cost.communication_s
    return dict(found)


def planned_kind(primitive: str) -> str:
    """The kind of an op of a plan."""
    if primitive in CONTRACTIONS or primitive in KERNELS:
        return "product"
    if primitive == "conv_general_dilated":
        return "convolution"
    if primitive.startswith(("scatter", "gather")):
        return "gather"
    if primitive in ("sort", "top_k"):
        return "sort"
    if primitive.startswith(("reduce", "arg", "cum")):
        return "reduction"
    return "transpose" if primitive in ("transpose", "copy") else "fusion"

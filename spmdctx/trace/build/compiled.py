"""A program as the compiler of a machine fuses it. Programs are built as XLA fuses on TPU; other backends fuse less."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.ir.analysis.columns import Columns, Kind, Tensor
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.machine.topology import Compiler
from spmdctx.machine.xla.fusion import fused_bits, fused_slots, in_memory
from spmdctx.machine.xla.fusion_work import fusion_works
from spmdctx.machine.xla.kept.region_inputs import region_inputs
from spmdctx.machine.xla.kept.shared_tanh import shared_tanh
from spmdctx.trace.build.program import Program


def as_compiled(program: Program, compiler: Compiler) -> Program:
    """Returns a program whose ops say what `compiler` fuses (`Op.fused`, `Op.work`), and the bodies of its shard_maps likewise."""
    if compiler.fuses_into_products:
        return program
    manual = tuple(region._replace(body=as_compiled(region.body, compiler)) for region in program.manual)
    ops = _fused_ops(program.graph, program.scopes, keeps_more=compiler.fuses_rows)
    return replace(program, graph=replace(program.graph, ops=ops), manual=manual)


def _fused_ops(graph: Graph, scopes: tuple[int, ...], *, keeps_more: bool) -> tuple[Op, ...]:
    columns = _columns(graph, scopes)
    kept = [value for value in (*graph.inputs, *graph.outputs) if value != LITERAL]
    if keeps_more:
        kept += region_inputs(columns)
    materialized = in_memory(columns, kept, into_products=False)
    if keeps_more and (shared := shared_tanh(columns, materialized)):
        materialized = in_memory(columns, [*kept, *shared], into_products=False)
    fused = fused_slots(columns, materialized)
    marks = zip(graph.ops, fused_bits(columns, fused), fusion_works(columns, fused, for_each=True), strict=True)
    return tuple([op._replace(fused=bits, work=work) for op, bits, work in marks])


def _columns(graph: Graph, scopes: tuple[int, ...]) -> Columns:
    kinds: dict[tuple[int, str, int], int] = {}
    kind_of = [kinds.setdefault((id(op.rule), op.primitive, op.flops), len(kinds)) for op in graph.ops]
    first = dict(zip(reversed(kind_of), reversed(graph.ops), strict=True))
    tensors: dict[Tensor, int] = {}
    tensor_of = [tensors.setdefault(Tensor(value.shape, value.dtype), len(tensors)) for value in graph.values]
    return Columns(
        [Kind(first[number].primitive, first[number].rule, first[number].flops) for number in range(len(kinds))],
        kind_of,
        ([op.repeats for op in graph.ops], scopes),
        [op.operands for op in graph.ops],
        [op.results for op in graph.ops],
        (list(tensors), tensor_of),
    )

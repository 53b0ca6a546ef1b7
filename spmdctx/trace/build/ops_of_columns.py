"""Makes the ops of a graph from its columns, with the operands that XLA fuses and the work that fusion repeats."""

from __future__ import annotations

from itertools import repeat

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.arrays import BoolArray
from spmdctx.ir.graph import Op
from spmdctx.machine.xla.fusion import fused_bits, fused_slots
from spmdctx.machine.xla.fusion_work import fusion_works

_new = tuple.__new__


def ops_of(columns: Columns, materialized: BoolArray) -> tuple[Op, ...]:
    """Makes the ops; `materialized` tells for each value whether it exists in memory."""
    fused = fused_slots(columns, materialized)
    primitives, rules, flops = ([kind[place] for kind in map(columns.kinds.__getitem__, columns.kind_of.tolist())] for place in range(3))
    sides = columns.operands, columns.results
    rest = repeat(None), fused_bits(columns, fused), fusion_works(columns, fused)
    fields = zip(range(columns.num_ops), primitives, *sides, rules, flops, columns.repeats.tolist(), *rest, strict=False)
    return tuple(map(_new, repeat(Op), fields))

"""XLA reads a tensor again in each fusion that computes something of it, from memory or from the chip.

What XLA does: a chain of element-wise ops that leads to several products or reductions is computed in each, and each reads what the chain
    reads. In attention, the gradients of the values, of the chances, of the queries and of the keys read the scores, or their exponentials,
    once more. Where the scores are the result of a product in low precision, one fusion makes them, their largest, the exponentials and
    their sum; otherwise the sum reads the scores, too. Tensors that fit are on the chip, which takes next to no time.
Seen in: libtpu 0.0.42.1, v5e: attention in bfloat16, of 197 to 2,048 words: 30 bytes move for each score, in float32 40, with longer rows
    or a bias 38, planned 30, 40 and 34; v6e 26, v5p 30 to 40. A decoder whose scores are kept in bfloat16 moves 20. 37 programs in data
    parallelism, v5e, v5p, v6e: 32 of the planned times are within 15 % of the judge's, 26 without this (benchmarks/RESULTS.md).
Switch: `Compiler.fuses_into_products`; on GPU and CPU all that is read again is in memory. `Compiler.scratch_bytes`, what a chip holds.
Priced by: machine.xla.fusion_work, cost.roofline
Written or prevented by: nothing
Checked by: tests/machine/xla/test_rereads.py, tests/cost/test_roofline.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.arrays import BoolArray, FloatArray, IntArray
from spmdctx.ir.primitives import LOOKED_UP
from spmdctx.machine.xla.fusion import CHAINED
from spmdctx.machine.xla.memory.on_chip import is_short

NOWHERE = -1
"""The home of ops that are computed by themselves."""

_MOST_HOMES = 8
"""The most fusions for which a chain is computed anew, so that chains which lead to very many cost no time to follow."""


class FusionMoves(NamedTuple):
    """What fusions move, each tensor once per fusion: the slot of a main op, the bytes, the tensor, and whether a home reads it again."""

    slots: IntArray
    sizes: IntArray
    values: IntArray
    again: BoolArray


def other_homes(columns: Columns, homes: Sequence[int], is_apart: BoolArray, behind: Collection[int]) -> tuple[IntArray, IntArray]:
    """Returns pairs of a chain's op and a slot, of another main op than its first, to which the chain leads, too.

    Args:
        columns: The columns of the step.
        homes: For each op the slot of the main op with which it is computed, `NOWHERE` for main ops and those priced on their own.
        is_apart: Whether each op is priced on its own.
        behind: Ops behind a main op that lead to others, too: what sums read that are made with a product, such as exponentials of rows.
    """
    own_homes, main, repeats = np.array(homes, dtype=np.int64), columns.slot_ops.tolist(), columns.repeats.tolist()
    leads_on = columns.slot_ops[own_homes] > np.arange(columns.num_ops)
    leads_on[list(behind)] = True
    chains = np.flatnonzero((own_homes != NOWHERE) & leads_on)
    alone = bytearray(is_apart)
    slots = np.flatnonzero(columns.is_operand)
    count = np.bincount(columns.read, minlength=columns.num_values + 1)
    only = np.zeros(len(count), dtype=np.int64)
    only[columns.read] = slots
    reads: dict[int, list[int]] = {}  # the slots that read each value that several read
    is_shared = count[columns.read] > 1
    for value, slot in zip(columns.read[is_shared].tolist(), slots[is_shared].tolist(), strict=True):
        reads.setdefault(value, []).append(slot)
    single, last = (count == 1).tolist(), only.tolist()
    leads: dict[int, dict[int, int]] = {}  # by op that leads to several main ops, the slot of each
    pairs: list[tuple[int, int]] = []
    for op in chains[::-1].tolist():
        value, first = columns.results[op][0], main[homes[op]]
        if single[value]:
            found = leads.get(main[last[value]], {})
        else:
            found = {first: homes[op]}
            for slot in reads.get(value, ()):
                reader = main[slot]
                own = leads.get(reader) or ({main[homes[reader]]: homes[reader]} if homes[reader] != NOWHERE else {reader: slot})
                if not (alone[reader] and homes[reader] == NOWHERE):
                    found.update((key, place) for key, place in own.items() if key not in found and repeats[key] == repeats[op])
                if len(found) > _MOST_HOMES:
                    break
        if len(found) > 1:
            leads[op] = found
            pairs += [(op, slot) for key, slot in found.items() if key != first]
    ops, at = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(ops, dtype=np.int64), np.array(at, dtype=np.int64)


def operands_again(columns: Columns, fused: BoolArray, more: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
    """Returns the slots of operands in memory that other homes read too, and the slots of these homes."""
    ops, homes = more
    starts, ends = columns.slot_starts[ops], columns.slot_starts[ops + 1]
    counts = ends - starts
    slots = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum()) if len(ops) else ops
    reads = ~fused[slots] & columns.is_operand[slots]
    return slots[reads], np.repeat(homes, counts)[reads]


_Rates = dict[int, list[tuple[int, float]]]


def rates_apart(columns: Columns, moves: FusionMoves, rates: FloatArray) -> tuple[_Rates, _Rates]:
    """Returns `Work.passing` and `Work.again` of ops that have any."""
    last = np.full(columns.num_values + 1, -1)
    np.maximum.at(last, columns.read, columns.readers)
    makers = columns.maker_of
    is_made = (makers >= 0)[moves.values] & (moves.sizes > 0)
    lives = is_short(makers, last, columns.num_ops) & (last >= 0)
    # Element-wise ops that read the same are one fusion.
    rereads = is_made & moves.again & ~columns.which(CHAINED.__contains__)[columns.slot_ops[moves.slots]]
    found: tuple[_Rates, _Rates] = {}, {}
    for own, which in zip(found, (is_made & ~moves.again & lives[moves.values], rereads), strict=True):
        slots = moves.slots[which]
        ops = columns.slot_ops[slots]
        places = slots - columns.slot_starts[ops]
        for op, place, rate in zip(ops.tolist(), places.tolist(), rates[which].tolist(), strict=True):
            own.setdefault(op, []).append((place, rate))
    return found


def wide_copies(columns: Columns, fused: BoolArray) -> bytes:
    """Returns 1 for each op that makes a wider copy of a tensor, both of which are in memory, else 0."""
    first = columns.slot_starts[:-1]
    ops = np.flatnonzero(columns.which("convert_element_type".__eq__))
    ops = ops[~fused[first[ops]] & ~fused[first[ops] + 1]]
    narrow, wide = (columns.item_bytes[columns.slot_values[first[ops] + place]] for place in (0, 1))
    found = np.zeros(columns.num_ops, dtype=bool)
    found[ops[(narrow < wide) & (narrow > 0)]] = True
    return found.tobytes()


def looked_up(columns: Columns, fused: BoolArray) -> bytes:
    """Returns 1 for each element-wise op whose result is in memory and is looked up, else 0."""
    found = np.zeros(columns.num_ops, dtype=bool)
    makers = columns.maker_of[columns.read[columns.which(LOOKED_UP.__eq__)[columns.readers]]]
    makers = makers[makers >= 0]
    found[makers] = ~fused[columns.slot_starts[makers + 1] - 1]
    found &= columns.which(CHAINED.__contains__) & (np.bincount(columns.makers, minlength=columns.num_ops) == 1)
    return found.tobytes()

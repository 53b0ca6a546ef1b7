"""XLA on TPU gives whole stacks a narrower type before the loops whose iterations read their slices so.

What XLA does: a scan reads one layer of a stack of float32 weights in each iteration, and uses it as bfloat16, by a conversion or by a
    product's own precision. XLA converts the stack before the loop: the part that each device stores. Iterations slice the result, and
    gather what they need of it. All loops that read an argument so, forward or backward, share one copy, from before the first of them to
    the end of the last. It leaves nested loops, too, those over micro-batches among them, and passes reshapes and transposes. A loop that
    also reads a slice in the wide type reads all from the wide stack, and so does one that computes with the slice before it converts it.
    Where the step gives a stack back as it was, and keeps the old one, the narrow copy lies in the result's buffer: most of them do.
Seen in: libtpu 0.0.42.1, v5e, v5p and v6e, 44 scanned programs on one device and on eight, with weights whole, split or gathered in the
    loop, with and without recomputation. XLA for H100 does not. Of a part of an argument (`w[:3]`) nothing is converted. A stack that the
    step makes is written narrow at once, and is never in memory as it was. Products of `Precision.HIGH` read the wide type, which the step
    does not tell. LLaMA2-7B with LoRA: 62.98 GiB are compiled, 58.0 planned without copies of frozen weights and 70.1 with them.
Switch: `Compiler.narrows_matrix_operands`
Priced by: cost.memory.loops and cost.memory.lives, for cost.price.memory and search.problem.memory.stored
Written or prevented by: nothing
Checked by: tests/machine/xla/kept/test_narrow_stacks.py
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op, item_bytes
from spmdctx.ir.primitives import ANNOTATIONS, ENTERING, LAYOUT, MATRIX_PRODUCTS, SCAN_EXIT
from spmdctx.machine.xla.narrowing import NARROW_BYTES

_SAME = ANNOTATIONS | {"reshape", "squeeze"}
"""Ops behind which the elements of an argument lie as before."""

_PASSED = LAYOUT | ENTERING | {"dynamic_slice"}
"""Ops that XLA takes a conversion out of."""


class NarrowStack(NamedTuple):
    """An argument of which a loop reads narrow slices: the op by which it enters the loop, and the part of its bytes that they have."""

    value: int
    entering: int
    share: float


def narrow_stacks(graph: Graph, carried: Container[int]) -> Iterator[NarrowStack]:
    """Gives the arguments that XLA narrows before loops, once for each outermost loop.

    Args:
        graph: the step.
        carried: what loops carry.
    """
    arguments = frozenset(graph.inputs)
    for op in ops_of(graph, ENTERING):
        value = op.operands[0]
        while value != LITERAL and value not in arguments and (maker := _maker(graph, value)) is not None:
            value = maker.operands[0]
        if value in arguments and op.results[0] not in carried:
            wide, narrow = item_bytes(graph.values[value].dtype), _sliced_bytes(graph, op, carried)
            if 0 < narrow < wide:
                yield NarrowStack(value, op.id, narrow / wide)


def given_back(graph: Graph) -> frozenset[int]:
    """Returns the arguments whose slices a scan stacks up again as a result of the step."""
    outputs, found = frozenset(graph.outputs), set()
    for op in ops_of(graph, (SCAN_EXIT,)):
        maker = graph.producers.get(op.operands[0])
        if op.results[0] in outputs and maker is not None and graph.ops[maker].primitive in ENTERING:
            found.add(graph.ops[maker].operands[0])
    return frozenset(found)


def _maker(graph: Graph, value: int) -> Op | None:
    """Returns the op that makes a value, if it only gives another one a new name or shape."""
    index = graph.producers.get(value)
    return None if index is None or graph.ops[index].primitive not in _SAME else graph.ops[index]


def _sliced_bytes(graph: Graph, entering: Op, carried: Container[int]) -> int:
    """Returns the bytes of one item as what reads slices of a value takes it, the widest of them; 0 if nothing reads a slice."""
    values, waiting, widest, is_sliced = graph.values, [entering], 0, False
    while waiting:
        op = waiting.pop()
        result = op.results[0]
        is_sliced |= values[result].num_bytes < values[op.operands[0]].num_bytes
        for reader in graph.readers[result]:
            if reader.primitive in _PASSED and reader.operands[0] == result and reader.results[0] not in carried:
                waiting.append(reader)
            else:
                widest = max(widest, _taken_bytes(graph, reader, result))
    return widest if is_sliced else 0


def _taken_bytes(graph: Graph, reader: Op, value: int) -> int:
    """Returns the bytes of one item of a value as an op takes it."""
    dtype = graph.values[value].dtype
    if reader.primitive == "convert_element_type":
        return item_bytes(graph.values[reader.results[0]].dtype)
    return NARROW_BYTES if reader.primitive in MATRIX_PRODUCTS and dtype == "float32" else item_bytes(dtype)

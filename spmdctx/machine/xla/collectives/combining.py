"""XLA combines many reductions of gradients into one collective.

What XLA does: it combines reductions that wait for nothing else, so that none pays a latency of its own. All_gathers stay as they are.
    TPU fills an all_reduce up to 120 MiB with gradients, in the order of the outputs that they lead to. It skips those for which there
    is no room, and fills the next one with them. An all_reduce runs when its last gradient is made: all are in memory until then.
Seen in: XLA on TPU and GPU: 33 all_reduces of a ViT step become 2, 14 reduce_scatters 3. libtpu 0.0.42: the reduce_scatters of one step are
    combined on v5e:2x4 and v6e:2x4 (13 become 2 to 4), on v5p and v5e:4x4 not (12 and 18 stay); all are priced without latency.
    libtpu 0.0.42.1, data-parallel plans of ten models: one all_reduce of up to 99 MiB holds all gradients outside of loops, and
    larger programs have several: 88, 120 and 120 MiB (T5), 107 and 119 (another T5).
Switch: `Compiler.combines_reductions`
Priced by: cost.price.reductions, cost.price.memory, cost.memory.copies, cost.evaluate, cost.bodies, search.problem.states
Written or prevented by: `lowering.compile_options` sets the combiners' thresholds (`machine.xla.options`).
Checked by: tests/machine/xla/test_combining.py, tests/cost/price/test_price.py, tests/search/problem/test_states.py,
    tests/lowering/rewrite/test_buckets.py
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Graph
from spmdctx.machine.topology import Topology, without_latency

MOST_BYTES = 120 * 2**20
"""The most bytes of one combined all_reduce on TPU.

Measured on: data-parallel encoder-decoders of 275 and 330 MiB of gradients, v5e, v5p and v6e.
Checked by: tests/machine/xla/test_combining.py
"""


class Reduced(NamedTuple):
    """A gradient that `op` makes and that is reduced with others of its `group`."""

    op: int
    value: int
    group: Hashable
    bytes: int


def reduction_machine(is_terminal: bool, topology: Topology) -> Topology:
    """Returns the machine by which a reduction is priced: without latency if it is of a terminal value and XLA combines such reductions."""
    return without_latency(topology) if is_terminal and topology.compiler.combines_reductions else topology


def combines_up_to(topology: Topology) -> int:
    """Returns the most bytes of one combined all_reduce; 0 where that is not known."""
    return MOST_BYTES if topology.device.startswith("tpu-") and topology.compiler.combines_reductions else 0


def combined(graph: Graph, reduced: Sequence[Reduced], most_bytes: int) -> list[list[Reduced]]:
    """Returns the gradients of each combined all_reduce.

    Args:
        graph: The step.
        reduced: Its gradients.
        most_bytes: The most bytes of one all_reduce; one gradient alone may have more.
    """
    if not reduced:
        return []
    places, least = _first_outputs(graph), min(one.bytes for one in reduced)
    found: list[list[Reduced]] = []
    room: dict[Hashable, dict[int, int]] = {}
    for one in sorted(reduced, key=lambda one: (places[one.value], one.op)):
        own = room.setdefault(one.group, {})
        place = next((place for place, left in own.items() if left >= one.bytes), len(found))
        if place == len(found):
            found.append([])
        found[place].append(one)
        own[place] = own.get(place, most_bytes) - one.bytes
        if own[place] < least:
            del own[place]
    return found


def _first_outputs(graph: Graph) -> Sequence[int]:
    """Returns for each value the place of the first output that it leads to, through values with as many elements."""
    known: list[int] | None = graph.facts.get(_first_outputs)
    if known is None:
        none, shapes = len(graph.outputs), [value.shape for value in graph.values]
        known = graph.facts[_first_outputs] = [none] * len(shapes)
        for place, value in reversed(list(enumerate(graph.outputs))):
            if value != LITERAL:
                known[value] = place
        for op in reversed(graph.ops):
            for result in op.results:
                place = known[result]
                for operand in op.operands if place < none else ():
                    if operand != LITERAL and place < known[operand] and prod(shapes[operand]) == prod(shapes[result]):
                        known[operand] = place
    return known

"""The partitioner calls back into Python on one device, and broadcasts what comes back by an all_reduce.

What XLA does: JAX places a callback on one device, so that Python sees whole arrays once. The partitioner gives the other devices zeros
    for each result that the program uses, and all-reduces it over all devices. Results that nobody uses are not sent.
Seen in: jax 0.10.2, CPU and libtpu 0.0.42 for v5e:2x4: pure_callback and io_callback, ordered and not, in loops, of scalars and arrays of
    float32, bfloat16, int8 and bool. CPU sums bfloat16 as float32; TPU sums int8 and bool as words of 4 bytes.
Switch: none: all backends
Priced by: cost.price.price
Written or prevented by: nothing
Checked by: tests/machine/xla/partitioner/test_callbacks.py
"""

from __future__ import annotations

from collections.abc import Iterator

from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh

_CALLBACKS = ("pure_callback", "io_callback")


def broadcasts(graph: Graph, mesh: LogicalMesh) -> Iterator[Collective]:
    """Yields the all_reduces by which results of callbacks come to all devices; they have no time yet."""
    axes = tuple(name for name, size in mesh.axes if size > 1)
    for op in graph.ops if axes else ():
        for value in op.results if op.primitive in _CALLBACKS else ():
            if graph.readers[value] or value in graph.outputs:
                cause = Cause(CauseForm.BROADCAST, primitive=op.primitive)
                yield Collective("all_reduce", axes, graph.values[value].num_bytes, 0.0, op.repeats, cause, graph.origins[op.id].source)

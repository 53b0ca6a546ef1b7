"""Refuses to run programs that move integers of two bits between CPU devices: XLA writes past its buffers there (jax 0.10.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh

_TWO_BITS = frozenset({"int2", "uint2"})


def check_two_bits(graph: Graph, mesh: LogicalMesh, backend: str, compiled: Callable[[], jax.stages.Compiled]) -> None:
    """Does nothing unless the program has such integers and CPU devices are to run it; only then is it compiled to be read.

    Raises:
        UnsupportedError: a collective of the compiled program moves them.
    """
    if backend != "cpu" or mesh.num_devices == 1 or not any(value.dtype in _TWO_BITS for value in graph.values):
        return
    from spmdctx.audit import parse_collectives

    for found in parse_collectives(compiled().as_text() or "", mesh):
        if found.dtype in _TWO_BITS:
            raise UnsupportedError(
                f"The step moves {found.dtype} between CPU devices, at which XLA ends the process.",
                where=found.source,
                got=f"{found.kind} over {'+'.join(found.axes)}",
                fix="keep these numbers as int8, or packed in uint8; step.plan and step.audit work, and int4 does on CPU",
            )

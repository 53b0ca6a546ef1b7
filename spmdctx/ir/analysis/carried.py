"""Finds the state that a step takes and returns."""

from __future__ import annotations

from spmdctx.ir.graph import Graph


def carried_inputs(graph: Graph) -> frozenset[int]:
    """Returns the inputs whose new values the step returns, so that it could write these in their place."""
    inputs, outputs = frozenset(graph.inputs), frozenset(graph.outputs)
    return frozenset(before for before, after in graph.ties if before in inputs and after in outputs and before not in outputs)

"""How large the integer program of a graph is; this needs no SciPy, which takes long to import."""

from __future__ import annotations

from spmdctx.search.solver.problem.graph import CostGraph

ROOT_WORK = 150_000
"""Additions that take as long as the relaxation, for each variable."""


def num_variables(graph: CostGraph) -> int:
    """Returns the number of variables of a graph's program."""
    pairs = sum(graph.size(node) * graph.size(other) for node in graph.nodes() for other in graph.links[node] if node < other)
    return pairs + sum(graph.size(node) for node in graph.nodes())

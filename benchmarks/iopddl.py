"""The planner's solver on the public instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism.

    python -m benchmarks.iopddl FILE... [--seconds 60] [--json]

A file is one instance in the contest's JSON, gzipped or not. Prints for each the cost of the best choice that fits, a lower bound and the
seconds that reading and solving took; a cost of null says that none was found. Exits with 1 if one was not found.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray
from spmdctx.search.solver.problem.problem import Edge, Life, Memory, Problem, Solution
from spmdctx.search.solver.solve import solve

FORBIDDEN = 1e17
"""Costs from here on stand for infinity."""
EFFORT = 4
SHARE = 0.93
"""Share of the seconds left that the solver is given; checking the answer takes the rest."""


class Row(NamedTuple):
    """One instance: cost and bound are None where nothing was found."""

    name: str
    nodes: int
    edges: int
    cost: float | None
    lower_bound: float | None
    gap: float | None
    usage: float | None
    limit: float | None
    seconds: float
    cpu_seconds: float
    peak_gb: float


class _Arrays:
    """Equal lists of costs become one array."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], FloatArray] = {}

    def of(self, numbers: list[int], shape: tuple[int, ...]) -> FloatArray:
        key = (shape, *numbers)
        array = self._known.get(key)
        if array is None:
            array = np.array(numbers, dtype=np.float64).reshape(shape)
            array[array >= FORBIDDEN] = np.inf
            self._known[key] = array
        return array


def read(path: Path) -> Problem:
    """The problem of an instance file."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    stored = json.loads(text)["problem"]
    arrays, nodes, edges = _Arrays(), stored["nodes"], stored["edges"]
    costs = tuple(arrays.of(numbers, (len(numbers),)) for numbers in nodes["costs"])
    tables = tuple(
        Edge(left, right, arrays.of(numbers, (len(costs[left]), len(costs[right]))))
        for (left, right), numbers in zip(edges["nodes"], edges["costs"], strict=True)
    )
    limit = stored.get("usage_limit")
    if limit is None:
        return Problem(costs, tables)
    usages = tuple(arrays.of(numbers, (len(numbers),)) for numbers in nodes["usages"])
    lives = tuple(Life(node, *interval) for node, interval in enumerate(nodes["intervals"]) if interval[0] < interval[1])
    return Problem(costs, tables, Memory(usages, lives, float(limit)))


def check(problem: Problem, states: tuple[int, ...]) -> tuple[float, float | None]:
    """Cost and highest usage of a choice, computed afresh; raises `AssertionError` if it is forbidden or does not fit."""
    cost = sum(float(array[state]) for array, state in zip(problem.costs, states, strict=True))
    cost += sum(float(table[states[left], states[right]]) for left, right, table in problem.edges)
    assert np.isfinite(cost), "forbidden pair"
    if problem.memory is None or not problem.memory.lives:
        return cost, None
    change = np.zeros(max(life.end for life in problem.memory.lives) + 1)
    for node, start, end, _ in problem.memory.lives:
        used = problem.memory.usages[node][states[node]]
        change[start] += used
        change[end] -= used
    most = float(np.cumsum(change).max())
    assert most <= problem.memory.limit, "over the limit"
    return cost, most


@contextmanager
def without_collection() -> Iterator[None]:
    """Millions of small lists and no cycles: looking for cycles takes longer than solving."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run(path: Path, seconds: float) -> Row:
    """Solves one instance within about `seconds`, reading included."""
    start, start_cpu = time.monotonic(), time.process_time()
    problem = read(path)
    left = seconds - (time.monotonic() - start)
    found = solve(problem, effort=EFFORT, deadline=max(SHARE * left, 0.5))
    limit = None if problem.memory is None else problem.memory.limit
    size = (path.name, len(problem.costs), len(problem.edges))
    cost = bound = gap = usage = None
    if isinstance(found, Solution):
        cost, usage = check(problem, found.states)
        bound = found.lower_bound
        gap = (cost - bound) / abs(cost) if cost else 0.0
    return Row(*size, cost, bound, gap, usage, limit, time.monotonic() - start, time.process_time() - start_cpu, peak_gb())


def peak_gb() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="time per instance")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    rows = []
    for path in options.files:
        with without_collection():
            row = run(path, options.seconds)
        rows.append(row)
        if options.json:
            print(json.dumps(row._asdict()), flush=True)
        elif row.cost is None:
            print(f"{row.name}: found nothing that fits in {row.seconds:.1f} s", flush=True)
        else:
            print(
                f"{row.name}: cost {row.cost:,.0f}  bound {row.lower_bound:,.0f}  gap {row.gap:.2%}  {row.seconds:.1f} s",
                flush=True,
            )
    return int(any(row.cost is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())

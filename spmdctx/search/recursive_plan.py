"""recursive_programming from request to plan: the search, the memory budget, and the suggested stage count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmdctx.cost.topology import Topology
from spmdctx.ir import Assignment, Graph, Role
from spmdctx.mesh import LogicalMesh
from spmdctx.search.memory import StepMemory, peak, step_memory
from spmdctx.search.modes import Request, Setup
from spmdctx.search.price import price
from spmdctx.search.recursive import Recursive, RecursiveOptions
from spmdctx.search.recursive_memory import PeakUse, fit
from spmdctx.search.recursive_stages import suggest_stages
from spmdctx.search.roofline import local_bytes


class _Peaks:
    """The peak of assignments of one step."""

    def __init__(self, graph: Graph, scopes: Sequence[int], topology: Topology, loose: frozenset[int], donated: frozenset[int]) -> None:
        self._graph, self._scopes, self._topology, self._loose, self._donated = graph, scopes, topology, loose, donated
        self._memory: StepMemory | None = None

    def __call__(self, assignment: Assignment, mesh: LogicalMesh) -> PeakUse:
        if self._memory is None:
            self._memory = step_memory(self._graph, self._scopes, self._donated)
        graph, lives = self._graph, self._memory.lives
        sizes = [local_bytes(value, sharding, mesh) for value, sharding in zip(graph.values, assignment.values, strict=True)]
        time = peak(lives, sizes, len(graph.ops)).time
        alive = tuple([life.value for life in lives if life.start <= time <= life.end])
        bill = price(graph, self._scopes, self._loose, (), assignment, mesh, self._topology, self._donated)
        return PeakUse(bill.memory_bytes, time, alive)


def plan_recursive(
    graph: Graph,
    scopes: Sequence[int],
    request: Request,
    topology: Topology,
    loose: frozenset[int],
    donated: frozenset[int],
    options: RecursiveOptions,
) -> tuple[Setup, Assignment]:
    """Finds the mesh, where the user gave none, and an assignment on it.

    Args:
        graph: the traced step.
        scopes: per op the computation that it belongs to (`Program.scopes`).
        request: what the user asked for; more than one device.
        topology: the machine.
        loose: values that depend on no input.
        donated: inputs whose memory the step may reuse.
        options: see there.

    Returns:
        The set-up on the mesh that was found, and the assignment.

    Raises:
        StrategyError: pins that do not fit the devices.
        InfeasibleError: no plan that fits in the budget was found.
    """
    search = Recursive(graph, scopes, request, topology, loose, options)
    peaks = _Peaks(graph, scopes, topology, loose, donated)
    if options.memory_bytes is not None:
        setup, assignment = fit(search, options.memory_bytes, peaks)
    else:
        setup, assignment = search.outcomes[0].setup, search.assignment(search.outcomes[0])
    # The batch lies as the plan has it; nobody asked for anything else.
    notes = [note for note in setup.notes if request.dataset is not None or not note.startswith("Batch leaf")]
    if options.max_stages:
        capacity = options.memory_bytes or topology.memory_bytes
        stages = suggest_stages(graph, assignment, setup.mesh, peaks(assignment, setup.mesh).bytes, options.max_stages, capacity)
        notes.append(f"auto_pipeline suggests {stages} of at most {options.max_stages} pipeline stages.")
    seeds = {value: axes for value, axes in setup.seeds.items() if graph.values[value].role is not Role.BATCH}
    return replace(setup, seeds=seeds, notes=notes), assignment

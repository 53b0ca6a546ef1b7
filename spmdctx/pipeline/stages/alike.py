"""Plans programs that are alike once: stages in the middle of a model differ by the names of their parameters alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from spmdctx.errors import InfeasibleError
from spmdctx.ir.sharding import Assignment
from spmdctx.pipeline.stages.plans import Planned, Planner
from spmdctx.plan.data import OpTable
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.select import Shared
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings


class AlikePlanner:
    """A planner that remembers its plans by what the programs compute, what is pinned in them, and what they are planned for."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._known: dict[Any, dict[float, Planned]] = {}
        self._failed: dict[Any, InfeasibleError] = {}
        self._precedents = Precedents()
        self._begun: dict[Any, Shared] = {}

    def roughly(self, captured: Captured, settings: Settings, *, given: Assignment | None = None, **_: Any) -> Planned:
        """Plans a program only to tell how plans compare."""
        return self(captured, settings, is_rough=True, given=given)

    def __call__(
        self, captured: Captured, settings: Settings, *, is_rough: bool = False, given: Assignment | None = None, **_: Any
    ) -> Planned:
        """Plans a program, or gives the plan of one that is alike, with the names of this one.

        Searches start from plans before it, and share what no budget changes with those of the same program in other rooms.
        """
        how: dict[str, Any] = {"is_rough": is_rough, "given": given, "precedents": self._precedents}
        if settings.layerwise_parallel:
            # Those go by the names of parameters.
            return self._planner(captured, settings, **how)
        # Given splits are kept in any room.
        room = math.inf if settings.memory_bytes is None or given is not None else settings.memory_bytes
        alike = (*_key(captured, settings), is_rough, given)
        plans, key = self._known.setdefault(alike, {}), (*alike, room)
        # A room changes nothing if the plan of a larger one is within it.
        known = [own for own in plans if own == room or (own > room and plans[own].plan.safe_memory_bytes <= room)]
        if known:
            return _renamed(plans[min(known)], captured, settings)
        if key in self._failed:
            raise self._failed[key]
        begun = self._begun.setdefault(alike, Shared())
        try:
            found = plans[room] = self._planner(captured, settings, begun=begun, **how)
        except InfeasibleError as error:
            self._failed[key] = error
            raise
        return found


def _key(captured: Captured, settings: Settings) -> tuple[Any, ...]:
    inputs = tuple((leaf.role, leaf.donated, leaf.metadata) for leaf in captured.inputs)
    outputs = tuple(leaf.carried_from for leaf in captured.outputs)
    program = captured.built()
    pins = repr((program.user_pins, program.graph.accumulators))
    return (
        *(program.graph.body, inputs, outputs, captured.mesh_axes, pins),
        *(settings.num_devices, settings.mesh, settings.topology),
        *(settings.context.dataset_strategy, settings.context.parallel_mode),
    )


def _renamed(known: Any, captured: Captured, settings: Settings) -> Planned:
    program, plan = captured.built_for(settings.topology.compiler), known.plan
    inputs = tuple(row._replace(path=leaf.path) for row, leaf in zip(plan.inputs, captured.inputs, strict=True))
    outputs = tuple(row._replace(path=leaf.path) for row, leaf in zip(plan.outputs, captured.outputs, strict=True))
    table = OpTable.of(program.graph, known.assignment)
    own = replace(plan, fingerprint=program.graph.fingerprint, inputs=inputs, outputs=outputs, op_table=table)
    return replace(known, program=program, plan=own)  # type: ignore[no-any-return]  # `replace` of a protocol's class

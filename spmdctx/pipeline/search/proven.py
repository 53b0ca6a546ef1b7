"""Bounds on pipelines that are proven under the cost model: by what devices have to compute, however programs are split.

The cost model gives an op that n devices share no less than an n-th of `least_device_s` on each, and adds no seconds below zero for what
devices exchange. So a program takes at least the n-th of what its ops add up to. Two bounds follow.

*These chunks.* Their programs are known, so all of their ops count, and `least_makespan_s` turns the seconds of tasks into those of a step.

*Any cut.* Other cuts have other programs, but every one of them multiplies the matrices that the loss and its gradients multiply without
a cut. A cut differentiates by all that crosses it, and the chain rule then visits at least the equations that it visits without a cut.
Products lie on the line, so no chunk copies them. Only what checkpoints recompute may be less: what crosses a cut inside of a checkpointed
region is kept. A cut opens one region at most, and saves at most the region's own products. So of the products without a cut, those of the
largest regions are left out, one for each cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.extend.core as jexc
import numpy as np

from spmdctx.cost.roofline import least_device_s, least_matrix_s
from spmdctx.ir.analysis.incidence import executions
from spmdctx.ir.analysis.kinds import op_kinds
from spmdctx.ir.graph import Graph, Op, Role
from spmdctx.machine.topology import Topology
from spmdctx.pipeline.schedule.bounds import Bounds, least_makespan_s, least_share
from spmdctx.pipeline.schedule.tasks import Costs, Kind, Schedule
from spmdctx.pipeline.stages.plans import PlannedChunk
from spmdctx.pipeline.stages.staging import CutLoss
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.program import Program
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import counted, seconds_text

_MANY = 3.0
"""What takes so many times as long as its bound is said to, in place of how much more it takes."""


class LeastWork(NamedTuple):
    """What every cut of a loss multiplies for one micro-batch.

    Attributes:
        device_s: the seconds of devices that the products of both passes take without a cut.
        regions: those of the products of each checkpointed region that a cut can open, the largest first.
    """

    device_s: float
    regions: tuple[float, ...]

    def in_chunks(self, num_chunks: int) -> float:
        """Returns the seconds of devices that the products take at least in so many chunks, or in fewer."""
        return self.device_s - math.fsum(self.regions[: num_chunks - 1])


def least_work(loss: CutLoss, topology: Topology) -> LeastWork:
    """Returns what every cut of a loss multiplies."""
    bodies = [region.eqn.params["jaxpr"] for region in {id(own): own for own in loss.line.opened.region_of.values()}.values()]
    # JAX traces layers that are alike once.
    alike = {id(body): body for body in bodies}
    sizes = {key: _products_s(jexc.ClosedJaxpr(body, [None] * len(body.constvars)), topology) for key, body in alike.items()}
    return LeastWork(_products_s(loss.step.loss.whole, topology), tuple(sorted((sizes[id(body)] for body in bodies), reverse=True)))


def least_of_cuts_s(work: LeastWork, schedule: Schedule, num_devices: int) -> float:
    """Returns seconds below which no cut for the stages and chunks of a schedule runs, by any order of as many kinds of task.

    Args:
        work: of the loss.
        schedule: its chunks, stages, micro-batches, and whether gradients of weights are tasks of their own.
        num_devices: of all stages.
    """
    share = least_share(schedule.stage_of, schedule.num_micro, splits_backward=schedule.splits_backward)
    return share * work.in_chunks(schedule.num_chunks) * schedule.num_stages / num_devices


def least_of_all_s(work: LeastWork, num_chunks: int, num_micro: int, single: Program | None, settings: Settings) -> float:
    """Returns seconds below which no step runs, on any number of stages and by any schedule.

    On average over all devices, each has its part of the products.

    Args:
        work: of the loss.
        num_chunks: the most chunks into which it is cut.
        num_micro: micro-batches.
        single: the step without a pipeline; None if it cannot be planned.
        settings: of the step: its devices, and the machine.
    """
    cut_s = num_micro * work.in_chunks(num_chunks)
    alone_s = math.inf if single is None else _device_s(single, settings.topology, least_matrix_s)
    return min(cut_s, alone_s) / settings.num_devices


def least_of_chunks_s(planned: Sequence[PlannedChunk], schedule: Schedule, topology: Topology) -> float:
    """Returns seconds below which no splits of the programs of these chunks, and no order of their tasks, run."""
    costs = []
    for chunk in planned:
        count = chunk.mesh.num_devices
        seconds = {kind: _device_s(task.planned.program, topology, least_device_s) / count for kind, task in chunk.tasks.items()}
        costs.append(Costs(*(seconds.get(kind, 0.0) for kind in Kind)))
    return least_makespan_s(costs, schedule.stage_of, schedule.num_micro, splits_backward=schedule.splits_backward)


def _products_s(closed: jexc.ClosedJaxpr, topology: Topology) -> float:
    return _device_s(build(closed, [Argument("", Role.ARGUMENT)] * len(closed.jaxpr.invars)), topology, least_matrix_s)


def _device_s(program: Program, topology: Topology, price: Callable[[Graph, Op, Topology], float]) -> float:
    """Returns the seconds of devices that a program takes at least; values that depend on no input cost nothing."""
    graph, free = program.graph, program.from_literals
    kinds = op_kinds(graph)
    each = np.array([price(graph, op, topology) for op in kinds.firsts], dtype=np.float64)
    counts = executions(graph).astype(np.float64)
    makers = [graph.producers[value] for value in free if value in graph.producers]
    counts[[maker for maker in makers if free.issuperset(graph.ops[maker].results)]] = 0
    return math.fsum((each[kinds.numbers] * counts).tolist())


def bounds_note(schedule: Schedule, makespan_s: float, bounds: Bounds) -> str:
    """Returns what is proven of a schedule that takes so many seconds, and what is estimated."""
    stages, chunks = counted(schedule.num_stages, "stage"), counted(schedule.num_chunks, "chunk")
    parts = "in two parts" if schedule.splits_backward else "in one part"
    text = (
        f"Proven under the cost model: these chunks run {schedule.num_micro} micro-batches in no less than "
        f"{seconds_text(bounds.chunks_s)}, however their programs are split and their tasks are ordered, since devices compute so long; "
        f"this schedule takes {_more(makespan_s, bounds.chunks_s)}. No cut into {chunks} on {stages} takes less than "
        f"{seconds_text(bounds.cuts_s)}, by any splits and any order with backward passes {parts}, since its matrix products take so "
        f"long; {_more(makespan_s, bounds.cuts_s)}. Both count nothing for what devices exchange, and leave out what follows the loss."
    )
    if bounds.estimated_s is None:
        return text
    return (
        f"{text} An estimate that counts it, and is no proof, says that no cut takes less than {seconds_text(bounds.estimated_s)}; "
        f"{_more(makespan_s, bounds.estimated_s)}."
    )


def choice_note(seconds: float, least_s: float, most: int) -> str:
    """Returns what is proven of all numbers of stages up to `most`, of which the chosen one takes so many seconds."""
    return (
        f"Proven under the cost model: on no number of stages up to {most}, by none of these schedules and by no splits, a step takes "
        f"less than {seconds_text(least_s)}, since its matrix products take so long on all devices. The chosen plan takes "
        f"{_more(seconds, least_s)}."
    )


def _more(seconds: float, least_s: float) -> str:
    ratio = max(1.0, seconds / least_s) if least_s else math.inf
    return f"{ratio - 1:.1%} more" if ratio < _MANY else f"{ratio:.3g} times as long"

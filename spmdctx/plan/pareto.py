"""Weighs time against memory: plans a step under several budgets on several numbers of devices, and finds the plans on the front.

A point is on the front if no other point on at most as many devices needs at most as much memory and at most as much time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from spmdctx.errors import InfeasibleError, StrategyError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.data import AnyPlan

FRACTIONS = (0.75, 0.5, 0.375, 0.25, 0.125)
"""The default budgets, as fractions of what the fastest plan on that many devices needs."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One plan: its budget (None for none), the memory that it needs at the peak, and the time of a step.

    `also_limit_bytes` are the other budgets under which the plan needs and takes the same, the largest first.
    """

    num_devices: int
    mesh: LogicalMesh
    memory_limit_bytes: int | None
    memory_bytes: int
    total_s: float
    also_limit_bytes: tuple[int, ...] = ()

    @property
    def device_s(self) -> float:
        """The device-seconds of a step: what it costs, as opposed to how long it takes."""
        return self.num_devices * self.total_s


@dataclass(frozen=True, slots=True)
class Unmet:
    """A budget that no plan meets on that many devices, or strategies that do not fit them, and the planner's reason."""

    num_devices: int
    memory_limit_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class ParetoData(Generic[AnyPlan]):
    """All points, by number of devices, then the fastest first; `plans` has their plans in the same order."""

    points: tuple[ParetoPoint, ...]
    unmet: tuple[Unmet, ...]
    plans: tuple[AnyPlan, ...]

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The points that no other one beats in devices, memory and time together."""
        return tuple(point for point in self.points if not any(_beats(other, point) for other in self.points))


def plan_again(
    replan: Callable[..., AnyPlan],
    own: int,
    memory_bytes: Sequence[int],
    num_devices: Sequence[int],
    answer: Callable[[tuple[ParetoPoint, ...], tuple[Unmet, ...], tuple[AnyPlan, ...]], Answer],
) -> Answer:
    """Plans a step again under each budget on each number of devices; see `Plan.pareto`.

    Args:
        replan: plans the step again, as `PlanData.replan` does.
        own: the number of devices of the first plan.
        memory_bytes: budgets per device.
        num_devices: device counts.
        answer: makes the result from the points, the budgets that no plan meets, and the plans.
    """
    counts = tuple(num_devices) or tuple(dict.fromkeys((max(own // 2, 1), own, own * 2)))
    rows: list[tuple[ParetoPoint, AnyPlan]] = []
    unmet: list[Unmet] = []
    for count in sorted(set(counts)):
        rows += _on(replan, count, tuple(memory_bytes), unmet)
    return answer(tuple(point for point, _ in rows), tuple(unmet), tuple(made for _, made in rows))


def _on(replan: Callable[..., AnyPlan], count: int, budgets: tuple[int, ...], unmet: list[Unmet]) -> list[tuple[ParetoPoint, AnyPlan]]:
    """Returns the points on one number of devices, with the one without a budget.

    Budgets below one that no plan met are not tried. Without a budget a search keeps to the memory of the machine, so a larger budget may
    still give another plan.
    """
    found: dict[tuple[int, float], tuple[ParetoPoint, AnyPlan]] = {}

    def attempt(limit: int | None) -> AnyPlan | None:
        try:
            made = replan(memory_bytes=limit, num_devices=count)
        except (InfeasibleError, StrategyError) as error:
            unmet.append(Unmet(count, limit, error.summary))
            return None
        point = ParetoPoint(count, made.logical_mesh, limit, made.cost.memory_bytes, made.cost.total_s)
        known, plan = found.setdefault((point.memory_bytes, point.total_s), (point, made))
        if known is not point and limit is not None:
            found[point.memory_bytes, point.total_s] = replace(known, also_limit_bytes=(*known.also_limit_bytes, limit)), plan
        return made

    fastest = attempt(None)
    if fastest is None:
        return []
    for limit in sorted(set(budgets), reverse=True) or [int(fastest.cost.memory_bytes * part) for part in FRACTIONS]:
        if attempt(limit) is None:
            break
    return sorted(found.values(), key=lambda row: (row[0].total_s, row[0].memory_bytes))


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    mine, its = ((point.num_devices, point.memory_bytes, point.total_s) for point in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

"""Weighs time against memory: plans a step under several budgets on several numbers of devices, and finds the plans on the front.

A point is on the front if no other point on at most as many devices needs at most as much memory and at most as much time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from spmdctx.errors import InfeasibleError, StrategyError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.plan.data import AnyPlan, PeakForm, PeakNote

FRACTIONS = (0.75, 0.5, 0.375, 0.25, 0.125)
"""The default budgets, as fractions of what the fastest plan on that many devices needs."""

_LOOSE_GAP = 2e-3
"""Gap above which a plan counts as not proven."""

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


Progress = Callable[[ParetoPoint | Unmet], None]


@dataclass(frozen=True, slots=True)
class ParetoData(Generic[AnyPlan]):
    """All points, by number of devices, then the fastest first; `plans` has their plans in the same order.

    `notes` say what was left out.
    """

    points: tuple[ParetoPoint, ...]
    unmet: tuple[Unmet, ...]
    plans: tuple[AnyPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The points that no other one beats in devices, memory and time together."""
        return tuple(point for point in self.points if not any(_beats(other, point) for other in self.points))


@runtime_checkable
class Brief(Protocol):
    """A way to plan again that can make many plans with little work on each."""

    def briefly(self) -> Callable[..., Any]:
        """Returns a replanner that spends little work on each plan."""
        ...


class Ask(NamedTuple, Generic[AnyPlan]):
    """What is asked.

    Attributes:
        replan: plans the step again, as `PlanData.replan` does.
        own: the number of devices of the first plan.
        memory_bytes: budgets per device.
        num_devices: device counts.
        progress: takes each point and each budget that no plan meets, as it is found.
        is_brief: whether `replan` spends little work on each plan.
    """

    replan: Callable[..., AnyPlan]
    own: int
    memory_bytes: Sequence[int]
    num_devices: Sequence[int]
    progress: Progress
    is_brief: bool = True


def plan_again(ask: Ask[AnyPlan], answer: Callable[..., Answer]) -> Answer:
    """Plans a step again under each budget on each number of devices; see `Plan.pareto`.

    An interrupt of the keyboard ends it; what was found until then is the answer.

    Args:
        ask: see there.
        answer: makes the result from the points, the budgets that no plan meets, the plans, and notes.
    """
    counts = sorted(set(ask.num_devices or (max(ask.own // 2, 1), ask.own, ask.own * 2)))
    found: dict[int, _OnDevices[AnyPlan]] = {}
    notes = []
    try:
        for count in counts:
            found[count] = _OnDevices(ask, count)
            found[count].run()
    except KeyboardInterrupt:
        planned = [str(count) for count in counts if count not in found or not found[count].is_done]
        notes.append(f"Interrupted: budgets on {', '.join(planned)} devices were not all planned.")
    rows = [row for own in found.values() for row in own.rows()]
    unmet = tuple(one for own in found.values() for one in own.unmet)
    loose = sum((made.gap or 0.0) > _LOOSE_GAP for _, made in rows) if ask.is_brief else 0
    if loose:
        notes.append(
            f"Little work is spent on each budget: {loose} of {len(rows)} plans are not proven to be within {_LOOSE_GAP:.1%} of the "
            "cheapest. A plan made with memory_bytes= has the whole search."
        )
    return answer(tuple(point for point, _ in rows), unmet, tuple(made for _, made in rows), tuple(notes))


_OVER = (PeakForm.OVER_BUDGET, PeakForm.MAY_BE_OVER)


class _OnDevices(Generic[AnyPlan]):
    """The points on one number of devices, with the one without a budget.

    Budgets below one that no plan met are not tried. Without a budget a search keeps to the memory of the machine, so a larger budget may
    still give another plan.
    """

    def __init__(self, ask: Ask[AnyPlan], count: int) -> None:
        self._ask, self._count = ask, count
        self._found: dict[tuple[int, float], tuple[ParetoPoint, AnyPlan]] = {}
        self.unmet: list[Unmet] = []
        self.is_done = False

    def run(self) -> None:
        """Plans without a budget, then under smaller and smaller ones."""
        fastest = self._attempt(None)
        if fastest is not None:
            budgets = sorted(set(self._ask.memory_bytes), reverse=True)
            for limit in budgets or [int(fastest.safe_memory_bytes * part) for part in FRACTIONS]:
                if self._attempt(limit) is None:
                    break
        self.is_done = True

    def rows(self) -> list[tuple[ParetoPoint, AnyPlan]]:
        """Lists the points with their plans, the fastest first."""
        kept: list[tuple[ParetoPoint, AnyPlan]] = []
        for point, made in sorted(self._found.values(), key=lambda row: (row[0].total_s, row[0].memory_bytes)):
            # A brief search may find a better plan under a smaller budget, which serves the larger one too.
            limit = point.memory_limit_bytes
            better = next((place for place, (_, own) in enumerate(kept) if limit is not None and own.safe_memory_bytes <= limit), None)
            if better is None or kept[better][0].total_s == point.total_s:
                kept.append((point, made))
            else:
                own, plan = kept[better]
                also = sorted((*own.also_limit_bytes, *[one for one in (limit, *point.also_limit_bytes) if one]), reverse=True)
                kept[better] = replace(own, also_limit_bytes=tuple(also)), plan
        return kept

    def _attempt(self, limit: int | None) -> AnyPlan | None:
        try:
            made = self._ask.replan(memory_bytes=limit, num_devices=self._count)
        except (InfeasibleError, StrategyError) as error:
            self.unmet.append(Unmet(self._count, limit, error.summary))
            self._ask.progress(self.unmet[-1])
            return None
        if limit is not None and made.safe_memory_bytes > limit:
            why = next((note for note in made.notes if isinstance(note, PeakNote) and note.form in _OVER), "")
            self.unmet.append(Unmet(self._count, limit, str(why) or "The predicted peak is over the budget."))
            self._ask.progress(self.unmet[-1])
            return None
        point = ParetoPoint(self._count, made.whole_mesh, limit, made.cost.memory_bytes, made.cost.total_s)
        known, plan = self._found.setdefault((point.memory_bytes, point.total_s), (point, made))
        if known is not point and limit is not None:
            known = replace(known, also_limit_bytes=(*known.also_limit_bytes, limit))
            self._found[point.memory_bytes, point.total_s] = known, plan
        self._ask.progress(point)
        return made


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    mine, its = ((point.num_devices, point.memory_bytes, point.total_s) for point in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

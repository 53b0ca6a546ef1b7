"""What theory says of the time in which stages wait, and of the time that no order of tasks can save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.pipeline.schedule.tasks import Costs


class Bounds(NamedTuple):
    """Seconds of a schedule below which there is none.

    Attributes:
        chunks_s: proven for the same chunks, by any splits of their programs and any order of their tasks.
        cuts_s: proven for any cut into as many chunks on as many stages, too.
        estimated_s: estimated for any cut, what devices exchange included; None if a stage's plan has no bound.
    """

    chunks_s: float
    cuts_s: float
    estimated_s: float | None


def bubble_of(name: str, num_stages: int, num_micro: int, costs: Costs, num_rounds: int = 1) -> float | None:
    """Returns the share of the step in which stages wait, for stages alike and moves that take no time; None if there is no formula.

    Sources: Narayanan et al. 2021 (gpipe, 1f1b, interleaved 1f1b), Qi et al. 2024 (zero_bubble_h1, if W takes at most as long as I).

    Args:
        name: of the schedule.
        num_stages: p.
        num_micro: m.
        costs: of a whole stage and one micro-batch.
        num_rounds: chunks on a stage.
    """
    filled = num_stages - 1
    if name in ("gpipe", "1f1b"):
        return filled / (num_micro + filled)
    if name in ("interleaved 1f1b", "interleaved gpipe"):
        return filled / (num_rounds * num_micro + filled)
    if name == "zero_bubble_h1":
        idle = filled * (costs.forward + costs.input - costs.weight)
        return idle / (num_micro * (costs.forward + costs.input + costs.weight) + idle)
    return None


def least_makespan_s(costs: Sequence[Costs], stage_of: Sequence[int], num_micro: int, *, splits_backward: bool) -> float:
    """Returns seconds below which no order of the tasks ends, moves between stages left out.

    Take a stage, and of its chunks all from chunk c on. No task of them begins before a micro-batch has passed forwards through the
    chunks before c. All of them run one after the other. The last one that passes something back is a backward pass, and its micro-batch
    has still to pass back through the chunks before c. Where gradients of weights are tasks of their own, nothing passes back after them.

    Args:
        costs: of each chunk.
        stage_of: the stage of each chunk.
        num_micro: micro-batches.
        splits_backward: whether the gradients of weights are tasks of their own.
    """
    forward = np.array([own.forward for own in costs])
    back = np.array([own.input if splits_backward else own.backward for own in costs])
    late = np.array([own.weight if splits_backward else 0.0 for own in costs])
    least = 0.0
    for own in _ends_of_stages(stage_of):
        before, run = slice(0, own[0]), num_micro * (forward + back)[own].sum()
        through = forward[before].sum()
        least = max(least, through + run + back[before].sum(), through + run + num_micro * late[own].sum())
    return float(least)


def least_share(stage_of: Sequence[int], num_micro: int, *, splits_backward: bool) -> float:
    """Returns the least makespan of any cut into such chunks, as a multiple of the seconds that all of them take for one micro-batch.

    With chunks of t seconds for both passes, `least_makespan_s` takes at least `sum_(r<c) t_r + m sum(t)` over the chunks of a stage
    from c on. The largest of these sums is at least any weighted mean of them, so at least the smallest factor that a chunk's seconds
    have in the mean. A linear program gives the best weights. Without rounding, p chunks on p stages have 1 / (1 - (1 - 1/m)^p).
    Where gradients of weights are tasks of their own, some stage has at least the mean work.

    Args:
        stage_of: the stage of each chunk.
        num_micro: micro-batches, m.
        splits_backward: whether the gradients of weights are tasks of their own.
    """
    num_chunks, num_stages = len(stage_of), max(stage_of) + 1
    mean = num_micro / num_stages
    if splits_backward:
        return mean
    rows = []
    for own in _ends_of_stages(stage_of):
        row = np.zeros(num_chunks)
        row[: own[0]], row[own] = 1.0, num_micro
        rows.append(row)
    # The least L with `row . t <= L` for each row, and chunks of one second in all.
    from scipy.optimize import linprog  # as late as possible: it takes long to import

    found = linprog(
        np.append(np.zeros(num_chunks), 1.0),
        A_ub=np.column_stack([rows, -np.ones(len(rows))]),
        b_ub=np.zeros(len(rows)),
        A_eq=[np.append(np.ones(num_chunks), 0.0)],
        b_eq=[1.0],
    )
    weights = np.maximum(-found.ineqlin.marginals, 0.0)
    return max(mean, float(np.min(weights @ np.array(rows)) / weights.sum()))


def _ends_of_stages(stage_of: Sequence[int]) -> Iterator[list[int]]:
    """Gives the chunks of each stage, and those that are left without the first, the first two, and so on."""
    for stage in range(max(stage_of) + 1):
        own = [chunk for chunk, place in enumerate(stage_of) if place == stage]
        yield from (own[first:] for first in range(len(own)))

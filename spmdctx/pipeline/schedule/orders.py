"""GPipe, 1F1B and interleaved 1F1B: schedules whose order depends on nothing but their counts."""

from __future__ import annotations

from spmdctx.errors import ContextError
from spmdctx.pipeline.schedule.tasks import Kind, Schedule, Task


def gpipe(num_stages: int, num_micro: int) -> Schedule:
    """Runs all forward passes, then all backward passes (Huang et al. 2019). All micro-batches are in flight at once."""
    micros = range(num_micro)
    stages = [
        (*(Task(Kind.FORWARD, stage, micro) for micro in micros), *(Task(Kind.BACKWARD, stage, micro) for micro in micros))
        for stage in range(num_stages)
    ]
    return Schedule("gpipe", tuple(stages), tuple(range(num_stages)), num_micro)


def one_f_one_b(num_stages: int, num_micro: int) -> Schedule:
    """Runs one backward pass after each forward pass as soon as it can (Narayanan et al. 2021).

    Stage s of p has at most p - s micro-batches in flight.
    """
    stages = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_micro)
        stages.append(_alternating([(stage, micro) for micro in range(num_micro)], [(stage, micro) for micro in range(num_micro)], ahead))
    return Schedule("1f1b", tuple(stages), tuple(range(num_stages)), num_micro)


def interleaved(num_stages: int, num_micro: int, num_rounds: int) -> Schedule:
    """Runs 1F1B over several chunks on each stage (Narayanan et al. 2021): chunk c lies on stage c mod p.

    Args:
        num_stages: p.
        num_micro: micro-batches; a multiple of p.
        num_rounds: chunks on each stage.

    Raises:
        ContextError: micro-batches do not fill rounds of p.
    """
    stages = []
    for stage, (forward, backward) in enumerate(_turns(num_stages, num_micro, num_rounds)):
        ahead = min(2 * (num_stages - stage - 1) + (num_rounds - 1) * num_stages, len(forward))
        stages.append(_alternating(forward, backward, ahead))
    return Schedule("interleaved 1f1b", tuple(stages), _in_turn(num_stages, num_rounds), num_micro)


def interleaved_gpipe(num_stages: int, num_micro: int, num_rounds: int) -> Schedule:
    """Runs all forward passes, then all backward passes, over several chunks on each stage: chunk c lies on stage c mod p.

    Raises:
        ContextError: micro-batches do not fill rounds of p.
    """
    turns = _turns(num_stages, num_micro, num_rounds)
    stages = tuple(_alternating(forward, backward, len(forward)) for forward, backward in turns)
    return Schedule("interleaved gpipe", stages, _in_turn(num_stages, num_rounds), num_micro)


_Passes = list[tuple[int, int]]
"""Passes in their order, each as (chunk, micro-batch)."""


def _turns(num_stages: int, num_micro: int, num_rounds: int) -> list[tuple[_Passes, _Passes]]:
    """Returns the forward and backward passes of each stage: p micro-batches in one chunk, then in the next chunk.

    Raises:
        ContextError: micro-batches do not fill rounds of p.
    """
    if num_micro % num_stages:
        raise ContextError(
            "An interleaved pipeline runs micro-batches in groups of one for each stage.",
            got=f"{num_micro} micro-batches over {num_stages} stages",
            need=f"a multiple of {num_stages}",
            fix="change the number of micro-batches, or set pipeline_interleave=False",
        )
    found = []
    for stage in range(num_stages):
        forward, backward = [], []
        for number in range(num_micro * num_rounds):
            group, place = divmod(number, num_stages * num_rounds)
            turn, micro = place // num_stages, group * num_stages + place % num_stages
            forward.append((turn * num_stages + stage, micro))
            backward.append(((num_rounds - 1 - turn) * num_stages + stage, micro))
        found.append((forward, backward))
    return found


def _in_turn(num_stages: int, num_rounds: int) -> tuple[int, ...]:
    """Returns the stage of each chunk."""
    return tuple(chunk % num_stages for chunk in range(num_stages * num_rounds))


def _alternating(forward: _Passes, backward: _Passes, ahead: int) -> tuple[Task, ...]:
    """Runs `ahead` forward passes, then one and one, then the backward passes that are left; each is (chunk, micro-batch)."""
    tasks = [Task(Kind.FORWARD, *one) for one in forward[:ahead]]
    for first, last in zip(forward[ahead:], backward, strict=False):
        tasks += [Task(Kind.FORWARD, *first), Task(Kind.BACKWARD, *last)]
    return (*tasks, *(Task(Kind.BACKWARD, *one) for one in backward[len(forward) - ahead :]))

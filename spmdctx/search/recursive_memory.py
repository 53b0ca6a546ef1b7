"""A budget of recursive_programming: what is stored is split further, then what is alive at the peak, until the plan fits.

The plans that were compared are tried first, the cheapest first. Where none fits, parameters and optimizer state take all axes
that are left in each of them; where that is not enough, the largest values alive at the peak do so too, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spmdctx.errors import InfeasibleError
from spmdctx.ir import Assignment, item_bytes
from spmdctx.mesh import LogicalMesh, local_shape
from spmdctx.search.modes import Setup
from spmdctx.search.propagation import settle
from spmdctx.search.recursive import Outcome, Recursive
from spmdctx.search.recursive_storage import free_axes, lengthened, split_block
from spmdctx.search.space import Space

_AT_ONCE = 4
_ROUNDS = 16
_NAMED = 3


class PeakUse(NamedTuple):
    """The peak of an assignment: its bytes, the op at which it is, and the values that are alive there."""

    bytes: int
    op: int
    alive: tuple[int, ...]


PeakOf = Callable[[Assignment, LogicalMesh], PeakUse]


def fit(search: Recursive, budget: int, peak_of: PeakOf) -> tuple[Setup, Assignment]:
    """The cheapest plan found that fits in `budget` bytes per device; the set-up's notes say what was done for it.

    Raises:
        InfeasibleError: none was found; the message names the peak of the smallest.
    """
    smallest: tuple[PeakUse, Outcome, Assignment] | None = None
    for outcome in search.outcomes:
        assignment = search.assignment(outcome)
        use = peak_of(assignment, outcome.space.mesh)
        if use.bytes <= budget:
            if outcome is search.outcomes[0]:
                return outcome.setup, assignment
            return _noted(outcome.setup, budget, "the cheapest plan does not fit, another one does"), assignment
        if smallest is None or use.bytes < smallest[0].bytes:
            smallest = use, outcome, assignment
    found: list[tuple[float, Setup, Assignment]] = []
    for outcome in search.outcomes:
        tight, use, assignment, num_split = _tightened(search, outcome, budget, peak_of)
        if use.bytes <= budget:
            what = "parameters and optimizer state are split over all devices" + (f", and {num_split} activations too" if num_split else "")
            found.append((tight.time_s, _noted(tight.setup, budget, what), assignment))
        elif smallest is None or use.bytes < smallest[0].bytes:
            smallest = use, tight, assignment
    if found:
        _, setup, assignment = min(found, key=lambda row: row[0])
        return setup, assignment
    assert smallest is not None
    raise _infeasible(search, budget, *smallest)


def _noted(setup: Setup, budget: int, what: str) -> Setup:
    setup.notes.append(f"memory_bytes={budget}: {what}.")
    return setup


def _tightened(search: Recursive, outcome: Outcome, budget: int, peak_of: PeakOf) -> tuple[Outcome, PeakUse, Assignment, int]:
    """The plan with all stored tensors split, and with as many activations as it takes; and how many those are."""
    space, state, fixed = outcome.space, list(outcome.state), set(outcome.fixed)
    for block in search.blocks:
        if fixed.isdisjoint(block.slots):
            split_block(space, state, block)
            fixed.update(slot for slot in block.slots if slot not in block.copies)
    split: set[int] = set()
    for _ in range(_ROUNDS):
        settle(space, state, fixed, {})
        tight = search.priced(space, outcome.setup, list(state), fixed)
        assignment = search.assignment(tight)
        use = peak_of(assignment, space.mesh)
        if use.bytes <= budget:
            break
        more = _largest(search, use, space, state, fixed)
        if not more:
            break
        for slot, number in more:
            state[slot] = number
            fixed.add(slot)
            split.add(slot)
    return tight, use, assignment, len(split)


def _largest(search: Recursive, use: PeakUse, space: Space, state: list[int], fixed: set[int]) -> list[tuple[int, int]]:
    """The slots that hold most at the peak and can be split further, with the numbers of their new shardings."""
    held: dict[int, int] = {}
    for value in use.alive:
        slot = search.folded.value_of.get(search.space.slot_of[value], -1)
        if slot >= 0 and slot not in fixed:
            held[slot] = held.get(slot, 0) + _bytes(search, value, space, state[slot])
    found: list[tuple[int, int]] = []
    for slot in sorted(held, key=lambda slot: -held[slot]):
        base = space.shardings[state[slot]]
        longer = [one for extra in free_axes(space, base) for one in lengthened(space, space.shapes[slot], base, extra)]
        if longer:
            found.append((slot, space.number(max(longer, key=lambda one: space.mesh.num_slices(n for names in one for n in names)))))
        if len(found) == _AT_ONCE:
            break
    return found


def _bytes(search: Recursive, value: int, space: Space, number: int) -> int:
    known = search.space.graph.values[value]
    count = item_bytes(known.dtype)
    for size in local_shape(known.shape, space.shardings[number], space.mesh):
        count *= size
    return count


def _infeasible(search: Recursive, budget: int, use: PeakUse, outcome: Outcome, assignment: Assignment) -> InfeasibleError:
    graph, mesh = search.space.graph, outcome.space.mesh

    def size(value: int) -> int:
        count = item_bytes(graph.values[value].dtype)
        for length in local_shape(graph.values[value].shape, assignment.values[value], mesh):
            count *= length
        return count

    largest = sorted(use.alive, key=lambda value: (-size(value), value))[:_NAMED]
    names = ", ".join(f"{graph.values[value].path or 'a result'} {graph.values[value].shape} ({size(value)} bytes)" for value in largest)
    return InfeasibleError(
        f"No plan was found that fits in memory_bytes={budget}: the smallest peak is {use.bytes} bytes per device.",
        where=f"{graph.ops[use.op].primitive} ({graph.origins[use.op].source})" if graph.ops else "",
        got=f"{len(use.alive)} values alive there, the largest {names}",
        need=f"memory_bytes >= {use.bytes} for this search",
        fix="use more devices, a smaller batch, rematerialisation, or search_mode='dynamic_programming'",
    )

"""Plans whose first layers follow one plan, and whose other layers another.

The ops of alike layers decide alike. So the cheapest plan within a budget may leave much of it unused, while the next cheaper one takes
too much. Between the two lie those in which only some layers take the plan of less memory: as few as make the whole fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from spmdctx.cost.bill import Bill
from spmdctx.ir.sharding import Assignment
from spmdctx.search.dynamic.formulation import Formulation, MeshProblem, peak_in
from spmdctx.search.dynamic.results import SAME_COST, DynamicOptions, Found
from spmdctx.search.problem.layers import Layers
from spmdctx.search.problem.memory.rows import completed, counted_bytes
from spmdctx.search.problem.space import Space
from spmdctx.search.problem.tables import Tables
from spmdctx.search.solver.problem.graph import cost_of
from spmdctx.search.solver.problem.problem import Problem

_WORTH = 1e-3
"""Share of a plan's seconds by which it must be possible to improve it, and that a mix must save."""

_SOFT_WORTH = 0.01
"""The same within a budget that the user did not set."""

_WORTH_IN_A_PART = 0.02
"""The same for a part of a pipeline: other splits of its state may take more time and memory behind the loss, which it does not count."""

_PAIRS = 4
"""Pairs of plans that are mixed, of those that promise most."""

_ALIKE = 0.002
"""Share by which costs, and bytes, of two choices must differ to try both."""


class Choice(NamedTuple):
    """The cost of a choice of states, the bytes that the problem counts for it, and the states of the nodes."""

    cost_s: float
    bytes: float
    states: tuple[int, ...]


def choices_of(problem: Problem, limited: Problem, every: Iterable[Sequence[int]]) -> list[Choice]:
    """Returns choices of states of a problem that differ in cost or bytes; `limited` is the same problem with memory."""
    found: dict[tuple[int, int], Choice] = {}
    for states in dict.fromkeys(tuple(own)[: len(problem.costs)] for own in every if len(own)):
        cost_s = cost_of(problem.costs, problem.edges, states)
        if math.isfinite(cost_s):
            own = Choice(cost_s, counted_bytes(limited, completed(limited, states)), states)
            found.setdefault((_step(cost_s), _step(own.bytes)), own)
    return list(found.values())


def _step(number: float) -> int:
    return round(math.log(max(number, 1e-300)) / _ALIKE)


class Pair(NamedTuple):
    """Choices of which one is cheaper and takes too much memory, and the share of layers that is expected to need the other one."""

    cheap: Choice
    small: Choice
    share: float

    @property
    def expected_s(self) -> float:
        """The cost of the mix, if it is between those of the two as its bytes are."""
        return self.cheap.cost_s + self.share * (self.small.cost_s - self.cheap.cost_s)


def promising_pair(choices: Sequence[Choice], room: float, known_s: float, tried: Collection[Pair]) -> Pair | None:
    """Returns the pair of choices whose mix may take at most `room` bytes and promises the least cost, if that is below `known_s`."""
    pairs = [
        Pair(cheap, small, (cheap.bytes - room) / (cheap.bytes - small.bytes))
        for cheap in choices
        for small in choices
        if cheap.bytes > room >= small.bytes and cheap.cost_s < min(small.cost_s, known_s)
    ]
    return min((own for own in pairs if own.expected_s < known_s and own not in tried), key=lambda own: own.expected_s, default=None)


def fewest(fits: Callable[[int], bool], guess: int, count: int) -> int | None:
    """Returns a number from 1 to `count` - 1 that fits while the one below it does not, or 1; None if none of those tried fits.

    Few numbers are tried: those near the guess, then the middle of what is left.
    """
    low, high, step, number = 0, count, 1, min(max(guess, 1), count - 1)
    while high - low > 1:
        if fits(number):
            high, number = number, number - step
        else:
            low, number = number, number + step
        step *= 2
        if not low < number < high:
            number = (low + high) // 2
    return high if high < count else None


def mixed(space: Space, layers: Layers, cheap: Assignment, small: Assignment, count: int) -> Assignment:
    """Returns the assignment whose first `count` layers, and what is in none, follow `small`, and all others `cheap`."""
    ways = cheap, small
    ops = tuple([ways[layer < count].ops[op] for op, layer in enumerate(layers.of_ops)])
    values = tuple([ways[layers.of_slots[slot] < count].values[value] for value, slot in enumerate(space.slot_of)])
    return Assignment(ops, values, cheap.mode)


class Mixing:
    """Mixes the plans of one mesh to one within a budget.

    Args:
        formulation: states the step's problem.
        mesh: the mesh.
        options: the budget.
    """

    def __init__(self, formulation: Formulation[Tables], mesh: MeshProblem, options: DynamicOptions) -> None:
        self._formulation, self._mesh, self._options = formulation, mesh, options
        self._worth = _WORTH_IN_A_PART if options.is_of_a_part else _SOFT_WORTH if options.is_soft else _WORTH
        self._bills: dict[tuple[int, ...], Bill] = {}

    @cached_property
    def _layers(self) -> Layers | None:
        layers, slot_of = self._mesh.tables.network.layers, self._mesh.tables.space.slot_of
        couplings = self._mesh.fastest.setup.couplings
        return layers and layers.together((slot_of[own.parameter], slot_of[own.value]) for own in couplings)

    def improved(
        self, found: Found, states: tuple[int, ...], bill: Bill, others: Iterable[Sequence[int]], limited: Problem, known_s: float
    ) -> tuple[Found, tuple[tuple[int, ...], ...]]:
        """Returns a plan that fits and is cheaper than `found`, or that one, with the choices of states that it is made of.

        Args:
            found: a plan that fits.
            states: its choice of states.
            bill: its bill.
            others: other choices, which need not fit.
            limited: the problem of the mesh with memory.
            known_s: the cost of the best plan on another mesh.
        """
        best, made_of = found, [states]
        most_s = min(known_s, found.cost_s * (1 - self._worth))
        if most_s <= found.lower_bound_s or self._layers is None:
            return best, (states,)
        budget = self._options.memory_bytes or 0
        known, *choices = choices_of(self._mesh.problem, limited, [states, *others])
        self._bills[states] = bill
        # What the problem does not count, others take as well.
        room = budget - (self._peak_bytes(bill) - known.bytes)
        choices.append(known)
        tried = list[Pair]()
        while len(tried) < _PAIRS and (pair := promising_pair(choices, room, min(most_s, best.cost_s), tried)) is not None:
            tried.append(pair)
            mixes = self._mixes(pair, self._layers, budget, known.cost_s - bill.total_s)
            if not mixes:
                choices.remove(pair.small)
                choices.append(pair.small._replace(bytes=self._peak_bytes(self._bill_of(pair.small)) + room - budget))
            for own in mixes:
                if own.cost_s < min(best.cost_s * (1 - SAME_COST), most_s):
                    best = own._replace(lower_bound_s=min(found.lower_bound_s, own.cost_s), counts=found.counts)
                    made_of = [states, pair.small.states, pair.cheap.states]
        return best, tuple(dict.fromkeys(made_of))

    def _mixes(self, pair: Pair, layers: Layers, budget: int, beyond_s: float) -> list[Found]:
        """Returns the mixes of a pair that were tried and fit.

        Each costs what its bill says, and what the problem counts beyond the bills of the two.
        """
        formulation, tables, setup = self._formulation, self._mesh.tables, self._mesh.fastest.setup
        cheap, small = (tables.assignment(own.states, formulation.mode) for own in (pair.cheap, pair.small))
        beyond = [beyond_s] * 2
        if self._options.is_of_a_part:
            # Bills leave out the sums that wait until they are complete, and most of the two have different ones.
            beyond = [own.cost_s - self._bill_of(own).total_s for own in (pair.cheap, pair.small)]
        fitting: list[Found] = []

        def fits(count: int) -> bool:
            own = formulation.placed(setup, tables, mixed(tables.space, layers, cheap, small, count))
            bill, share = formulation.bill_of(own), count / layers.num_layers
            if self._peak_bytes(bill) > budget:
                return False
            less = f"{share:.0%} of the layers take less memory and more time than the others, so that the plan fits."
            cost_s = bill.total_s + (1 - share) * beyond[0] + share * beyond[1]
            fitting.append(own._replace(setup=replace(own.setup, notes=[*own.setup.notes, less]), cost_s=cost_s))
            return True

        fewest(fits, math.ceil(pair.share * layers.num_layers), layers.num_layers)
        return fitting

    def _bill_of(self, choice: Choice) -> Bill:
        known = self._bills.get(choice.states)
        if known is None:
            tables, formulation = self._mesh.tables, self._formulation
            chosen = tables.assignment(choice.states, formulation.mode)
            known = formulation.bill_of(formulation.placed(self._mesh.fastest.setup, tables, chosen))
            self._bills[choice.states] = known
        return known

    def _peak_bytes(self, bill: Bill) -> int:
        return peak_in(bill, is_likely=self._options.is_likely).bytes

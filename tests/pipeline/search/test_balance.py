"""Cuts are moved where that is expected to make the schedule shorter, moves included."""

from types import SimpleNamespace

from spmdctx.pipeline.search.balance import balanced


class Staging:
    """Stands for the planner of stages: a line of equations, what a move costs behind each, and how plans differ from estimates."""

    def __init__(self, real, moves, proposed):
        self.estimates, self.real, self.moves, self.proposed = [1.0] * len(real), real, moves, proposed
        self.planned = []

    def _makespan(self, place, seconds):
        return 8 * max(sum(seconds[: place + 1]), sum(seconds[place + 1 :])) + self.moves[place]

    def plan(self, places=None):
        places = places or (len(self.real) // 2 - 1,)
        self.planned.append(places)
        seconds = [sum(self.real[: places[0] + 1]), sum(self.real[places[0] + 1 :])]
        simulation = SimpleNamespace(makespan_s=self._makespan(places[0], self.real))
        imbalance, unmoved_s = 2 * max(seconds) / sum(seconds), simulation.makespan_s - self.moves[places[0]]
        return SimpleNamespace(places=places, seconds=seconds, imbalance=imbalance, simulation=simulation, stacks=(), unmoved_s=unmoved_s)

    def proposals(self, seconds, largest):
        longest = {place: max(sum(seconds[: place + 1]), sum(seconds[place + 1 :])) for place in self.proposed}
        return [(place,) for place in self.proposed if longest[place] <= largest]

    def expected_s(self, places, seconds, known):
        return self._makespan(places[0], seconds)


HEAVY_END = [1.0] * 7 + [4.0]


def test_cuts_move_to_where_planned_seconds_are_even():
    staging = Staging(HEAVY_END, [0.0] * 8, range(7))
    assert balanced(staging).places == (4,)
    assert len(staging.planned) <= 4


def test_balanced_stages_that_wait_for_moves_are_cut_elsewhere():
    even, moves = [1.0] * 16, [50.0] * 16
    moves[8], moves[13] = 5.0, 0.0
    staging = Staging(even, moves, range(15))
    assert balanced(staging).places == (8,)
    # Moves that take little are not worth another plan.
    staging = Staging(even, [2.0] * 8 + [0.0] * 8, range(15))
    assert balanced(staging).places == (7,)
    assert staging.planned == [(7,)]


def test_a_move_that_costs_more_than_it_balances_is_not_planned():
    staging = Staging(HEAVY_END, [0.0] * 4 + [100.0] * 4, range(7))
    assert balanced(staging).places == (3,)
    assert staging.planned == [(3,)]


def test_nothing_is_planned_twice_where_nothing_is_proposed():
    staging = Staging(HEAVY_END, [0.0] * 8, [])
    assert balanced(staging).places == (3,)
    assert staging.planned == [(3,)]

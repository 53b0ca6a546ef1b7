"""An attempt within a budget tries more limits than its effort says where plans are nearly small enough."""

from types import SimpleNamespace

import pytest

from spmdctx.cost.memory.lives import Peak
from spmdctx.search.dynamic.run import Run


class Rounds(Run):
    """An attempt whose rounds see plans of some bytes, of which the first one within the budget of 100 ends it."""

    def __init__(self, rounds, sizes):
        self._effort, self._budget = SimpleNamespace(rounds=rounds), SimpleNamespace(memory_bytes=100)
        self._sizes, self._nearest, self._seen, self.tried = list(sizes), Peak(0, 0), None, 0

    def _round(self):
        size = self._sizes[self.tried]
        self.tried += 1
        if size <= 100:
            return "found"
        if not self._nearest.bytes or size < self._nearest.bytes:
            self._nearest = Peak(0, size)
        return None

    def _out_of_limits(self):
        return "none"


@pytest.mark.parametrize(
    ("rounds", "sizes", "result", "tried"),
    [
        (2, (112, 104, 99), "found", 3),
        (2, (112, 104, 103, 102, 99), "none", 4),
        (2, (112, 107, 99), "none", 2),
        (1, (105, 104, 101, 100), "found", 4),
        (6, (120, 115, 110, 109, 108, 107, 99), "none", 6),
    ],
)
def test_limits_go_on_where_plans_are_nearly_small_enough(rounds, sizes, result, tried):
    own = Rounds(rounds, sizes)
    assert own.result() == result
    assert own.tried == tried


def test_limits_end_as_the_effort_says_once_a_plan_was_found():
    own = Rounds(2, (105, 104, 103, 102))
    own._seen = "a plan"
    assert (own.result(), own.tried) == ("none", 2)

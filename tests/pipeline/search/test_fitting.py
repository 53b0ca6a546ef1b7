"""Pipelines that are planned for speed are fitted into memory best first, and none that can no longer be the fastest."""

import random

import pytest

from spmdctx.errors import InfeasibleError
from spmdctx.pipeline.search.counts import Candidate, Choices, best_of
from spmdctx.pipeline.search.fitting import NO_MORE, fit_promising

ROOM = 100


class Fits:
    """Plans candidates again: those in `seconds` fit in so many; the others do not, and raise if that is an error."""

    def __init__(self, seconds, *, raises=False):
        self.seconds, self.raises, self.asked = seconds, raises, []

    def __call__(self, own):
        self.asked.append(own.name)
        if own.name in self.seconds:
            return own._replace(seconds=self.seconds[own.name], memory_bytes=ROOM)
        if self.raises:
            raise InfeasibleError("Stage 0 needs more.")
        return own


def large(stages, seconds, schedule="1f1b"):
    return Candidate(stages, seconds, 0.0, 2 * ROOM, schedule)


def test_the_fastest_comes_first_and_what_is_slower_is_left_as_it_is():
    two, four, eight = large(2, 3.0), large(4, 1.0), Candidate(8, 2.0, 0.0, ROOM, "1f1b")
    fits, choices = Fits({"4 stages by 1f1b": 1.5}), Choices([], {}, {})
    fit_promising(choices, [two, four, eight], fits, ROOM, is_binding=False)
    assert fits.asked == ["4 stages by 1f1b"]
    assert set(choices.candidates) == {two, four._replace(seconds=1.5, memory_bytes=ROOM), eight}
    assert best_of(choices.candidates, ROOM).seconds == 1.5


def test_within_a_budget_what_is_left_is_no_choice():
    two, four = large(2, 3.0), large(4, 1.0)
    choices = Choices([], {}, {})
    fit_promising(choices, [two, four], Fits({"4 stages by 1f1b": 1.5}), ROOM, is_binding=True)
    assert [own.stages for own in choices.candidates] == [4]
    assert not choices.refused
    assert choices.skipped == {"2 stages by 1f1b": "without a limit of memory it takes 3.00 s"}


def test_what_fits_as_it_is_needs_no_other_plan():
    small, fits, choices = Candidate(2, 1.0, 0.0, ROOM, "1f1b"), Fits({}), Choices([], {}, {})
    fit_promising(choices, [small, large(4, 2.0)], fits, ROOM, is_binding=False)
    assert (fits.asked, choices.candidates[0]) == ([], small)


@pytest.mark.parametrize("is_binding", [False, True])
def test_where_1f1b_does_not_fit_no_other_schedule_is_tried(is_binding):
    single, four = Candidate(1, 9.0, 0.0, ROOM), large(4, 5.0)
    planned = [large(2, 3.0), large(2, 1.0, "gpipe"), large(2, 2.0, "interleaved 1f1b"), four]
    fits, choices = Fits({four.name: 6.0}, raises=is_binding), Choices([single], {}, {})
    fit_promising(choices, planned, fits, ROOM, is_binding=is_binding)
    assert fits.asked == ["2 stages by gpipe", "2 stages by 1f1b", "4 stages by 1f1b"]
    assert best_of(choices.candidates, ROOM).stages == 4
    if is_binding:
        assert choices.refused == dict.fromkeys(("2 stages by gpipe", "2 stages by 1f1b"), "Stage 0 needs more.")
        assert choices.skipped == {"2 stages by interleaved 1f1b": NO_MORE}
    assert len(choices.candidates) == (2 if is_binding else 5)


def test_until_something_fits_1f1b_is_tried_alone():
    planned = [large(stages, seconds, own) for stages, seconds in ((2, 1.0), (4, 2.0)) for own in ("gpipe", "1f1b")]
    fits, choices = Fits({}), Choices([], {}, {})
    fit_promising(choices, planned, fits, ROOM, is_binding=False)
    assert fits.asked == ["2 stages by 1f1b", "4 stages by 1f1b"]
    assert set(choices.candidates) == set(planned)
    fits, choices = Fits({"2 stages by 1f1b": 3.0, "2 stages by gpipe": 1.5}), Choices([], {}, {})
    fit_promising(choices, planned, fits, ROOM, is_binding=False)
    assert fits.asked == ["2 stages by 1f1b", "2 stages by gpipe"]


@pytest.mark.parametrize("seed", range(50))
def test_the_choice_is_the_fastest_of_all_that_could_be_fitted(seed):
    draw = random.Random(seed)
    planned = [
        Candidate(stages, draw.uniform(1, 3), 0.0, draw.choice([ROOM, 2 * ROOM]), schedule)
        for stages in (2, 4, 8)
        for schedule in ("1f1b", "gpipe", "zero_bubble_v")
    ]
    seconds = {own.name: own.seconds * draw.uniform(1, 2) for own in planned}
    fits, choices = Fits(seconds), Choices([], {}, {})
    fit_promising(choices, planned, fits, ROOM, is_binding=bool(seed % 2))
    every = [seconds[own.name] if own.memory_bytes > ROOM else own.seconds for own in planned]
    assert best_of(choices.candidates, ROOM).seconds == min(every)
    assert len(choices.candidates) + len(choices.skipped) == len(planned)

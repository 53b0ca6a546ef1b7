"""The number of stages: which are tried, which one is taken, and what is said of the others."""

import pytest

from spmdctx.pipeline.search.counts import Candidate, Choices, best_of, choice_notes, pareto, stage_counts

FAST, MIDDLE, SMALL = Candidate(1, 1.0, 0.4, 80), Candidate(2, 1.2, 0.2, 50), Candidate(4, 1.5, 0.1, 30)
EVERY = [FAST, MIDDLE, SMALL]


@pytest.mark.parametrize(
    ("devices", "most", "micro", "want"),
    [(8, 8, 16, [1, 2, 4, 8]), (8, 8, 4, [1, 2, 4]), (12, 8, 16, [1, 2, 3, 4, 6]), (8, 3, 16, [1, 2]), (8, 8, 1, [1]), (2, 8, 8, [1, 2])],
)
def test_counts_divide_the_devices_and_have_a_micro_batch_each(devices, most, micro, want):
    assert stage_counts(devices, most, micro) == want


@pytest.mark.parametrize(("memory", "want"), [(100, FAST), (80, FAST), (79, MIDDLE), (30, SMALL), (10, SMALL)])
def test_the_fastest_that_fits_is_taken_and_the_smallest_if_none_fits(memory, want):
    assert best_of(EVERY, memory) is want


def test_equals_have_the_fewest_stages():
    assert best_of([FAST._replace(stages=4), FAST, FAST._replace(stages=2)], 100) is FAST


def test_a_front_holds_what_no_other_beats():
    assert pareto([SMALL, FAST, MIDDLE, Candidate(8, 1.6, 0.1, 30)]) == EVERY
    assert pareto([FAST, Candidate(2, 1.0, 0.3, 80)]) == [FAST]


def test_notes_say_what_would_flip_the_choice():
    notes = choice_notes(FAST, Choices(EVERY, {"8 stages": "too few equations"}, {}), 8, 100)
    assert notes[0].startswith("auto_pipeline chose 1 stage of at most 8")
    assert "8 stages cannot be planned: too few equations" in notes[1]
    # 1 + (k - 1) 0.4 = 1.2 + (k - 1) 0.2 at k = 2.
    assert notes[2] == "With links about 2 times slower, 2 stages would be as fast as 1 stage."
    assert notes[3] == "On devices with less than 80 B, 2 stages would be chosen."


def test_what_cannot_be_flipped_is_not_said():
    assert len(choice_notes(SMALL, Choices(EVERY, {}, {}), 4, 40)) == 1


def test_what_is_not_planned_is_listed_by_its_reason():
    skipped = {"2 stages by a": "x", "2 stages by b": "y", "2 stages by c": "x", "4 stages by a": "x"}
    (note,) = [note for note in choice_notes(FAST, Choices(EVERY, {}, skipped), 4, 100) if note.startswith("Not planned")]
    assert note == "Not planned: 2 stages by a, c, since x; 2 stages by b, since y; 4 stages by a, since x."

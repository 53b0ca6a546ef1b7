"""Why cuts are where they are, on lines of few equations."""

import pytest

from spmdctx.pipeline.cut.choose import choose_cuts, limit_of
from spmdctx.pipeline.cut.reasons import CutLine


def line(costs, crossing, num_chunks):
    found = choose_cuts(costs, crossing, num_chunks)
    return CutLine(costs, crossing, found.places, found.limit, lambda place: f"line {place}")


def test_another_place_is_too_long_or_crossed_by_more_bytes():
    (cut,) = line([4.0, 4.0, 0.1, 4.0, 4.0], [5, 3, 9, 3], 2).cut_reasons()
    assert (cut.before, cut.after, cut.crossing_bytes) == ("line 1", "line 2", 3)
    earlier, later = cut.others
    assert (earlier.source, earlier.is_later, later.source, later.is_later) == ("line 0", False, "line 3", True)
    assert earlier.longest_s == pytest.approx(12.1)
    assert earlier.between_s == pytest.approx(4.0)
    assert later.longest_s == pytest.approx(12.1)
    assert cut.limit_s == pytest.approx(limit_of(8.1, 16.1 / 2))
    assert earlier.longest_s > cut.limit_s


def test_ends_of_a_line_leave_no_other_place():
    first, last = line([1.0, 1.0, 1.0], [1, 1], 3).cut_reasons()
    assert not first.others
    assert not last.others


def test_chunks_tell_what_they_hold():
    cut = line([1.0, 2.0, 3.0], [4, 4], 2)
    first, last = cut.chunk_reasons([("a",), ("b", "c")])
    assert first.sources + last.sources == ("line 0", "line 1", "line 2")
    assert (first.leaves, last.leaves) == (("a",), ("b", "c"))
    assert first.seconds == last.seconds == 3.0

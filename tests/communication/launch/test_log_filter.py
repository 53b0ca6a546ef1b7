"""Gloo's lines: what says nothing is left out, what may be an error never."""

import pytest

from spmdctx.communication.launch.log_filter import ConnectionReports

SENTENCE = "[Gloo] Rank 2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
HALF = SENTENCE.removesuffix("3\n")


@pytest.mark.parametrize(
    "line",
    [
        SENTENCE,
        f"[Gloo] Rank {SENTENCE}",
        "2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n",
        "[Gloo] Rank ",
    ],
)
def test_what_only_reports_connections_is_dropped(line):
    assert ConnectionReports().has(line)


@pytest.mark.parametrize(
    "line",
    [
        SENTENCE.replace(": 3", ": 7"),
        "[Gloo] Rank 2 timed out\n",
        f"{SENTENCE.strip()}; connection reset by peer\n",
        f"loss 4.5 {SENTENCE}",
        "[Gloo] error",
        "3 3",
        "17\n",
        "\n",
        "",
    ],
)
def test_everything_else_is_shown(line):
    assert not ConnectionReports().has(line)


@pytest.mark.parametrize(
    "written",
    [
        f"{HALF}{HALF}33\n\n",
        f"{HALF}{SENTENCE}3\n",
        f"[Gloo] Rank {SENTENCE}2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n",
        f"{HALF}{HALF}{HALF}3\n33\n\n",
    ],
)
def test_ends_of_reports_that_were_written_at_once_are_dropped_and_no_more(written):
    reports = ConnectionReports()
    assert all(reports.has(line) for line in written.splitlines(keepends=True))
    assert not reports.has("\n")
    assert not reports.has("3\n")
    assert reports.has(SENTENCE)

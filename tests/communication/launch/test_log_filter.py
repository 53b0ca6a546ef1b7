"""Gloo's lines: what says nothing is left out, what may be an error never."""

import pytest

from spmdctx.communication.launch.log_filter import is_connection_report

SENTENCE = "[Gloo] Rank 2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


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
    assert is_connection_report(line)


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
    assert not is_connection_report(line)

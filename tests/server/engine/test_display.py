"""The line that shows how far a job has come."""

import io

from spmdctx.server.engine.display import Display, line_of
from spmdctx.server.state.progress import Summary

SYNC = Summary("sync", 40, 3, 3, 2, {0: 40, 1: 40, 2: 40}, {}, 10_000_000)
ASYNC = SYNC._replace(mode="async", version=90, steps={0: 29, 1: 31}, staleness={0: 60, 1: 20, 4: 10})


def test_the_line_names_rates_workers_servers_and_lateness():
    assert line_of(SYNC, None, 5.0) == "40 steps, 3 parts a step, 3 workers, 2 servers"
    later = SYNC._replace(version=60, num_bytes=50_000_000)
    assert line_of(later, (5.0, SYNC), 7.0).startswith("60 steps, 10.0 steps/s, 19.1 MiB/s, 3 parts a step")
    wanted = "90 updates, 3 parts a step, 3 workers, 2 servers, late by 0.7 updates, at most 4, workers in steps 29 to 31"
    assert line_of(ASYNC, None, 5.0) == wanted


def test_the_line_is_shown_on_terminals_alone_and_not_too_often():
    stream, calls = io.StringIO(), []
    display = Display(stream)
    display.show(lambda: calls.append(1) or SYNC, 0.0)
    assert (stream.getvalue(), calls) == ("", [])
    display = Display(stream, force=True)
    for now in (0.0, 0.2, 0.4, 1.5):
        display.show(lambda: calls.append(1) or SYNC, now)
    display.hide()
    assert len(calls) == 2
    assert "40 steps" in stream.getvalue()

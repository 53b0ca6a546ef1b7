"""The line that shows how far a search is."""

import io
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from rich import console as rich_console

from spmdctx.wording import phases


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in place of standard error, whose line appears at once, outside of pytest."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(phases, "_PATIENCE_S", 0.0)
    written = io.StringIO()
    whole = rich_console.Console

    def made(**options):
        return whole(
            **{
                **options,
                "stderr": False,
                "file": written,
                "force_terminal": made.is_terminal,
                "force_jupyter": made.is_notebook,
                "width": 80,
            }
        )

    made.is_terminal, made.is_notebook = True, False
    monkeypatch.setattr(rich_console, "Console", made)
    return made, written


def shown(told, wait=True):
    """Shows a line as outside of pytest, until its timer has fired."""
    with mock.patch.dict(os.environ):
        del os.environ["PYTEST_CURRENT_TEST"]
        with phases.line("Planning train"):
            phases.tell(told)
            for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer) and wait]:
                timer.join(5)
            phases.tell(told)


def test_a_long_search_shows_a_line_in_a_terminal(terminal):
    _, written = terminal
    shown("mesh 3 of 12")
    assert "Planning train: mesh 3 of 12" in written.getvalue()


class Handle:
    """What IPython returns for a display with an id."""

    def __init__(self, told):
        self.told = told

    def update(self, data, raw):
        self.told.append(data["text/plain"])


def test_a_notebook_shows_the_line_in_its_cell_and_removes_it(terminal, monkeypatch):
    made, written = terminal
    made.is_terminal, made.is_notebook, told = False, True, []

    def display(data, raw, display_id):
        told.append(data["text/plain"])
        return Handle(told)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    shown("mesh 3 of 12")
    assert told[0].startswith("Planning train")
    assert told[-1] == ""
    assert written.getvalue() == ""


def test_nothing_is_shown_where_no_one_looks(terminal):
    made, written = terminal
    made.is_terminal = False
    shown("mesh 3 of 12")
    assert written.getvalue() == ""


def test_a_short_search_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(phases, "_PATIENCE_S", 60.0)
    _, written = terminal
    shown("mesh 3 of 12", wait=False)
    assert written.getvalue() == ""


def test_where_something_else_shows_it_no_line_appears(terminal):
    _, written = terminal
    told = []
    with phases.telling(told.append):
        shown("mesh 3 of 12")
    assert written.getvalue() == ""
    assert told == ["mesh 3 of 12"] * 2


def test_pytest_shows_nothing():
    with phases.line("Planning train"):
        assert phases._TELL.get() is None

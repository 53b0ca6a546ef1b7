"""Sentences that are values, and messages that are laid out."""

from __future__ import annotations

import copy
import json
import pickle
from enum import Enum

import pytest

from spmdctx.errors import ContextError, Message, Sentence, message, read_gaps


class Form(Enum):
    GREETING = "{name} (of {place}) says hello."
    FAREWELL = "Good bye."


HELLO = Sentence(Form.GREETING, name="Ada", place=3)


def test_a_sentence_is_its_text_and_knows_its_form():
    assert HELLO == "Ada (of 3) says hello."
    assert {HELLO: 1}["Ada (of 3) says hello."] == 1
    assert json.dumps([HELLO]) == '["Ada (of 3) says hello."]'
    assert (HELLO.form, HELLO.gaps) == (Form.GREETING, {"name": "Ada", "place": "3"})


@pytest.mark.parametrize("copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy])
def test_a_copy_of_a_sentence_keeps_its_form(copied):
    again = copied(HELLO)
    assert (again, again.form, again.gaps) == (HELLO, HELLO.form, HELLO.gaps)


def test_the_gaps_of_a_saved_sentence_are_read_by_its_form():
    assert read_gaps(str(HELLO), Form.GREETING, {}) == HELLO.gaps
    assert read_gaps("Good bye.", Form.FAREWELL, {}) == {}


@pytest.mark.parametrize("text", ["Ada (of 3) says hello. Twice.", "Ada of 3 says hello.", "Good bye.", ""])
def test_another_sentence_has_no_such_gaps(text):
    assert read_gaps(text, Form.GREETING, {}) is None


def test_a_gap_takes_only_what_fits_its_pattern():
    assert read_gaps(str(HELLO), Form.GREETING, {"place": r"\d+"}) == HELLO.gaps
    assert read_gaps("Ada (of Rome) says hello.", Form.GREETING, {"place": r"\d+"}) is None


def test_an_error_has_a_laid_out_message():
    text = message("It is wrong.", got="one", fix="two")
    assert isinstance(text, Message)
    assert text == "It is wrong.\n  got:   one\n  fix:   two"
    assert isinstance(ContextError("It is wrong.").args[0], Message)

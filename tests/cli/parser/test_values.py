"""Values of the command line are taken, or refused in words."""

import argparse

import pytest

from spmdctx.cli.main import main
from spmdctx.cli.parser.values import given, natural, positive, positive_number, seed


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("4096", 4096)])
def test_a_count_is_taken(text, value):
    assert positive(text) == value


@pytest.mark.parametrize("text", ["0", "-3", "16GiB", "2.5", ""])
def test_what_is_no_count_is_refused_in_words(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number of at least 1"):
        positive(text)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("7", 7)])
def test_a_count_that_may_be_none_is_taken(text, value):
    assert natural(text) == value


@pytest.mark.parametrize("text", ["-1", "1.5", ""])
def test_what_is_less_than_none_is_refused_in_words(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number of at least 0"):
        natural(text)


@pytest.mark.parametrize(("text", "words"), [("-1", "at least 0"), ("x", "at least 0"), ("4294967296", "below 2\\*\\*32")])
def test_a_seed_has_32_bits(text, words):
    assert seed("4294967295") == 2**32 - 1
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        seed(text)


@pytest.mark.parametrize(("text", "value"), [("16", 16.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_an_amount_is_taken(text, value):
    assert positive_number(text) == value


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "16GiB", ""])
def test_what_is_no_amount_is_refused_in_words(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number above 0"):
        positive_number(text)


def test_a_name_is_not_empty():
    assert given("tpu-v5e") == "tpu-v5e"
    for text in ("", " "):
        with pytest.raises(argparse.ArgumentTypeError, match="it is empty; leave the option out"):
            given(text)


@pytest.mark.parametrize("option", ["--topology", "--program", "--strategy", "--config"])
def test_an_option_that_is_given_empty_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["plan", option, ""])
    assert f"argument {option}: it is empty; leave the option out for its default" in capsys.readouterr().err

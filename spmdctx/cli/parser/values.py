"""Types of values that the command line takes."""

from __future__ import annotations

import argparse
import math

from spmdctx.wording.targets import TARGETS, metrics_target


def given(text: str) -> str:
    """Parses a text that is not empty, as a variable of a shell is that was never set.

    Raises:
        argparse.ArgumentTypeError: an empty text, or spaces alone.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; leave the option out for its default")
    return text


def positive(text: str) -> int:
    """Parses a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    return _at_least(1, text)


def natural(text: str) -> int:
    """Parses a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    return _at_least(0, text)


def seed(text: str) -> int:
    """Parses the seed of a generator: a whole number of 32 bits.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    value = _at_least(0, text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number below 2**32")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def positive_number(text: str) -> float:
    """Parses a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    value = _finite(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> float:
    """Parses a finite number from 0 on.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    value = _finite(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value


def _finite(text: str) -> float:
    """Returns a number, or NaN for text that is none and for what is not finite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def target(text: str) -> str:
    """Takes a place for metrics.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    if metrics_target(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {TARGETS}")
    return text

"""How long work takes in units of a loop of Python, so that slow and busy machines judge alike."""

import time
from collections.abc import Callable
from typing import Any

_TURNS = 300_000


def paced(work: Callable[[], Any]) -> tuple[Any, float]:
    """What work returns, and the processor's time for it over that of 300,000 turns of a plain loop right before and after it."""
    before = _loop_s()
    start = time.process_time()
    found = work()
    spent = time.process_time() - start
    return found, spent / ((before + _loop_s()) / 2)


def _loop_s() -> float:
    start, total = time.process_time(), 0
    for turn in range(_TURNS):
        total += turn * turn % 7
    return time.process_time() - start

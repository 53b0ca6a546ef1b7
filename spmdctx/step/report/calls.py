"""When a step was called: the first call, which compiles, and those after it."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from spmdctx.wording import counted, seconds_text
from spmdctx.wording.phases import log_of

_LOG = log_of("step")
_HAVE_RUN: WeakSet[Any] = WeakSet()

_MOST_CALLS = 1024
_WAITED = 0.5
"""A report that waits for more than this part of a usual interval finds a queue: the calls had not waited for their steps."""


class Calls:
    """The calls of a step with one set of shapes.

    Attributes:
        entry: What they ran.
        count: How many there were.
        first_s: The seconds of the first: planning, if nothing else asked for it, compilation and the step's start.
    """

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.count = 0
        self.first_s = 0.0
        self._starts: deque[float] = deque(maxlen=_MOST_CALLS)
        self._waited = 0, 0.0

    def note(self, start: float) -> None:
        """Counts a call that began at `start`, of `time.perf_counter`, and has just returned."""
        self.count += 1
        if self.count == 1:
            self.first_s = time.perf_counter() - start
        else:
            self._starts.append(start)

    def step_s(self, devices: Sequence[Any]) -> float | None:
        """Returns the seconds of a step, None before the third call.

        These are the median of the intervals between calls. If steps are still queued on the devices, this waits for them, and returns the
        mean from the second call to the end. A loop that does other things between its calls counts them.
        """
        starts = list(self._starts)
        asked = time.perf_counter()
        drain(devices)
        ended = time.perf_counter()
        if len(starts) < 2:
            return None
        interval = statistics.median(later - earlier for earlier, later in itertools.pairwise(starts))
        if ended - asked > max(_WAITED * interval, 1e-3):
            self._waited = self.count, (ended - starts[0]) / len(starts)
        # A second report finds no queue, and its intervals are still those of calls that had not waited.
        return self._waited[1] if self._waited[0] == self.count else interval


@jax.jit
def spmdctx_waits(x: jax.Array) -> jax.Array:
    """Computes something, which is done once what was queued before is done."""
    return x + 1


WAITING = "jit_spmdctx_waits"
"""What traces call this program."""


def noted(calls: Calls | None, entry: Any, start: float) -> Calls:
    """Counts a call of an entry that began at `start`; calls of another entry are counted anew."""
    if calls is not None and calls.entry is entry:
        calls.note(start)
        return calls
    calls = Calls(entry)
    calls.note(start)
    # A report would take the compilation of what waits for steps that are still queued.
    for device in jax.local_devices():
        _waiter(device)
    if entry not in _HAVE_RUN:
        _HAVE_RUN.add(entry)
        _LOG.info("%s: the first call, with compilation, took %s.", entry.captured.name, seconds_text(calls.first_s))
    return calls


def log_compiling(calls: Calls | None, entry: Any) -> None:
    """Logs that an entry is about to be compiled, if it was never called; `calls` are those before."""
    if (calls is None or calls.entry is not entry) and entry not in _HAVE_RUN:
        _LOG.info("%s is compiled for %s.", entry.captured.name, counted(entry.environment.settings.num_devices, "device"))


def drain(devices: Sequence[Any]) -> None:
    """Waits until each device has run what was queued before."""
    for device in devices:
        jax.block_until_ready(_waiter(device)(jax.device_put(np.float32(0), device)))
    jax.effects_barrier()


@functools.cache
def _waiter(device: Any) -> Any:
    """Returns what waits, compiled for a device."""
    where = jax.sharding.SingleDeviceSharding(device)
    return spmdctx_waits.lower(jax.ShapeDtypeStruct((), np.float32, sharding=where)).compile()

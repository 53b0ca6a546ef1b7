"""When a step was called: the first call, which compiles, and those after it."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any
from weakref import WeakSet, ref

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from spmdctx.wording import counted, seconds_text
from spmdctx.wording.phases import log_of

_LOG = log_of("step")
_HAVE_RUN: WeakSet[Any] = WeakSet()

_MOST_CALLS = 1024
_WAITED = 0.5
"""A report that waits for more than this part of a usual interval finds a queue: the calls had not waited for their steps."""

_QUEUED = 0.1
"""Where more than this part of the calls began before the step of the call before them had ended, intervals between calls say nothing."""

_KEPT = 4096
"""Elements of an array of a result that is kept until the next call."""

_LOOKS = 32
_EVERY = 7
"""Looking takes microseconds on several devices: after so many calls only every seventh looks."""


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
        self._queued: deque[bool] = deque(maxlen=_MOST_CALLS)
        self._result = _Result()
        self._waited = 0, 0.0

    def look(self) -> None:
        """Sees, before a call, whether the step of the call before it still runs."""
        if self._looks:
            self._queued.append(self._result.is_awaited())

    def wait(self, devices: Sequence[Any]) -> None:
        """Waits until the step of the last call has ended, and what was queued on the devices before."""
        self._result.wait()
        drain(devices)

    @property
    def _looks(self) -> bool:
        return 0 < self.count < _LOOKS or self.count % _EVERY == 0

    def note(self, start: float, result: Any = None) -> None:
        """Counts a call that began at `start`, of `time.perf_counter`, and has just returned a result."""
        self.count += 1
        self._result.take(result)
        if self.count == 1:
            self.first_s = time.perf_counter() - start
        else:
            self._starts.append(start)

    def step_s(self, devices: Sequence[Any]) -> float | None:
        """Returns the seconds of a step, None before the third call.

        These are the median of the intervals between calls, if calls wait for their steps. Else they are the mean from the second call to
        the end: of the last step, if it still runs, and else until this is asked first. A loop that does other things between its calls
        counts them.
        """
        starts, queued = list(self._starts), list(self._queued)
        asked = time.perf_counter()
        self.wait(devices)
        ended = time.perf_counter()
        if len(starts) < 2:
            return None
        interval = statistics.median(later - earlier for earlier, later in itertools.pairwise(starts))
        is_queued = ended - asked > max(_WAITED * interval, 1e-3) or sum(queued) > _QUEUED * len(queued)
        # A second report finds no queue, and its intervals are still those of calls that had not waited.
        if self._waited[0] != self.count:
            self._waited = self.count, (ended - starts[0]) / len(starts) if is_queued else interval
        return self._waited[1]


class _Result:
    """An array of a call's result, by which one sees whether its step has ended: the smallest one, and always at the same place."""

    def __init__(self) -> None:
        self._getters: tuple[Callable[[Any], Any], ...] | None = None
        self._array: Callable[[], Any] = _nothing

    def take(self, result: Any) -> None:
        """Takes the result of a call. Whoever called may drop a large one, and its memory with it."""
        try:
            if self._getters is None:
                self._getters = _getters(result)
            for getter in self._getters:
                result = getter(result)
        except (LookupError, TypeError):  # a tree without such a way to its leaves
            result = None
        self._array = _nothing if not _is_array(result) else (lambda: result) if result.size <= _KEPT else ref(result)

    def is_awaited(self) -> bool:
        """Returns whether the step still runs; False if nothing shows it."""
        array = self._array()
        # In jaxlib 0.10 asking a deleted or donated array whether it is ready ends the process.
        return array is not None and not array.is_deleted() and not array.is_ready()

    def wait(self) -> None:
        """Waits until the step has ended: devices of several that run one program may run a second one before it."""
        array = self._array()
        if array is not None and not array.is_deleted():
            jax.block_until_ready(array)


def _nothing() -> None:
    """Stands for an array that nothing shows."""


def _is_array(value: Any) -> bool:
    """Returns whether a value is an array that lies somewhere, and can be asked whether it is ready.

    One that an outer transformation traces lies nowhere, and JAX's arrays of keys cannot be asked.
    """
    is_somewhere = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_somewhere and not jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _getters(result: Any) -> tuple[Callable[[Any], Any], ...]:
    """Returns the way to the smallest array of a tree that lists, tuples and dictionaries lead to."""
    leaves = [(keys, leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(result)[0] if _is_array(leaf)]
    plain = [one for one in leaves if all(isinstance(key, SequenceKey | DictKey) for key in one[0])]
    keys = min(plain, key=lambda one: one[1].size, default=((), None))[0]
    return tuple(itemgetter(key.idx if isinstance(key, SequenceKey) else key.key) for key in keys)


@jax.jit
def spmdctx_waits(x: jax.Array) -> jax.Array:
    """Computes something, which is done once what was queued before is done."""
    return x + 1


WAITING = "jit_spmdctx_waits"
"""What traces call this program."""


def noted(calls: Calls | None, entry: Any, start: float, result: Any) -> Calls:
    """Counts a call of an entry that began at `start`; calls of another entry are counted anew."""
    if calls is not None and calls.entry is entry:
        calls.note(start, result)
        return calls
    calls = Calls(entry)
    calls.note(start, result)
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
    jax.block_until_ready([_waiter(device)(jax.device_put(np.float32(0), device)) for device in devices])
    jax.effects_barrier()


@functools.cache
def _waiter(device: Any) -> Any:
    """Returns what waits, compiled for a device."""
    where = jax.sharding.SingleDeviceSharding(device)
    return spmdctx_waits.lower(jax.ShapeDtypeStruct((), np.float32, sharding=where)).compile()

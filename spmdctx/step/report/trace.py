"""Reads what JAX's profiler traced: which op ran on which device, from when to when, and who has the time where ops overlap."""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from spmdctx.step.report.calls import WAITING

_OPS = "XLA Ops"
"""The line of a TPU's plane that has its ops; others repeat them, as modules and steps."""


class Event(NamedTuple):
    """One execution of an op on a device.

    `op` is the name of its instruction and `module` that of its program, empty where the backend names none; times are in nanoseconds.
    """

    device: str
    op: str
    module: str
    start_ns: float
    end_ns: float


class Spent(NamedTuple):
    """The seconds of an op on all devices: its own, in which nothing with more right to them ran, and those behind other ops."""

    own_s: float
    behind_s: float
    runs: int


def traces_in(folder: Path) -> set[Path]:
    """Returns the files of traces below a folder."""
    return set(folder.glob("plugins/profile/*/*.xplane.pb"))


def read_events(path: Path) -> list[Event]:
    """Returns what ran on the devices, from the file of a trace; the small program that waited for the step is left out."""
    with warnings.catch_warnings():
        # In JAX 0.12 the first reading warns of a type without a module; where warnings are errors, that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_events(ProfileData.from_file(str(path))))


def _events(data: ProfileData) -> Iterator[Event]:
    for plane in data.planes:
        is_device = plane.name.startswith("/device:")
        lines = list(plane.lines)
        own = [line for line in lines if line.name == _OPS] if is_device else []
        for line in own or lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == WAITING:
                    continue
                if event.duration_ns > 0 and ("hlo_op" in stats or (is_device and (own or "correlation_id" in stats))):
                    device = plane.name if is_device else str(stats.get("device_ordinal", 0))
                    op = str(stats.get("hlo_op") or (_name(event.name) if own else ""))
                    yield Event(device, op, str(stats.get("hlo_module", "")), event.start_ns, event.start_ns + event.duration_ns)


def _name(text: str) -> str:
    """Returns the name of an instruction from its text, such as `%fusion.1 = f32[8]{0} fusion(...)`."""
    return text.partition(" = ")[0].strip().removeprefix("%")


def spent(events: Sequence[Event], rank: Callable[[Event], int]) -> dict[tuple[str, str], Spent]:
    """Returns the seconds of each op, by its program and name; the own ones add up to the time in which the devices were busy.

    Where ops overlap on a device, that of the highest `rank` has the time, then the one that began last: what runs inside of another.
    """
    own: dict[tuple[str, str], float] = defaultdict(float)
    whole: dict[tuple[str, str], float] = defaultdict(float)
    count: dict[tuple[str, str], int] = defaultdict(int)
    devices: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        devices[event.device].append(event)
        whole[event.module, event.op] += event.end_ns - event.start_ns
        count[event.module, event.op] += 1
    for some in devices.values():
        for event, duration in _dealt(some, rank):
            own[event.module, event.op] += duration
    return {key: Spent(own[key] / 1e9, max(whole[key] - own[key], 0.0) / 1e9, count[key]) for key in whole}


def _dealt(events: Sequence[Event], rank: Callable[[Event], int]) -> Iterator[tuple[Event, float]]:
    """Gives each stretch of time in which a device was busy to one event."""
    ordered: list[Any] = sorted(events, key=lambda event: event.start_ns)
    ends = sorted({time for event in events for time in (event.start_ns, event.end_ns)})
    active: list[tuple[int, float, int]] = []
    place = 0
    for begin, end in itertools.pairwise(ends):
        while place < len(ordered) and ordered[place].start_ns <= begin:
            heapq.heappush(active, (-rank(ordered[place]), -ordered[place].start_ns, place))
            place += 1
        while active and ordered[active[0][2]].end_ns <= begin:
            heapq.heappop(active)
        if active:
            yield ordered[active[0][2]], end - begin

"""The acceptance matrix: every model and flavor in every mode, auto_parallel by every search, on every number of devices.

And what one cell must show.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

import spmdctx
from spmdctx.audit import AuditReport
from spmdctx.machine.presets import PRESETS
from spmdctx.plan.plan import Plan
from tests.zoo import CASES, DEVICE_COUNTS, UNSPLIT, Case, Kind, case

Mode = Literal["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"]
MODES: tuple[Mode, ...] = ("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel")
SEARCHES = ("sharding_propagation", "recursive_programming", "dynamic_programming")

_PINNED_COUNTS = (3, 6)
"""Numbers of devices on which a search has pins and a dataset strategy to keep; on others it is free."""

_ONCE, _BY_SEARCH = "resnet50", "unet"
"""Models whose compilations take longest: the covering array shows one once, and the other by every search."""

_TOPOLOGY = replace(PRESETS["cpu"], device="slow devices with fast links", peak_flops_per_s=1e8, memory_bytes_per_s=1e8, latency_s=1e-9)
"""On a real machine these small models are best not split at all, which would show nothing."""

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """One place of the matrix; `search` is empty where the mode has none."""

    model: str
    flavor: str
    mode: Mode
    search: str
    num_devices: int

    def __str__(self) -> str:
        mode = f"{self.mode}:{self.search}" if self.search else self.mode
        return f"{self.model}-{self.flavor}-{mode}-{self.num_devices}"

    @property
    def kind(self) -> Kind:
        """What of the model's strategies is given. Propagation needs pins to spread."""
        if self.mode != "auto_parallel":
            return "strategies" if self.mode == "semi_auto_parallel" else "none"
        return "pins" if self.search == "sharding_propagation" or self.num_devices in _PINNED_COUNTS else "none"

    @property
    def min_split_share(self) -> float:
        """The share of the FLOPs that must be split n ways."""
        return 0.0 if self.mode == "stand_alone" else 0.9

    @property
    def pairs(self) -> frozenset[Any]:
        """What the cell adds to a covering array: its model, flavor, mode and number of devices, two by two."""
        mode = (self.mode, self.search)
        if self.model in (_ONCE, _BY_SEARCH):
            wanted = SEARCHES if self.model == _BY_SEARCH else ("sharding_propagation",)
            return frozenset({(self.model, mode)} if self.search in wanted and self.num_devices == max(DEVICE_COUNTS) else ())
        others = {("flavor", self.flavor, mode), ("flavor", self.flavor, self.num_devices), (mode, self.num_devices)}
        if self.mode == "stand_alone":  # one device is what every cell is compared with
            return frozenset(others)
        return frozenset({(self.model, self.flavor), (self.model, mode), (self.model, self.num_devices), *others})


@dataclass(frozen=True)
class Outcome:
    """What a cell showed: the largest difference from one device and where, the share of FLOPs split n ways, and the audit."""

    difference: float
    place: str
    split_share: float
    audit: AuditReport
    plan: Plan

    @property
    def equal(self) -> bool:
        """Whether outputs and new state are those of one device."""
        return self.difference <= TOLERANCE


_RUNS = tuple((mode, search) for mode in MODES for search in (SEARCHES if mode == "auto_parallel" else ("",)))

ALL_CELLS: tuple[Cell, ...] = tuple(
    Cell(one.name, one.flavor, mode, search, num_devices) for one in CASES for mode, search in _RUNS for num_devices in DEVICE_COUNTS
)


def covering_cells(cells: Iterable[Cell] = ALL_CELLS) -> tuple[Cell, ...]:
    """Few cells that together show all the pairs that `cells` do; greedy, always the same."""
    left = {cell: cell.pairs for cell in cells}
    uncovered = set().union(*left.values())
    chosen = []
    while uncovered:
        best = max(left, key=lambda cell: len(left[cell] & uncovered))
        chosen.append(best)
        uncovered -= left.pop(best)
    return tuple(chosen)


@contextmanager
def step_of(cell: Cell, topology: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The step of a cell in float64 and its arguments, in the cell's context."""
    one = case(cell.model, cell.flavor)
    split = one.split(cell.kind, cell.num_devices)
    with spmdctx.auto_parallel_context(parallel_mode=cell.mode, device_num=cell.num_devices):
        fn, args = one.make(split, np.float64)
        if cell.search:
            spmdctx.set_auto_parallel_context(search_mode=cell.search)
        if cell.kind == "pins":
            spmdctx.set_auto_parallel_context(dataset_strategy=one.dataset_strategy(split, args))
        yield spmdctx.parallel(fn, topology=topology), args


def run_cell(cell: Cell) -> Outcome:
    """Plans, compiles, audits and runs one cell in float64, and compares it with one device."""
    one = case(cell.model, cell.flavor)
    with jax.enable_x64(True):
        expected = _expected(one)
        with step_of(cell, _TOPOLOGY) as (step, args):
            plan, audit = step.plan(*args), step.audit(*args)
            difference, place = _largest_difference(one.run(step, args), expected)
    return Outcome(difference, place, split_share(plan), audit, plan)


@functools.cache
def _expected(one: Case) -> dict[str, np.ndarray]:
    step, args = one.make(UNSPLIT, np.float64)
    return one.run(one.jit(step), args)


def _largest_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((_difference(found[path], expected[path]), path) for path in expected)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest magnitude of the tensor."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not expected.size:
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-3))


def split_share(plan: Plan) -> float:
    """Share of the FLOPs whose op is split over all devices."""
    mesh, table = plan.logical_mesh, plan.op_table
    total = split = 0
    for op, choice in zip(table.operations, table.choices, strict=True):
        total += op.flops * op.repeats
        if mesh.num_slices(name for axes in choice.axes for name in axes) == mesh.num_devices:
            split += op.flops * op.repeats
    return split / total if total else 1.0

"""The acceptance matrix: every model and flavor in every mode on every number of devices, and what one cell must show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

import spmdctx
from spmdctx.audit import AuditReport
from spmdctx.plan.plan import Plan
from tests.zoo import CASES, DEVICE_COUNTS, UNSPLIT, Case, Kind, case

Mode = Literal["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel"]
MODES: tuple[Mode, ...] = ("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel")
_KINDS: dict[Mode, Kind] = {"semi_auto_parallel": "strategies", "auto_parallel": "pins"}

TOLERANCE = 1e-5
MIN_SPLIT_SHARE = 0.9


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    model: str
    flavor: str
    mode: Mode
    num_devices: int

    def __str__(self) -> str:
        return f"{self.model}-{self.flavor}-{self.mode}-{self.num_devices}"


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


ALL_CELLS: tuple[Cell, ...] = tuple(
    Cell(one.name, one.flavor, mode, num_devices) for one in CASES for mode in MODES for num_devices in DEVICE_COUNTS
)


def covering_cells(cells: Iterable[Cell] = ALL_CELLS) -> tuple[Cell, ...]:
    """Few cells that together show every pair of model, flavor, mode and number of devices; greedy, always the same."""
    left = {cell: _pairs(cell) for cell in cells}
    uncovered = set().union(*left.values())
    chosen = []
    while uncovered:
        best = max(left, key=lambda cell: len(left[cell] & uncovered))
        chosen.append(best)
        uncovered -= left.pop(best)
    return tuple(chosen)


def _pairs(cell: Cell) -> set[Any]:
    values = enumerate((cell.model, cell.flavor, cell.mode, cell.num_devices))
    return set(itertools.combinations(values, 2))


def run_cell(cell: Cell) -> Outcome:
    """Plans, compiles, audits and runs one cell in float64, and compares it with one device."""
    one = case(cell.model, cell.flavor)
    split = one.split(_KINDS.get(cell.mode, "none"), cell.num_devices)
    with jax.enable_x64(True):
        expected = _expected(one)
        with spmdctx.auto_parallel_context(parallel_mode=cell.mode, device_num=cell.num_devices):
            fn, args = one.make(split, np.float64)
            if cell.mode == "auto_parallel":
                dataset_strategy = one.dataset_strategy(split, args)
                spmdctx.set_auto_parallel_context(search_mode="sharding_propagation", dataset_strategy=dataset_strategy)
            step = spmdctx.parallel(fn)
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

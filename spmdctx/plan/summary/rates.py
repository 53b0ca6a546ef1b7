"""What a plan foretells a second: samples, tokens, and the part of a device's rated operations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from spmdctx.ir.graph import Role
from spmdctx.ir.primitives import KERNELS, MATRIX_PRODUCTS
from spmdctx.machine.presets import PRESETS, rated_flops_per_s
from spmdctx.plan.data import PlanData
from spmdctx.wording import bytes_text, rate_text


class Rates(NamedTuple):
    """Planned rates of a step, None where the plan does not tell.

    Attributes:
        samples_per_s: rows of the batch a second.
        tokens_per_s: elements of its largest array of whole numbers a second, if that has two dimensions or more.
        utilization: the part of the data sheet's rate of matrix products that each device reaches (MFU), recomputed ones among them.
    """

    samples_per_s: float | None
    tokens_per_s: float | None
    utilization: float | None


class _Leaf(Protocol):
    @property
    def role(self) -> Role: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def batch_sizes(inputs: Iterable[_Leaf]) -> tuple[int, int]:
    """Returns the rows of the batch, and the elements of its largest array of whole numbers of two dimensions or more; 0 for none."""
    batch = [leaf for leaf in inputs if leaf.role is Role.BATCH and leaf.shape]
    rows = max((leaf.shape[0] for leaf in batch), default=0)
    whole = [leaf.shape for leaf in batch if leaf.dtype.startswith(("int", "uint")) and len(leaf.shape) > 1]
    return rows, max((math.prod(shape) for shape in whole), default=0)


def rates_of(plan: PlanData) -> Rates:
    """Returns what a plan foretells a second."""
    seconds = plan.cost.total_s
    rows, tokens = batch_sizes(plan.inputs)
    if seconds <= 0:
        return Rates(None, None, None)
    rated = plan.about.rated_flops_per_s or rated_flops_per_s(plan.topology)
    operations = plan.op_table.operations
    hides = not plan.about.step and any(op.primitive == "shard_map" for op in operations)
    flops = plan.about.region_flops + sum(
        op.flops * op.repeats for op in operations if op.primitive in MATRIX_PRODUCTS or op.primitive in KERNELS
    )
    reached = None if rated is None or hides or not flops else flops / seconds / plan.logical_mesh.num_devices / rated
    return Rates(rows / seconds if rows else None, tokens / seconds if tokens else None, reached)


def device_bytes(plan: PlanData) -> int | None:
    """Returns what a program may use of a device's memory, None if the plan is from a file and the machine has no preset."""
    preset = PRESETS.get(plan.topology)
    return plan.about.device_bytes or (None if preset is None else preset.memory_bytes)


def rates_text(plan: PlanData) -> str:
    """Returns what a plan foretells a second in a few words, empty if it foretells nothing."""
    rates = rates_of(plan)
    parts = [(rates.tokens_per_s, "tokens a second"), (rates.samples_per_s, "samples a second")]
    words = [f"{rate_text(rate)} {what}" for rate, what in parts if rate is not None]
    return ", ".join(words + ([] if rates.utilization is None else [f"MFU {100 * rates.utilization:.1f} %"]))


def limit_text(plan: PlanData) -> str:
    """Returns of how much memory the peak is a part: the budget, else what a program may use of a device; empty if neither is known."""
    if plan.memory_limit_bytes:
        return f" of {bytes_text(plan.memory_limit_bytes)}"
    usable = device_bytes(plan)
    return f" of {bytes_text(usable)} usable" if usable else ""

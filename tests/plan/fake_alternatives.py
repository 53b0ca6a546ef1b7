"""Alternatives made by hand."""

from __future__ import annotations

from spmdctx.cost.bill import Bill
from spmdctx.plan.alternatives import Alternative, Flip
from tests.plan import small_plan

WHOLE = ((), ())


class FakeAlternatives:
    """Whole, 1 ms slower and 4 KiB more; then the other dimension, equal in time and memory."""

    def __init__(self, flips: tuple[Flip, ...] = ()) -> None:
        self.asked: list[tuple[str, int]] = []
        self._flips = flips

    def of_value(self, value: int) -> list[Alternative]:
        self.asked.append(("value", value))
        return [self._row(WHOLE, None, 1e-3, 4096, 3), self._row(((), ("data",)), None, 2e-3, 0, 0)]

    def of_op(self, op: int) -> list[Alternative]:
        self.asked.append(("op", op))
        return [self._row(WHOLE, ((), (), ("data",)), 1e-3, -4096, 1)]

    def flips(self, alternative: Alternative) -> tuple[Flip, ...]:
        return self._flips

    def _row(self, sharding, axes, delta_s, delta_bytes, num_moved) -> Alternative:
        return Alternative(sharding, axes, delta_s, delta_bytes, num_moved, small_plan().assignment, Bill())

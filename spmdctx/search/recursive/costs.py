"""Element counts by which recursive_programming decides each cut of a main op.

With the local edges `i x k` and `k x j` of a matrix product, `c` = mem_coeff, and `h` = (p - 1) / p for a cut into p parts:

    matrix product    cut I: c j k h    cut J: i k h    cut K: i j h    no cut: min(I, J, K)^2 / 25
    batched product   m = 0.15 min(|A|, |B|, |C|) h
                      cut B: max(32 / batch - 1, 0) m    cut X (further batch dimensions): max(32 / batch - 2, 0) m
                      cut I: |B| h    cut J: |A| h    cut K: |C| h    no cut: min^2 / 25
    convolution       cut B (batch): |filter| h; where the batch cannot be cut any more, output channels: |in| h, and input
                      channels: |out| h

J and K exclude each other. The redistribution is added to each count: 16 times the local elements of every tensor whose producer
was decided before and cut otherwise (MindSpore, auto_parallel/rec_core; `mem_coeff` is its rp_matmul_mem_coef).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmdctx.ir.rule import OpRule

NO_CUT = "no"
REDISTRIBUTION = 16
_WHOLE_SQUARED = 25
_BATCH_ENOUGH = 32
_BATCHED_SHARE = 0.15


class Roles(NamedTuple):
    """The factors of a main op by the name of the cut, each in the order in which they are cut.

    `kind` is "matmul", "batch_matmul" or "conv". `tensors` are the factors of A, B and C. If the weight is the left operand, A is the right
    one.
    """

    kind: str
    cuts: Mapping[str, tuple[int, ...]]
    tensors: tuple[frozenset[int], frozenset[int], frozenset[int]]
    swapped: bool


class Option(NamedTuple):
    """One option of a round: the cut and its factor (-1: none), elements by the op and by redistribution, and why it is forbidden."""

    cut: str
    factor: int
    op_cost: float
    rest_cost: float
    forbidden: str = ""

    @property
    def total(self) -> float:
        """The sum of both element counts."""
        return self.op_cost + self.rest_cost


def roles_of(rule: OpRule, splittable: Sequence[bool], *, is_conv: bool, swapped: bool) -> Roles:
    """Returns the factors of an op with two operands and one result that each cut may take."""
    left, right = (_factors(dims) for dims in rule.operands[:2])
    result = _factors(rule.results[0])
    if swapped:
        left, right = right, left

    def among(*inside: dict[int, None], without: dict[int, None] | None = None) -> tuple[int, ...]:
        order = inside[0]
        return tuple(f for f in order if splittable[f] and all(f in one for one in inside) and (without is None or f not in without))

    batch = among(left, right, result)
    rows, columns, contracted = among(left, result, without=right), among(right, result, without=left), among(left, right, without=result)
    tensors = (frozenset(left), frozenset(right), frozenset(result))
    if is_conv:
        return Roles("conv", {"B": rows, "K": (*batch, *columns), "Q": contracted}, tensors, swapped)
    cuts = {"I": rows, "J": columns, "K": contracted}
    if batch:
        return Roles("batch_matmul", {"B": batch[:1], "X": batch[1:], **cuts}, tensors, swapped)
    return Roles("matmul", cuts, tensors, swapped)


def _factors(dims: Sequence[tuple[int, ...]]) -> dict[int, None]:
    return {factor: None for factors in dims for factor in factors}


def op_costs(roles: Roles, elements: Sequence[float], local: Sequence[int], parts: int, mem_coeff: float) -> dict[str, float]:
    """Returns the elements that each cut costs by itself, the option of no cut last.

    Args:
        roles: of the op.
        elements: local elements of A, B and C.
        local: local size per factor.
        parts: the number of parts into which the cut divides.
        mem_coeff: price of cutting I.
    """
    share = (parts - 1) / parts
    in_a, in_b, in_c = (share * count for count in elements)
    if roles.kind == "conv":
        return {"B": in_b, "K": in_a, "Q": in_c, NO_CUT: 0.0}
    if roles.kind == "matmul":
        costs = {"I": mem_coeff * in_b, "J": in_a, "K": in_c}
        return {**costs, NO_CUT: min(costs.values()) ** 2 / _WHOLE_SQUARED}
    least = _BATCHED_SHARE * min(in_a, in_b, in_c)
    by_batch = {
        cut: max(_BATCH_ENOUGH / local[roles.cuts[cut][0]] - one, 0.0) * least if roles.cuts[cut] else 0.0
        for cut, one in (("B", 1), ("X", 2))
    }
    return {**by_batch, "I": in_b, "J": in_a, "K": in_c, NO_CUT: least**2 / _WHOLE_SQUARED}


def describe(option: Option, parts: int) -> str:
    """Writes an option as one line of the log, as MindFormers' guide quotes it."""
    axis = f"{option.cut}-axis"
    if option.forbidden:
        return f"The {axis} is forbidden: {option.forbidden}."
    start = "If no axis is cut" if option.cut == NO_CUT else f"If the {axis} is cut" + (f" into {parts}" if parts > 2 else "")
    return f"{start}, the op-cost is {option.op_cost:g}, the rest-cost is {option.rest_cost:g}, and the total cost is {option.total:g}"


def describe_choice(option: Option) -> str:
    """Writes the line that names the chosen option."""
    return "Choose NOT to cut" if option.cut == NO_CUT else f"Choose to cut the {option.cut}-axis"

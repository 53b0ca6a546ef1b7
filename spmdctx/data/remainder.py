"""Decides, alike in all processes, what to do with batches that have fewer rows than the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.data.agreement import ENDED, FAILED, Share
from spmdctx.errors import StrategyError

REMAINDERS = ("error", "pad", "drop")


class Decision(NamedTuple):
    """The decision on a batch: "use", "pad", "drop" or "end"; its real rows, and those of the plan."""

    kind: str
    rows: int
    expected: int


def decide(shares: Sequence[Share], remainder: str, number: int) -> Decision:
    """Decides what all processes do with batch `number`, from the share of each.

    Raises:
        StrategyError: a process failed or has nothing at all, processes contradict each other, or a short batch is an error.
    """
    where = f"batch {number}"
    for process, share in enumerate(shares):
        if share.rows == FAILED:
            raise StrategyError(f"Process {process} failed to read its part of a batch.", where=where)
    ended = [process for process, share in enumerate(shares) if share.rows == ENDED]
    if len(ended) == len(shares):
        return Decision("end", 0, 0)
    _check_contents(shares, where)
    have = ", ".join(f"{max(share.rows, 0)} of {share.expected}" for share in shares) if len(shares) > 1 else ""
    _check_ended(shares, remainder, where, have)
    rows, expected = _count(shares, where)
    if rows == expected and not ended:
        return Decision("use", rows, expected)
    has_none = any(share.rows == 0 for share in shares)  # then there is no row to pad with
    if remainder == "error" or (remainder == "pad" and has_none):
        raise StrategyError(
            f"A batch has {rows} rows, and the plan {expected}.",
            where=where,
            got=f"rows per process: {have}" if have else "",
            fix="let the source leave out batches without rows" if has_none else "say remainder='pad' or 'drop', or change the batch size",
        )
    return Decision("end" if ended and remainder == "drop" else remainder, rows, expected)


def _check_ended(shares: Sequence[Share], remainder: str, where: str, have: str) -> None:
    """Raises if a process has no more batches, unless its rows can be padded or those of the others dropped."""
    others = {rows for share in shares if share.rows != ENDED for rows in share.ranges}
    for process, share in enumerate(shares):
        never, is_shared = not share.ranges, any(rows in others for rows in share.ranges)
        if share.rows == ENDED and (never or remainder == "error" or (remainder == "pad" and is_shared)):
            raise StrategyError(
                f"Process {process} has no {'' if never else 'more '}batches, while others have.",
                where=where,
                got=f"rows per process: {have}",
                fix="give all processes as many rows" + ("" if never else ", or say remainder='pad' or 'drop'"),
            )


def _check_contents(shares: Sequence[Share], where: str) -> None:
    """Checks that processes which hold the same part of a leaf were given the same contents."""
    known: dict[tuple[int, str], tuple[int, str]] = {}
    for process, share in enumerate(shares):
        for leaf, content in enumerate(share.contents):
            part, digest = content[:8], content[8:]
            other, own = known.setdefault((leaf, part), (process, digest))
            if own != digest:
                raise StrategyError(
                    f"Processes {other} and {process} hold the same part of the batch, but were given different data.",
                    where=f"{where}, leaf {leaf} of the batch",
                    fix="read the part that spmdctx.data.process_shard(step) names, or let every process give whole batches (whole=True)",
                )


def _count(shares: Sequence[Share], where: str) -> tuple[int, int]:
    """Counts the real rows and all rows of the whole batch; processes that hold the same rows must agree on them."""
    total = max(stop for share in shares for _, stop in share.ranges)
    real = np.full(total, -1, np.int8)
    for process, share in enumerate(shares):
        if share.rows == ENDED:
            continue
        own = np.concatenate([np.arange(start, stop) for start, stop in share.ranges])
        mine = (np.arange(len(own)) < share.rows).astype(np.int8)
        if np.any((real[own] >= 0) & (real[own] != mine)):
            raise StrategyError(
                f"Process {process} has another number of rows than one that holds the same rows of the batch.",
                where=where,
                got=", ".join(str(max(one.rows, 0)) for one in shares),
            )
        real[own] = mine
    return int((real == 1).sum()), total

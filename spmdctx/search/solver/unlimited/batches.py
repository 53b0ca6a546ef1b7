"""The batches of edges whose messages are sent at once: arrays of indices and tables, one slice per edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.groups import Groups

SMALL_TABLE = 4096
"""Entries up to which tables are stacked even if they differ."""
BATCH_WORK = 12_000
"""Additions that take as long as one more batch."""
FEW_EDGES = 8
"""Edges from which a larger table is added faster to all of them at once than to one after the other."""
TURNED = 1.5
"""Columns over edges from which NumPy's inner loop is faster over the columns."""

Link = tuple[int, int]
"""The node that sends, and the one that receives."""


class Batch(NamedTuple):
    """Edges whose messages are sent at once, from `left` to `right`. Edges are the last axis, which is usually the longest.

    `left`, `right` index the flat state arrays, [state, edge]; `into_left`, `into_right` the flat messages. `share` is the weight of the
    sender. `tables` is [state of left, state of right, edge or 1]; with `groups` they are those of the one table that all edges share.
    `is_apart` says that no two edges have the same receiver.

    Smaller tables are filled up: with their last row again, which changes no minimum, and with columns for a state and message past the
    last, which are never read.
    """

    left: IntArray
    right: IntArray
    into_left: IntArray
    into_right: IntArray
    share: FloatArray
    tables: FloatArray
    groups: Groups | None
    is_apart: bool


class Single(NamedTuple):
    """A batch of one edge: slices of the flat states and messages, which cost less than lists of indices."""

    left: slice
    right: slice
    into_left: slice
    into_right: slice
    share: float
    table: FloatArray
    groups: Groups | None


class Places(NamedTuple):
    """The first state of each node, the first message of each sender to a receiver, and the numbers of states and messages."""

    states: Mapping[int, int]
    messages: Mapping[Link, int]
    num_states: int
    num_messages: int


def batches_of(
    graph: CostGraph,
    links: Iterable[Link],
    level: Mapping[int, int],
    places: Places,
    share: Callable[[int], float],
    *,
    fills: bool = True,
    parts: bool = False,
) -> list[Batch]:
    """Returns the links in batches, those whose senders have lower levels first.

    Args:
        graph: the tables.
        links: the sender and receiver of each message.
        level: by sender; one batch has links of one level.
        places: see there.
        share: the weight of a sender.
        fills: whether tables of different shapes share a batch if that saves time, and lie as minima over their rows are found fastest.
        parts: whether few links of one larger table are batches of their own, which is faster, and changes the order of some sums.
    """
    alike: dict[int, dict[tuple[int, ...], list[Link]]] = {}
    for node, other in links:
        rows, columns = graph.table(node, other).shape
        same = graph.links[node][other] if rows * columns > SMALL_TABLE else -1
        alike.setdefault(level[node], {}).setdefault((rows, columns, same), []).append((node, other))
    found = []
    for number in sorted(alike):
        own = alike[number]
        joined = _joined(own) if fills else [own[key] for key in sorted(own)]
        split = (part for joint in joined for part in (_apart(graph, joint) if parts else [joint]))
        found += [_batch(graph, part, places, share, turns=fills) for part in split]
    return found


def _apart(graph: CostGraph, links: list[Link]) -> list[list[Link]]:
    """Returns links of one larger table by themselves, if they are few: NumPy's inner loop would run over the edges."""
    first, second = links[0]
    is_large = graph.table(first, second).size > SMALL_TABLE
    return [[link] for link in links] if is_large and len(links) < FEW_EDGES else [links]


def _joined(alike: Mapping[tuple[int, ...], list[Link]]) -> list[list[Link]]:
    """Groups links by the shape of their tables.

    Several shapes share a group if filling up the smaller tables takes less time than one more batch.
    """
    parts: list[list[Link]] = []
    shapes: list[tuple[int, int]] = []
    for rows, columns, same in sorted(alike, key=lambda key: (-key[0] * key[1], key)):
        links, best, least = alike[rows, columns, same], -1, BATCH_WORK
        for place, (high, wide) in enumerate(shapes if same < 0 else ()):
            count = len(parts[place])
            more = (count + len(links)) * max(high, rows) * max(wide, columns) - count * high * wide - len(links) * rows * columns
            if more < least:
                best, least = place, more
        if best < 0:
            parts.append(list(links))
            shapes.append((rows, columns) if same < 0 else (1 << 30, 1 << 30))
        else:
            parts[best] += links
            shapes[best] = max(shapes[best][0], rows), max(shapes[best][1], columns)
    return parts


def _batch(graph: CostGraph, links: list[Link], places: Places, share: Callable[[int], float], *, turns: bool) -> Batch:
    numbers = [graph.links[node][other] for node, other in links]
    distinct = dict.fromkeys(numbers)
    sizes = [graph.pool.arrays[number].shape for number in numbers]
    heights, widths = (np.array(own, dtype=np.int64) for own in zip(*sizes, strict=True))
    rows, columns = np.arange(heights.max())[:, None], np.arange(widths.max())[:, None]
    # Rows repeat the last one; columns past the last belong to no state.
    repeated, beyond = np.minimum(rows, heights - 1), columns >= widths
    starts, messages = places.states, places.messages
    left = np.array([starts[node] for node, _ in links]) + repeated
    right = np.where(beyond, places.num_states, np.array([starts[other] for _, other in links]) + columns)
    into_left = np.array([messages[other, node] for node, other in links]) + repeated
    into_right = np.where(beyond, places.num_messages, np.array([messages[link] for link in links]) + columns)
    groups = graph.pool.groups(numbers[0]) if len(distinct) == 1 else None
    if groups is not None:
        tables = groups.small[:, :, None]
    else:
        shape = len(rows), len(columns)
        filled = {number: _filled(graph.pool.arrays[number], shape) for number in distinct}
        own = [filled[number] for number in (numbers if len(distinct) > 1 else distinct)]
        is_turned = turns and len(own) > 1 and shape[1] >= TURNED * len(own)
        # The axes of both are the same; only the order in memory differs.
        tables = np.stack(own, axis=1).transpose(0, 2, 1) if is_turned else np.stack(own, axis=-1)
    weights = np.array([share(node) for node, _ in links])
    return Batch(left, right, into_left, into_right, weights, tables, groups, len({other for _, other in links}) == len(links))


def _filled(table: FloatArray, shape: tuple[int, int]) -> FloatArray:
    """Fills a table up to a shape by repeating its last row and column."""
    if table.shape == shape:
        return table
    rows, columns = (np.minimum(np.arange(size), own - 1) for size, own in zip(shape, table.shape, strict=True))
    filled: FloatArray = table.take(rows, axis=0).take(columns, axis=1)
    return filled


def narrowed(batch: Batch) -> Batch | Single:
    """Returns a batch of one edge as a `Single`."""
    if batch.left.shape[1] > 1:
        return batch
    places = [slice(int(own[0, 0]), int(own[-1, 0]) + 1) for own in batch[:4]]
    return Single(places[0], places[1], places[2], places[3], float(batch.share[0]), batch.tables[:, :, 0], batch.groups)

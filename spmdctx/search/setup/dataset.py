"""The marks of a dataset_strategy of slices or Layouts on the batch leaves, through which it helps to choose the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmdctx.errors import StrategyError
from spmdctx.ir.graph import Graph, Mark
from spmdctx.ir.layout import Layout
from spmdctx.search.setup.mark_checks import strategy_text


def dataset_marks(graph: Graph, leaves: Sequence[int], dataset: object, num_devices: int) -> list[Mark]:
    """Returns the marks of a tuple on the batch leaves; a strategy given by name has none, because the mode applies it to all leaves.

    Raises:
        StrategyError: entries that fit neither the leaves nor the devices.
    """
    if not isinstance(dataset, tuple):
        return []
    if len(dataset) != len(leaves):
        paths = ", ".join(graph.values[value].path for value in leaves)
        raise StrategyError(
            f"dataset_strategy has {len(dataset)} entries, but the step has {len(leaves)} batch leaves.",
            got=f"dataset_strategy {dataset}",
            need=f"one entry per batch leaf: {paths}",
        )
    marks = []
    for index, (value, strategy) in enumerate(zip(leaves, dataset, strict=True)):
        _check_dataset_entry(graph, value, strategy, num_devices)
        marks.append(Mark(-1, value, -1 - index, "in", index, strategy, "dataset_strategy"))
    return marks


def _check_dataset_entry(graph: Graph, value: int, strategy: object, num_devices: int) -> None:
    known = graph.values[value]
    given = strategy
    if isinstance(strategy, Layout):
        strategy = strategy.strategy
    if not isinstance(strategy, tuple):
        return
    if len(strategy) != len(known.shape):
        raise StrategyError(
            f"dataset_strategy gives {len(strategy)} dimensions for '{known.path}', which has {len(known.shape)}.",
            got=f"{strategy_text(given)} for shape {known.shape}",
        )
    for dim, (slices, size) in enumerate(zip(strategy, known.shape, strict=True)):
        if not isinstance(slices, int) or slices < 1 or size % slices:
            raise StrategyError(
                f"dataset_strategy splits dimension {dim} of '{known.path}' into {slices} slices, "
                f"but its size {size} is not divisible by {slices}.",
                got=f"{strategy_text(given)} for shape {known.shape}",
            )
    blocks = math.prod(given.device_matrix if isinstance(given, Layout) else strategy)
    if num_devices % blocks:
        raise StrategyError(
            f"dataset_strategy splits '{known.path}' into {blocks} blocks, which does not divide {num_devices} devices.",
            got=strategy_text(given),
        )

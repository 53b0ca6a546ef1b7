"""MindSpore's ways to say into how many micro-batches and parts a loss is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from spmdctx.errors import ContextError

P = ParamSpec("P")
R = TypeVar("R")


class PipelineCell(Generic[P, R]):
    """A loss whose batch runs through the stages of a pipeline in micro-batches.

    `spmdctx.value_and_grad(PipelineCell(loss, micro_size=16))` cuts the batch into 16 micro-batches. With one stage, and called by itself,
    it is the loss.

    Args:
        network: the loss.
        micro_size: micro-batches; at least as many as stages.

    Raises:
        ContextError: micro_size is no positive number, or the loss cannot be called.
    """

    def __init__(self, network: Callable[P, R], micro_size: int) -> None:
        if isinstance(micro_size, bool) or not isinstance(micro_size, int) or micro_size < 1:
            raise ContextError(
                "PipelineCell needs a number of micro-batches.", got=f"micro_size={micro_size!r}", need="a whole number >= 1"
            )
        self.network, self.micro_size = _callable("PipelineCell", network), micro_size
        functools.update_wrapper(self, network, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the loss."""
        return self.network(*args, **kwargs)


class MicroBatchInterleaved(Generic[P, R]):
    """A loss whose batch, or micro-batch, runs in parts side by side on the same devices.

    `spmdctx.value_and_grad(MicroBatchInterleaved(loss, 2))` computes the mean of the losses of two halves. The equations of the parts take
    turns, so that one part may compute while another one communicates. Part j of n holds the elements j, j+n, ... of the batch.
    Called by itself, and outside of `parallel`, it is the loss. `PipelineCell(MicroBatchInterleaved(loss, 2), 16)` does both.

    Args:
        network: the loss, a mean over its batch.
        interleave_num: parts.

    Raises:
        ContextError: interleave_num is no positive number, or the loss cannot be called.
    """

    def __init__(self, network: Callable[P, R], interleave_num: int = 2) -> None:
        if isinstance(interleave_num, bool) or not isinstance(interleave_num, int) or interleave_num < 1:
            raise ContextError(
                "MicroBatchInterleaved needs a number of parts.", got=f"interleave_num={interleave_num!r}", need="a whole number >= 1"
            )
        self.network, self.interleave_num = _callable("MicroBatchInterleaved", network), interleave_num
        functools.update_wrapper(self, network, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the loss."""
        return self.network(*args, **kwargs)


def _callable(cell: str, network: Callable[P, R]) -> Callable[P, R]:
    if not callable(network):
        raise ContextError(f"{cell} needs a loss.", got=ascii(network)[:80], need="a function, a module, or another cell")
    return network


class LossInside(NamedTuple):
    """A loss without the cells around it: its micro-batches, None if no cell says it, and its parts."""

    fn: Callable[..., Any]
    micro_size: int | None
    num_parts: int


def loss_of(fn: Callable[..., Any]) -> LossInside:
    """Returns the loss inside of cells."""
    micro_size, num_parts = None, 1
    while isinstance(fn, PipelineCell | MicroBatchInterleaved):
        if isinstance(fn, PipelineCell):
            micro_size = fn.micro_size if micro_size is None else micro_size
        else:
            num_parts *= fn.interleave_num
        fn = fn.network
    return LossInside(fn, micro_size, num_parts)

"""MindSpore's way to say into how many micro-batches a loss is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

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
        ContextError: micro_size is no positive number.
    """

    def __init__(self, network: Callable[P, R], micro_size: int) -> None:
        if isinstance(micro_size, bool) or not isinstance(micro_size, int) or micro_size < 1:
            raise ContextError(
                "PipelineCell needs a number of micro-batches.", got=f"micro_size={micro_size!r}", need="a whole number >= 1"
            )
        self.network, self.micro_size = network, micro_size
        functools.update_wrapper(self, network, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the loss."""
        return self.network(*args, **kwargs)


def loss_of(fn: Callable[..., Any]) -> tuple[Callable[..., Any], int | None]:
    """Returns the loss inside of a PipelineCell, and its micro-batches; None for any other function."""
    return (fn.network, fn.micro_size) if isinstance(fn, PipelineCell) else (fn, None)

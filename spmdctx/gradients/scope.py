"""The trace to which calls of `value_and_grad` belong, and the carrier that runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import jax

from spmdctx.gradients.loss import Loss

T = TypeVar("T")


class Carrier(Protocol):
    """Carries out the calls of one trace."""

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the call and returns its result."""


_carrier: ContextVar[Carrier | None] = ContextVar("spmdctx_gradients", default=None)
_numbers = itertools.count(1)

# JAX caches what nested jits trace; a number in its trace context keeps the passes over one step apart.
_pass_number = jax.make_user_context(0)


@contextmanager
def carried_by(carrier: Carrier) -> Iterator[None]:
    """Hands calls of `value_and_grad` in the step that is traced inside to `carrier`."""
    token = _carrier.set(carrier)
    try:
        with _pass_number(next(_numbers)):
            yield
    finally:
        _carrier.reset(token)


_asked: ContextVar[list[bool] | None] = ContextVar("spmdctx_gradients_asked", default=None)


@contextmanager
def _collected(variable: ContextVar[list[T] | None]) -> Iterator[list[T]]:
    """Collects what calls inside put into the list of a variable."""
    found: list[T] = []
    token = variable.set(found)
    try:
        yield found
    finally:
        variable.reset(token)


def asked_for_carrier() -> AbstractContextManager[list[bool]]:
    """Collects whether a call inside that JAX runs asks for a carrier: the list is empty if none does."""
    return _collected(_asked)


def carrier_of_trace(*, asks: bool = False) -> Carrier | None:
    """Returns the carrier of calls of `value_and_grad`, or None if JAX or nnx runs them.

    JAX or nnx runs them inside the user's shard_maps and inside another loss.

    Args:
        asks: whether JAX cannot run the call as it is meant.
    """
    asked = _asked.get()
    if asks and asked is not None:
        asked.append(True)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return _carrier.get()


_cells: ContextVar[list[int] | None] = ContextVar("spmdctx_gradients_cells", default=None)


def cells_met() -> AbstractContextManager[list[int]]:
    """Collects the micro-batches that a PipelineCell asks for in calls inside."""
    return _collected(_cells)


def meet_cell(micro_size: int | None) -> None:
    """Notes that a call's loss is in a PipelineCell, where somebody asks."""
    found = _cells.get()
    if found is not None and micro_size is not None:
        found.append(micro_size)


def plainly(fn: Callable[[], Any]) -> Any:
    """Calls `fn`, in which `value_and_grad` is JAX's or nnx's own."""
    token = _carrier.set(None)
    try:
        return fn()
    finally:
        _carrier.reset(token)

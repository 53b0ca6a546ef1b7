"""The scope of a collective: tells whether it is called inside each device's part of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import jax

from spmdctx.errors import CommunicationError
from spmdctx.trace.marker import traced_mode
from spmdctx.trace.scope.mesh import get_mesh

T = TypeVar("T")
Axes = tuple[tuple[str, int], ...]


class View(Enum):
    """The views of a value in a loss while it is traced."""

    LOCAL = auto()
    """As one device has it: collectives are real."""
    WHOLE = auto()
    """As the pieces of all devices together: a collective changes where they are, and no shape."""
    COPIED = auto()
    """As if every device had the whole: a collective changes shapes as on one device."""


class Scope(NamedTuple):
    """The mesh axes that are manual, with their sizes, and how values are seen."""

    axes: Axes
    view: View = View.LOCAL

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, major first."""
        return tuple(name for name, _ in self.axes)


class _Losses:
    """The scope of the loss that is traced, and whether a collective was met in it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.has_collective = False


_loss: ContextVar[_Losses | None] = ContextVar("spmdctx_local_loss", default=None)
_numbers = itertools.count(1)

# JAX caches what nested jits trace; a number in its trace context keeps the views of one loss apart.
_view_number = jax.make_user_context(0)


def traced_locally(trace: Callable[[], T], axes: Sequence[tuple[str, int]]) -> T:
    """Runs `trace()` of a local loss over the replicas of `axes`, or of the whole loss if there are no axes."""
    if not axes:
        return trace()
    # A trace keeps the mesh that is set, but is to run in a shard_map, where another mesh is set.
    with _seen(Scope(tuple(axes))), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return trace()


def traced_whole(trace: Callable[[], T], axes: Sequence[tuple[str, int]]) -> T:
    """Runs `trace()` of the loss over the global batch, in which collectives are placeholders.

    Arrays whose pieces a collective joins are whole there already, so the collective changes no shape. If the loss cannot be
    traced that way, collectives change shapes as if every device had the whole.
    """
    if not axes:
        return trace()
    with _seen(Scope(tuple(axes), View.WHOLE)) as seen:
        try:
            return trace()
        except (TypeError, ValueError) as error:
            if not seen.has_collective:
                raise
            first = error
    with _seen(Scope(tuple(axes), View.COPIED)):
        try:
            return trace()
        except (TypeError, ValueError):
            first.add_note(
                "The loss has collectives of spmdctx.ops, and is first traced over the whole batch, where they change no shape. "
                "A loss that does not fit together so has to be written in jax.shard_map over spmdctx.get_mesh()."
            )
            raise first from None


@contextmanager
def _seen(scope: Scope) -> Iterator[_Losses]:
    losses = _Losses(scope)
    token = _loss.set(losses)
    try:
        with _view_number(next(_numbers)):
            yield losses
    finally:
        _loss.reset(token)


def in_local_loss() -> bool:
    """Returns whether a loss is being traced of which each device computes its own part."""
    return _loss.get() is not None


def scope_of(what: str) -> Scope:
    """Returns the scope in which a collective is called; `what` is its name.

    Raises:
        CommunicationError: the call is outside of any scope.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        left = [name for name, size in mesh.shape.items() if name not in mesh.manual_axes and size > 1]
        if left:
            raise CommunicationError(
                f"{what} is called in a shard_map that leaves the mesh axis {' and '.join(map(str, left))} to the compiler.",
                need="all axes of the mesh in the shard_map: a rank is a device",
                fix="leave out axis_names=, or use jax.lax's collectives",
            )
        return Scope(tuple((name, size) for name, size in mesh.shape.items() if name in mesh.manual_axes))
    loss = _loss.get()
    if loss is not None:
        loss.has_collective = True
        return loss.scope
    return _of_one_device(what)


def _of_one_device(what: str) -> Scope:
    mode = traced_mode()
    if mode is not None and get_mesh_size() == 1:
        return Scope(())
    where = f"a step in {mode}" if mode else "no step"
    raise CommunicationError(
        f"{what} is called where every device has the whole value.",
        where=where,
        need="the loss given to spmdctx.value_and_grad in data_parallel or hybrid_parallel, which is each device's own",
        fix="a metric of the whole batch needs none, jnp.sum over it is that of all devices; what each device has of its own comes from "
        "that loss (has_aux=True), or from jax.shard_map(fn, mesh=spmdctx.get_mesh(), ...) inside the step",
    )


def get_mesh_size() -> int:
    """Returns the number of devices of the step that is being traced, or 0 if its mesh is found later."""
    try:
        return int(get_mesh().size)
    except ValueError:
        return 0


def positions(scope: Scope) -> dict[int, int] | None:
    """Maps each rank to its position in the mesh, or returns None if both are the same.

    They differ in a step whose devices are not the first ones in order.
    """
    try:
        mesh: Any = get_mesh()
    except ValueError:
        return None
    if not isinstance(mesh, jax.sharding.Mesh) or tuple(mesh.shape.items()) != scope.axes:
        return None
    ranks = {device: rank for rank, device in enumerate(jax.devices())}
    found = {ranks[device]: place for place, device in enumerate(mesh.devices.flat) if device in ranks}
    return None if all(rank == place for rank, place in found.items()) or len(found) < mesh.size else found

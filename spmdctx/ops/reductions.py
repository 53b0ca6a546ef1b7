"""AllReduce and ReduceScatter."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.communication.groups import WORLD
from spmdctx.errors import CommunicationError, UnsupportedError, message
from spmdctx.ops.members import Members, checked_group, checked_int, in_order, members_of, rotated
from spmdctx.ops.scope import View


class ReduceOp(StrEnum):
    """The operations that reduce the values of several devices to one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


class _Reduction:
    """The common constructor of both reductions."""

    def __init__(self, op: str = ReduceOp.SUM, group: str = WORLD, *, fusion: int = 0) -> None:
        self.op = _checked_op(op)
        self.group = checked_group(group)
        self.fusion = checked_int("fusion", fusion)


class AllReduce(_Reduction):
    """Computes the sum, maximum, minimum or product over a group's devices, on each of them.

    The gradient is that of JAX's own collectives, where each device differentiates the sum of all devices' results. The gradient
    of a maximum or minimum goes in equal parts to the devices that have it. Devices that the group leaves out keep their value.

    Args:
        op: a member of `ReduceOp`.
        group: made by `communication.create_group`; all devices by default.
        fusion: collectives with the same number above 0 may be sent as one, and with no others; 0 leaves it to XLA.
    """

    def __call__(self, x: Any) -> Any:
        """Returns the reduced value, with the shape and dtype of `x`.

        Raises:
            CommunicationError: `communication.init` was not called, or the call is outside of a device's part of a step.
        """
        members = members_of("AllReduce", self.group, covers_all=False)
        x = jnp.asarray(x)
        if not members.is_real:
            return x
        return _reduced(x, self.op, in_order(members, self.fusion))


class ReduceScatter(_Reduction):
    """Reduces over a group's devices and leaves each with its piece along dimension 0.

    Args:
        op: a member of `ReduceOp`.
        group: made by `communication.create_group`; all devices by default.
        fusion: as for `AllReduce`, for sums only; other reductions have no collective of their own.
    """

    def __call__(self, x: Any) -> Any:
        """Returns the device's piece; its dimension 0 is that of `x` divided by the number of devices in the group.

        Raises:
            CommunicationError: as for `AllReduce`; also if dimension 0 does not divide, or the group leaves out devices.
        """
        members = members_of("ReduceScatter", self.group)
        x = jnp.asarray(x)
        if not x.ndim or x.shape[0] % members.size:
            raise CommunicationError(
                f"ReduceScatter over {members.size} devices cannot divide dimension 0.", got=f"shape {x.shape}", need="a multiple of them"
            )
        if members.view is View.WHOLE or not members.axes:
            return x
        if members.view is View.COPIED:
            return x[: x.shape[0] // members.size]
        if self.op is ReduceOp.SUM:
            members, turns = rotated(members, self.fusion)
            x = jnp.roll(x, -turns * (x.shape[0] // members.size), axis=0) if turns else x
            return jax.lax.psum_scatter(x, members.axes, scatter_dimension=0, axis_index_groups=members.groups, tiled=True)
        parts = jax.lax.all_to_all(x, members.axes, 0, 0, axis_index_groups=members.groups, tiled=True)
        return _REDUCTIONS[self.op](parts.reshape(members.size, -1, *x.shape[1:]), axis=0)


_REDUCTIONS: dict[str, Any] = {ReduceOp.SUM: jnp.sum, ReduceOp.MAX: jnp.max, ReduceOp.MIN: jnp.min, ReduceOp.PROD: jnp.prod}


def _checked_op(op: object) -> ReduceOp:
    if not isinstance(op, str):
        raise TypeError(message("The reduction is named by a string.", got=repr(op), need=", ".join(ReduceOp)))
    if op not in set(ReduceOp):
        raise CommunicationError(f"There is no reduction '{op}'.", need=", ".join(ReduceOp))
    return ReduceOp(op)


def _reduced(x: Any, op: ReduceOp, members: Members) -> Any:
    if op is ReduceOp.SUM:
        return summed(x, members)
    if op is not ReduceOp.PROD:
        return _extreme(x, op, members)
    # A product has no collective of its own.
    if not members.outside:
        return jnp.prod(jax.lax.all_gather(x, members.axes, axis_index_groups=members.groups), axis=0)
    raise UnsupportedError(
        "AllReduce(ReduceOp.PROD) over a group that leaves out devices.", fix="create_group with a list of ranks for each device to be in"
    )


def summed(x: Any, members: Members) -> Any:
    """Returns the sum over the members."""
    try:
        return jax.lax.psum(x, members.axes, axis_index_groups=members.groups)
    except NotImplementedError as error:
        raise UnsupportedError(
            "JAX sums over groups of devices only where it does not check which values vary between them.",
            fix="jax.shard_map(..., check_vma=False), or a group along axes of the mesh",
        ) from error


def _extreme(x: Any, op: ReduceOp, members: Members) -> Any:
    """Returns the maximum or minimum, with a derivative, which JAX's collectives for them lack."""
    collective: Any = jax.lax.pmax if op is ReduceOp.MAX else jax.lax.pmin

    extreme: Any = jax.custom_jvp(lambda value: collective(value, members.axes, axis_index_groups=members.groups))

    def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        found = extreme(primals[0])
        has_it = (primals[0] == found).astype(tangents[0].dtype)
        return found, summed(tangents[0] * (has_it / summed(has_it, members)), members)

    extreme.defjvp(derivative)
    return extreme(x)

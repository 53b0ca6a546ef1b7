"""AllGather, AlltoAll, Broadcast and NeighborExchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.communication.groups import WORLD
from spmdctx.errors import CommunicationError, message
from spmdctx.ops.members import Members, checked_group, checked_int, in_order, members_of, rotated
from spmdctx.ops.reductions import summed
from spmdctx.ops.scope import View

_NOBODY = -1


class AllGather:
    """Gathers the values of a group's devices, one after the other along dimension 0, on each of them.

    Args:
        group: made by `communication.create_group`; all devices by default.
        fusion: as for `AllReduce`.
    """

    def __init__(self, group: str = WORLD, *, fusion: int = 0) -> None:
        self.group = checked_group(group)
        self.fusion = checked_int("fusion", fusion)

    def __call__(self, x: Any) -> Any:
        """Returns the gathered value; its dimension 0 is that of `x` times the number of devices in the group.

        Raises:
            CommunicationError: as for `AllReduce`; also if `x` is a scalar, or the group leaves out devices.
        """
        members = members_of("AllGather", self.group)
        x = jnp.asarray(x)
        if not x.ndim:
            raise CommunicationError("AllGather needs a dimension to gather along.", got="a scalar", fix="x[None]")
        if members.view is View.WHOLE or not members.axes:
            return x
        if members.view is View.COPIED:
            return jnp.concatenate([x] * members.size)
        members, turns = rotated(members, self.fusion)
        found = jax.lax.all_gather(x, members.axes, axis_index_groups=members.groups, axis=0, tiled=True)
        return jnp.roll(found, turns * x.shape[0], axis=0) if turns else found


class AlltoAll:
    """Splits one dimension over a group's devices, and joins another from them.

    Args:
        split_count: the number of devices in the group.
        split_dim: the dimension that is split.
        concat_dim: the dimension that is joined.
        group: made by `communication.create_group`; all devices by default.
    """

    def __init__(self, split_count: int, split_dim: int, concat_dim: int, group: str = WORLD) -> None:
        self.split_count = checked_int("split_count", split_count, 1)
        self.split_dim = checked_int("split_dim", split_dim)
        self.concat_dim = checked_int("concat_dim", concat_dim)
        self.group = checked_group(group)

    def __call__(self, x: Any) -> Any:
        """Returns the exchanged value: `split_dim` is divided by `split_count`, and `concat_dim` multiplied.

        Raises:
            CommunicationError: as for `AllGather`; also if the count is not that of the group, or a dimension does not divide.
        """
        members = members_of("AlltoAll", self.group)
        x = jnp.asarray(x)
        if members.size != self.split_count:
            raise CommunicationError(
                f"AlltoAll splits into {self.split_count}, but group '{self.group}' has {members.size} devices.", need="the same number"
            )
        if max(self.split_dim, self.concat_dim) >= x.ndim or x.shape[self.split_dim] % self.split_count:
            raise CommunicationError(
                f"AlltoAll cannot split dimension {self.split_dim} into {self.split_count} and join dimension {self.concat_dim}.",
                got=f"shape {x.shape}",
            )
        if members.view is View.WHOLE or not members.axes:
            return x
        if members.view is View.COPIED:
            kept = jax.lax.slice_in_dim(x, 0, x.shape[self.split_dim] // self.split_count, axis=self.split_dim)
            return jnp.concatenate([kept] * self.split_count, axis=self.concat_dim)
        return jax.lax.all_to_all(x, members.axes, self.split_dim, self.concat_dim, axis_index_groups=members.groups, tiled=True)


class Broadcast:
    """Copies one device's values to all devices of its group.

    Args:
        root_rank: the device's rank in the group.
        group: made by `communication.create_group`; all devices by default. Devices that it leaves out keep their values.
        fusion: as for `AllReduce`, which carries the values.
    """

    def __init__(self, root_rank: int, group: str = WORLD, *, fusion: int = 0) -> None:
        self.root_rank = checked_int("root_rank", root_rank)
        self.group = checked_group(group)
        self.fusion = checked_int("fusion", fusion)

    def __call__(self, x: Any) -> Any:
        """Returns the values of the root, in the structure of `x`: an array, or a tuple or other pytree of arrays.

        Raises:
            CommunicationError: as for `AllReduce`; also if the group does not have the root.
        """
        members = members_of("Broadcast", self.group, covers_all=False)
        if self.root_rank >= members.size:
            raise CommunicationError(
                f"Broadcast from rank {self.root_rank} of group '{self.group}', which has {members.size} devices.",
                need=f"a rank from 0 to {members.size - 1}",
            )
        if not members.is_real:
            return x
        sends, ordered = _sends(members, self.root_rank), in_order(members, self.fusion)
        return jax.tree.map(lambda value: _from_root(jnp.asarray(value), sends, ordered), x)


def _sends(members: Members, root: int) -> Any:
    """Returns whether this device's value counts: true for the root, and for devices outside the group."""
    if members.groups is None:
        return jax.lax.axis_index(members.axes) == root
    lists = members.groups[: len(members.groups) - len(members.outside)]
    places = sorted([*(row[root] for row in lists), *members.outside])
    return jnp.isin(jax.lax.axis_index(members.axes), jnp.array(places))


def _from_root(x: Any, sends: Any, members: Members) -> Any:
    if x.dtype == jnp.bool_:
        return _from_root(x.astype(jnp.uint8), sends, members).astype(jnp.bool_)
    return summed(jnp.where(sends, x, jnp.zeros_like(x)), members)


class NeighborExchange:
    """Sends values from each device to others of its choice, and receives theirs.

    One program runs on every device, so the ranks are given for all. Row r of `send_rank_ids` holds the ranks to which rank r
    sends its first, second, ... value; row r of `recv_rank_ids` holds those from which it receives. -1 stands for nobody, and
    receiving from nobody gives zeros.

    Args:
        send_rank_ids: a list of ranks for each rank.
        recv_rank_ids: a list of ranks for each rank.
        recv_shapes: the shapes of received values; checked if given.
        send_shapes: the shapes of sent values; checked if given.
        recv_type: the type of received values; checked if given.
        group: made by `communication.create_group`; all devices by default. Ranks are those in the group.
    """

    def __init__(
        self,
        send_rank_ids: Sequence[Sequence[int]],
        recv_rank_ids: Sequence[Sequence[int]],
        recv_shapes: Sequence[Sequence[int]] | None = None,
        send_shapes: Sequence[Sequence[int]] | None = None,
        recv_type: Any = None,
        group: str = WORLD,
    ) -> None:
        self.send_rank_ids = _checked_table("send_rank_ids", send_rank_ids)
        self.recv_rank_ids = _checked_table("recv_rank_ids", recv_rank_ids)
        self.recv_shapes = None if recv_shapes is None else [tuple(shape) for shape in recv_shapes]
        self.send_shapes = None if send_shapes is None else [tuple(shape) for shape in send_shapes]
        self.recv_type = recv_type
        self.group = checked_group(group)
        self._routes = _routes(self.send_rank_ids, self.recv_rank_ids)

    def __call__(self, x: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the values that the device receives, one for each entry of its row of `recv_rank_ids`.

        Raises:
            CommunicationError: as for `AllGather`; also if the tables are for another number of devices, or values have other shapes
                than stated.
        """
        members = members_of("NeighborExchange", self.group)
        values = [jnp.asarray(value) for value in x]
        if len(self.send_rank_ids) != members.size or len(values) != len(self.send_rank_ids[0]):
            raise CommunicationError(
                f"NeighborExchange is for {len(self.send_rank_ids)} devices that send {len(self.send_rank_ids[0])} values each.",
                got=f"{len(values)} values on each of {members.size} devices",
            )
        _check_shapes("sends", [value.shape for value in values], self.send_shapes)
        received = tuple(self._received(values, routes, members) for routes in self._routes)
        _check_shapes("receives", [value.shape for value in received], self.recv_shapes)
        if self.recv_type is not None and any(value.dtype != self.recv_type for value in received):
            raise CommunicationError(
                "NeighborExchange receives another type than stated.", got=str(received[0].dtype), need=str(self.recv_type)
            )
        return received

    @staticmethod
    def _received(values: list[Any], routes: dict[int, list[tuple[int, int]]], members: Members) -> Any:
        if not members.is_real:
            return values[next(iter(routes), 0)]
        lists = members.groups or [list(range(members.size))]
        found = None
        for slot, pairs in routes.items():
            places = [(row[source], row[target]) for row in lists for source, target in pairs]
            moved = jax.lax.ppermute(values[slot], members.axes, places)
            found = moved if found is None else found + moved
        return jnp.zeros_like(values[0]) if found is None else found


def _routes(sends: list[list[int]], receives: list[list[int]]) -> list[dict[int, list[tuple[int, int]]]]:
    """Returns, for each received value and each sent value, the pairs of sender and receiver.

    Raises:
        CommunicationError: a rank receives from one that does not send to it, or the other way round.
    """
    routes: list[dict[int, list[tuple[int, int]]]] = [{} for _ in receives[0]]
    waiting = {(sender, rank, slot) for sender, row in enumerate(sends) for slot, rank in enumerate(row) if rank != _NOBODY}
    for receiver, row in enumerate(receives):
        for place, sender in enumerate(row):
            if sender == _NOBODY:
                continue
            slots = sorted(slot for source, target, slot in waiting if (source, target) == (sender, receiver))
            if not slots:
                raise CommunicationError(f"Rank {receiver} receives from rank {sender}, which does not send to it as often.")
            waiting.remove((sender, receiver, slots[0]))
            routes[place].setdefault(slots[0], []).append((sender, receiver))
    if waiting:
        sender, receiver, _ = min(waiting)
        raise CommunicationError(f"Rank {sender} sends to rank {receiver}, which does not receive from it as often.")
    return routes


def _checked_table(name: str, table: Any) -> list[list[int]]:
    rows = list(table) if isinstance(table, Sequence) else []
    if not rows or not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        raise TypeError(
            message(
                f"{name} must hold a list of ranks for each rank: one program runs on every device.",
                got=repr(table),
                fix="[[(rank + 1) % size] for rank in range(size)] sends to the next one",
            )
        )
    found = [[checked_int(f"a rank of {name}", rank, _NOBODY) for rank in row] for row in rows]
    if len({len(row) for row in found}) != 1 or max(max(row, default=_NOBODY) for row in found) >= len(found):
        raise CommunicationError(
            f"{name} must hold as many ranks for each rank, -1 for nobody.", got=repr(table), need=f"ranks from -1 to {len(found) - 1}"
        )
    return found


def _check_shapes(verb: str, found: list[Any], stated: list[tuple[int, ...]] | None) -> None:
    if stated is not None and [tuple(shape) for shape in found] != stated:
        raise CommunicationError(f"NeighborExchange {verb} other shapes than stated.", got=str(found), need=str(stated))

"""Groups of ranks: the world, and the groups that the user makes; a rank is a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmdctx.communication.current import current_world
from spmdctx.errors import CommunicationError, message

WORLD = "world"
"""The group of all devices."""
WORLD_NAMES = (WORLD, "nccl_world_group", "hccl_world_group", "mccl_world_group")
"""The names of the world in MindSpore, by backend."""

Ranks = tuple[tuple[int, ...], ...]

_groups: dict[str, Ranks] = {}


def create_group(group: str, rank_ids: Sequence[int] | Sequence[Sequence[int]]) -> None:
    """Makes a group that collectives in `spmdctx.ops` and the functions here know by its name.

    One program runs on every device, so every process makes the same groups. In MindSpore each process may name its own list of
    ranks under the same name. To do this here, give all the lists.

    Args:
        group: the name of the group.
        rank_ids: the ranks, in the order in which results are joined. Several lists of equal length are allowed if no rank is in
            two of them.

    Raises:
        CommunicationError: `init` was not called, the name is in use, or ranks are missing, repeated, negative or beyond the devices.
        TypeError: the name is not a string, or a rank is not an int.
    """
    size = len(current_world("create_group").devices)
    _check_name(group)
    if group in _groups or group in WORLD_NAMES:
        raise CommunicationError(f"There is a group '{group}' already.", fix="destroy_group it first, or take another name")
    _groups[group] = _within(group, _checked(group, rank_ids), size)


def destroy_group(group: str) -> None:
    """Forgets a group; steps that were traced with it keep its ranks.

    Raises:
        CommunicationError: `init` was not called, or the group is unknown or is that of all devices.
    """
    current_world("destroy_group")
    _check_name(group)
    if group in WORLD_NAMES:
        raise CommunicationError("The group of all devices cannot be destroyed.", got=f"group='{group}'")
    if group not in _groups:
        raise _unknown(group)
    del _groups[group]


def forget_groups() -> None:
    """Forgets all of them."""
    _groups.clear()


def ranks_of(group: str, size: int) -> Ranks:
    """Returns the lists of ranks of a group in a world of `size` devices.

    Raises:
        CommunicationError: there is no such group, or it has ranks beyond the world.
    """
    _check_name(group)
    if group in WORLD_NAMES:
        return (tuple(range(size)),)
    if group not in _groups:
        raise _unknown(group)
    return _within(group, _groups[group], size)


def own_ranks(group: str, rank: int, size: int) -> tuple[int, ...]:
    """Returns the list of a group that holds `rank`, or the first one if none does."""
    found = ranks_of(group, size)
    return next((ranks for ranks in found if rank in ranks), found[0])


def _check_name(group: object) -> None:
    if not isinstance(group, str):
        raise TypeError(message("A group is named by a string.", got=repr(group)))


def _within(group: str, found: Ranks, size: int) -> Ranks:
    largest = max(max(ranks) for ranks in found)
    if largest >= size:
        raise CommunicationError(f"Group '{group}' has rank {largest}, but there are {size} devices.", need=f"ranks from 0 to {size - 1}")
    return found


def _unknown(group: str) -> CommunicationError:
    known = ", ".join(f"'{name}'" for name in (WORLD, *_groups))
    return CommunicationError(f"There is no group '{group}'.", need=f"one of {known}", fix=f"create_group('{group}', [...])")


def _checked(group: str, rank_ids: object) -> Ranks:
    rows = list(rank_ids) if isinstance(rank_ids, Iterable) and not isinstance(rank_ids, str) else None
    if rows and all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        found = tuple(tuple(row) for row in rows)
    else:
        found = (tuple(rows or ()),)
    ranks = [rank for row in found for rank in row]
    if rows is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        raise TypeError(message(f"The ranks of group '{group}' must be ints.", got=repr(rank_ids)))
    if not all(found) or len(set(ranks)) != len(ranks) or min(ranks) < 0 or len({len(row) for row in found}) != 1:
        raise CommunicationError(
            f"The ranks of group '{group}' cannot be used.",
            got=repr(rank_ids),
            need="at least one, none negative, none twice, and lists of one length",
        )
    return found

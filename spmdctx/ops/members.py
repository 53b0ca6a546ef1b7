"""The devices that a collective joins, in the form that JAX's collectives take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmdctx.communication.current import current_world
from spmdctx.communication.groups import Ranks, ranks_of
from spmdctx.errors import CommunicationError, message
from spmdctx.ops.scope import Axes, Scope, View, positions, scope_of


class Members(NamedTuple):
    """The devices that a collective joins: those along mesh axes, or lists of positions in the mesh.

    Attributes:
        axes: names of the mesh axes; none in a world of one device.
        groups: the positions of each list along `axes`, or None if all devices along them are one list.
        size: devices in a list.
        view: how values are seen.
        outside: the positions of devices that are in none of the user's lists; each has a list of its own at the end of `groups`.
    """

    axes: tuple[str, ...]
    groups: list[list[int]] | None
    size: int
    view: View = View.LOCAL
    outside: tuple[int, ...] = ()

    @property
    def is_real(self) -> bool:
        """True if there is something to send."""
        return bool(self.axes) and self.view is View.LOCAL


def members_of(what: str, group: str, *, covers_all: bool = True) -> Members:
    """Returns the members of a group at the call of a collective.

    Args:
        what: the name of the collective.
        group: the name of the group.
        covers_all: whether every device must be in the group, since its result has another shape.

    Raises:
        CommunicationError: `communication.init` was not called, the call is outside of a device's part of a step, or the group
            leaves out devices.
    """
    current_world(f"spmdctx.ops.{what}")
    scope = scope_of(what)
    size = math.prod(size for _, size in scope.axes)
    ranks = ranks_of(group, size)
    if not scope.axes:
        return Members((), None, 1)
    places = positions(scope)
    lists = [[rank if places is None else places[rank] for rank in row] for row in ranks]
    left = sorted(set(range(size)) - {place for row in lists for place in row})
    if left and covers_all:
        raise CommunicationError(
            f"{what} over group '{group}' leaves out {len(left)} of the {size} devices, and every device runs the same program.",
            got=f"ranks {_text(ranks)}",
            fix=f"create_group('{group}', [[...], [...]]) with a list for each device to be in",
        )
    if left:
        return Members(scope.names, [*lists, *([place] for place in left)], len(lists[0]), scope.view, tuple(left))
    axes = _as_axes(lists, scope)
    if axes is not None:
        return Members(axes, None, len(lists[0]), scope.view)
    return Members(scope.names, lists, len(lists[0]), scope.view)


def _as_axes(lists: Sequence[Sequence[int]], scope: Scope) -> tuple[str, ...] | None:
    """Returns the mesh axes along which the lists lie, or None if they lie otherwise."""
    for count in range(1, len(scope.axes) + 1):
        for chosen in itertools.combinations(range(len(scope.axes)), count):
            if {tuple(row) for row in lists} == set(_along(scope.axes, chosen)):
                return tuple(scope.axes[index][0] for index in chosen)
    return None


def _along(axes: Axes, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
    shape = tuple(size for _, size in axes)
    grid = np.arange(math.prod(shape)).reshape(shape)
    others = [index for index in range(len(axes)) if index not in chosen]
    rows = np.transpose(grid, (*others, *chosen)).reshape(-1, math.prod(shape[index] for index in chosen))
    return [tuple(int(place) for place in row) for row in rows]


def _text(ranks: Ranks) -> str:
    return str([list(row) for row in ranks] if len(ranks) > 1 else list(ranks[0]))


def in_order(members: Members, number: int) -> Members:
    """Returns the same members in an order that no other number has, since XLA joins only all-reduces of equal lists.

    Raises:
        CommunicationError: there are more numbers than orders.
    """
    if number == 0:
        return members
    if number >= math.factorial(members.size):
        raise _too_many(number, members.size, math.factorial(members.size))
    lists = members.groups or [list(range(members.size))]
    own = len(lists) - len(members.outside)
    return members._replace(groups=[*(_permuted(row, number) for row in lists[:own]), *lists[own:]])


def _permuted(row: list[int], number: int) -> list[int]:
    rest, order = list(row), []
    for left in range(len(row), 0, -1):
        place, number = number % left, number // left
        order.append(rest.pop(place))
    return order


def rotated(members: Members, number: int) -> tuple[Members, int]:
    """Returns the same members in a rotated order that no other number has, and by how many positions it is rotated.

    Raises:
        CommunicationError: there are more numbers than devices in a list.
    """
    if number == 0:
        return members, 0
    if number >= members.size:
        raise _too_many(number, members.size, members.size)
    lists = members.groups or [list(range(members.size))]
    return members._replace(groups=[[*row[number:], *row[:number]] for row in lists]), number


def _too_many(number: int, size: int, count: int) -> CommunicationError:
    return CommunicationError(f"fusion={number} cannot be told from other numbers among {size} devices.", need=f"less than {count}")


def checked_group(group: object) -> str:
    """Checks the name of a group, as the constructors of the collectives take it."""
    if not isinstance(group, str):
        raise TypeError(message("A group is named by a string.", got=repr(group)))
    return group


def checked_int(what: str, value: object, least: int = 0) -> int:
    """Checks a number that a constructor takes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message(f"{what} must be an int.", got=repr(value)))
    if value < least:
        raise CommunicationError(f"{what} must be at least {least}.", got=str(value))
    return value

"""The arrays of a call, before it runs: none is deleted, and no memory that the step may reuse is in two places.

On several devices XLA ends the process for either. On one device it raises an error, and the caller looks here for the reason.
"""

from __future__ import annotations

import math
import operator
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from spmdctx.errors import DonationError, listed, message

if TYPE_CHECKING:
    from spmdctx.trace.capture.capture import Captured, InputLeaf

_WITH_POINTERS = ("cpu", "gpu")
"""The platforms on which equal pointers on one device surely are the same memory."""


_ASK_DELETED = operator.methodcaller("is_deleted")

_REFUSALS = re.compile(r"(Array|Buffer) has been deleted|Attempt to (donate|use) (a|the same) buffer")
"""What JAX and XLA say before a program runs."""


def is_of_buffers(error: Exception) -> bool:
    """Returns whether a program did not begin, since an array was deleted, or donated and passed twice."""
    return _REFUSALS.search(str(error)) is not None


def check_alive(captured: Captured, leaves: Sequence[Any]) -> None:
    """Refuses arrays among a step's leaves whose memory was reused or freed; JAX does not record which.

    Raises:
        DonationError: an array is deleted.
    """
    gone = [f"{own.path} ({leaf.aval.str_short()})" for own, leaf in zip(captured.inputs, leaves, strict=True) if _is_deleted(leaf)]
    if gone:
        raise DonationError(
            f"{captured.name} gets arrays that are deleted: they were donated to an earlier call, which reused their memory, or their "
            "delete() was called.",
            got=listed(gone),
            fix="pass what the earlier call returned, leave that argument out of its donate_argnums, or call delete() later",
        )


def check_concrete(captured: Captured, leaves: Sequence[Any]) -> None:
    """Refuses shapes in the place of arrays, with which a step can be planned but not run.

    Raises:
        TypeError: a leaf is a shape.
    """
    shapes = [own.path for own, leaf in zip(captured.inputs, leaves, strict=True) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        raise TypeError(
            message(
                f"{captured.name} gets shapes where it needs arrays.",
                where=listed(shapes),
                got="jax.ShapeDtypeStruct",
                need="arrays, to run or verify a step; plan, lower and audit take shapes",
            )
        )


class Buffers:
    """Looks at the arrays of one step's calls.

    Args:
        captured: the step; its paths and its name are those of errors.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured, self._inputs = captured, (inputs := captured.inputs)
        donated = {_kind(leaf) for leaf in inputs if leaf.donated}
        counts = Counter(_kind(leaf) for leaf in inputs)
        # Only arrays of one shape and dtype share memory, and only where one of them is donated is it a fault.
        self._members = [index for index, leaf in enumerate(inputs) if _kind(leaf) in donated and counts[_kind(leaf)] > 1]
        self._measured = [index for index in self._members if _has_pointer(inputs[index])]
        places = {index: place for place, index in enumerate(self._measured)}
        results = [(leaf.carried_from, output) for output, leaf in enumerate(captured.outputs)]
        self._carried = [(places[index], output) for index, output in results if index is not None and index in places]
        self._others = [index for index in self._members if index not in places]
        self._pick = operator.itemgetter(*self._measured) if self._measured else None
        self._distinct: list[Callable[[], Any]] = [_nothing] * len(self._measured)

    def fit(self, leaves: Sequence[Any]) -> bool:
        """Returns whether no leaf is deleted and, by a first look, no donated memory is in two places.

        Leaves of another call than this step's are only looked at for deleted ones.
        """
        try:
            if any(map(_ASK_DELETED, leaves)):
                return False
        except (AttributeError, TypeError):  # NumPy, numbers or tracers among them
            if any(map(_is_deleted, leaves)):
                return False
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                return True
        members = self._members
        if not members or len(leaves) != len(self._inputs):
            return True
        if self._pick is not None and all(map(operator.is_, map(operator.call, self._distinct), self._pick(leaves))):
            members = self._others
        if len({id(leaves[index]) for index in members}) < len(members):
            return False
        if members is self._others:
            return True
        try:
            pointers = {_first_place(leaves[index]) for index in self._measured}
            known = [weakref.ref(leaves[index]) for index in self._measured]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        if len(pointers) < len(known):
            return False
        self._distinct[:] = known
        return True

    def keep(self, results: Sequence[Any]) -> None:
        """Remembers the flat results of a call, which have memory of their own: pointers take as long as a small step."""
        for place, output in self._carried:
            self._distinct[place] = weakref.ref(results[output])

    @property
    def keeps(self) -> bool:
        """Whether the next call's first look needs the results of this one."""
        return bool(self._carried)

    def settled(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[int, str]]:
        """Returns the leaves with a copy of each donated array that is in two places, and a sentence for each copy.

        Where the other place is not donated, that array stays the caller's.

        Raises:
            DonationError: an array is deleted.
        """
        check_alive(self._captured, leaves)
        found, notes = list(leaves), {}
        owners: dict[Any, int] = {}
        arrays = [index for index in self._members if _is_array(leaves[index])]
        for index in sorted(arrays, key=lambda index: self._inputs[index].donated):
            places = _places(leaves[index])
            other = next((owners[place] for place in places if place in owners), None)
            if other is None or not self._inputs[index].donated:
                owners.update(dict.fromkeys(places, index))
                continue
            path, shared = self._inputs[index].path, self._inputs[other].path
            found[index] = _copy(leaves[index])
            notes[index] = f"{path} shares its memory with {shared}; a copy of it is donated."
        return found, notes


def _nothing() -> None:
    """Stands for a reference to no array."""


def _kind(leaf: InputLeaf) -> tuple[tuple[int, ...], str]:
    return leaf.shape, leaf.dtype


def _has_pointer(leaf: InputLeaf) -> bool:
    return math.prod(leaf.shape) > 0 and not leaf.dtype.startswith("key<")


def _is_deleted(leaf: Any) -> bool:
    return _is_array(leaf) and leaf.is_deleted()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _places(array: jax.Array) -> list[Any]:
    """Returns what two arrays have in common where they share memory: themselves, or a pointer on a device."""
    words = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    device: Any = next(iter(words.sharding.device_set))
    if not words.size or device.platform not in _WITH_POINTERS:
        return [id(array)]
    return [id(array), *((shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in words.addressable_shards)]


def _first_place(leaf: Any) -> Any:
    """Returns the pointer of an array on its first device; NumPy's arrays are no memory of a device."""
    return leaf.addressable_data(0).unsafe_buffer_pointer() if isinstance(leaf, jax.Array) else (id(leaf),)


def _copy(array: jax.Array) -> Any:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_copy(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    return jax.device_put(array, array.sharding, may_alias=False)

"""Interfaces for flattening calls and rebuilding results, implemented by `pytrees` and `objects` (nnx)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from spmdctx.ir.graph import Role
from spmdctx.trace.capture.arguments import Call
from spmdctx.trace.capture.partitioning import PartitionNames

Keys = tuple[Any, ...]


SERVED = "param_ps"
"""The metadata of variables that servers hold."""


class Leaf(NamedTuple):
    """One flat leaf as capture sees it.

    `keys` is its path inside the dynamic call: (0, position, ...) or (1, keyword, ...). `role` and `names` are set where
    Flax says them. `owned` marks a leaf of an nnx object, which the step mutates in place; of those, `is_statistic` marks batch
    statistics, and `layerwise` variables of which each device has a piece of its own, and `served` those that servers hold.
    """

    keys: Keys
    value: Any
    role: Role | None = None
    names: PartitionNames | None = None
    owned: bool = False
    is_statistic: bool = False
    layerwise: bool = False
    served: bool = False


class Read(NamedTuple):
    """The leaves of one call, and what writing its results back needs."""

    leaves: list[Any]
    handle: Any


class Result(NamedTuple):
    """One flat result of a traced call; `source` is the input whose next value it is, where that is known."""

    keys: Keys
    value: Any
    source: int | None = None


class Structure(Protocol):
    """Flattens the arguments of one kind of call, and rebuilds its results."""

    def read(self, call: Call) -> Read | None:
        """Returns the leaves of a call, or None if it has another structure."""

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Keeps moved leaves in the objects they came from, so that the next call need not move them again."""

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """Builds the result of the user's function from flat results, and mutates nnx objects."""

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the dynamic call (args, kwargs) with `leaves` in it and objects as states."""

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the result tree with `leaves` in it and objects as states."""


class Flattening(Protocol):
    """One call that is flattened for its trace.

    After `run`, the first `num_state` results belong to objects, and the others have the structure `result_tree`.
    """

    leaves: list[Leaf]
    num_state: int
    result_tree: Any

    def argument(self, argument: int | str) -> Any:
        """Returns the plain leaves of one dynamic argument as a tree."""

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Calls `fn` on the call with traced leaves in it."""

    def filled(self, leaves: Sequence[Any]) -> Call:
        """Returns the call with these leaves in it; objects take them over and stay the caller's own."""

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """Returns the results that the flat program must give; some others are just their inputs, unchanged."""

    def structure(self, kept: Sequence[int]) -> Structure:
        """Returns the structure of this call for a flat program that gives the `kept` results."""


def path_text(keys: Sequence[Any]) -> str:
    """Joins the keys of a path, as in `layers/3/w`."""
    return "/".join([key_text(key) for key in keys])


def key_text(key: Any) -> str:
    """Returns one key of a path without brackets and quotes."""
    inner = _INNER.get(type(key))
    return str(inner(key) if inner else key)


_INNER: dict[type, Callable[[Any], Any]] = {
    DictKey: attrgetter("key"),
    FlattenedIndexKey: attrgetter("key"),
    SequenceKey: attrgetter("idx"),
    GetAttrKey: attrgetter("name"),
}


def argument_of(keys: Keys) -> int | str:
    """Returns the dynamic argument to which a leaf belongs: its index, or its keyword."""
    return keys[1].idx if isinstance(keys[1], SequenceKey) else str(keys[1].key)

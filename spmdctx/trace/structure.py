"""Arguments to flat leaves, and flat results back to what the function returns; `objects` does the same for nnx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from spmdctx.ir import Role
from spmdctx.trace.arguments import Call
from spmdctx.trace.partitioning import PartitionNames, boxed_names

Keys = tuple[Any, ...]


class Leaf(NamedTuple):
    """One flat leaf as capture sees it.

    `keys` is its path inside the dynamic call: (0, position, ...) or (1, keyword, ...). `role` and `names` are set where
    Flax says them. `owned` marks a leaf of an nnx object, which the step mutates in place.
    """

    keys: Keys
    value: Any
    role: Role | None = None
    names: PartitionNames | None = None
    owned: bool = False


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
    """How the arguments of one kind of call flatten, and how its results are rebuilt."""

    def read(self, call: Call) -> Read | None:
        """The leaves of a call; None where it has another structure."""

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Keeps moved leaves in the objects they came from, so that the next call need not move them again."""

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """What the user's function returns, from flat results; nnx objects are mutated on the way."""

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """The dynamic call with `leaves` in it: (args, kwargs), objects as states."""

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """The result tree with `leaves` in it, objects as states."""


class Flattening(Protocol):
    """One call that is flattened for its trace.

    After `run`, the first `num_state` results belong to objects, and the others have the structure `result_tree`.
    """

    leaves: list[Leaf]
    num_state: int
    result_tree: Any

    def argument(self, argument: int | str) -> Any:
        """The plain leaves of one dynamic argument as a tree."""

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Calls `fn` on the call with traced leaves in it."""

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """Which results the flat program must give, where some are their inputs, unchanged."""

    def structure(self, kept: Sequence[int]) -> Structure:
        """The structure of this call, for a flat program that gives the `kept` results."""


def shape_of(aval: Any) -> Any:
    """An abstract value as an argument: shape, dtype and weak type, no sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)  # type: ignore[no-untyped-call]


def path_text(keys: Sequence[Any]) -> str:
    """`layers/3/w`: the keys of a path, joined."""
    return "/".join([key_text(key) for key in keys])


def key_text(key: Any) -> str:
    """One key of a path, without brackets and quotes."""
    match key:
        case DictKey(key=inner) | FlattenedIndexKey(key=inner):
            return str(inner)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return str(name)
    return str(key)


def argument_of(keys: Keys) -> int | str:
    """The dynamic argument that a leaf belongs to: its index, or its keyword."""
    return keys[1].idx if isinstance(keys[1], SequenceKey) else str(keys[1].key)


@dataclass(frozen=True)
class PureStructure:
    """Arguments and results are pytrees."""

    in_tree: Any
    out_tree: Any

    def read(self, call: Call) -> Read | None:
        """The leaves of a call; None where it has another structure."""
        leaves, tree = jax.tree.flatten(call)
        return Read(leaves, None) if tree == self.in_tree else None

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Nothing: a pytree is the caller's, and stays as it is."""

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """What the user's function returns."""
        return self.out_tree.unflatten(outputs)

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """The dynamic call with `leaves` in it."""
        return self.in_tree.unflatten(leaves)

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """The result tree with `leaves` in it."""
        return self.out_tree.unflatten(leaves)


class NotPure(Exception):
    """A function of pytrees gives back an nnx object."""


class PureFlattening:
    """Flattens one call of a pure function, and remembers the structure of its results when it is traced."""

    def __init__(self, call: Call, holds_objects: Callable[[Any], bool]) -> None:
        self._holds_objects = holds_objects
        self._in_tree: Any
        entries, self._in_tree = jax.tree_util.tree_flatten_with_path(call)
        names = boxed_names(call)
        self.leaves = [Leaf(keys, value, names=names.get(index)) for index, (keys, value) in enumerate(entries)]
        self._call = call
        self.num_state = 0
        self.result_tree: Any = None

    def argument(self, argument: int | str) -> Any:
        """One dynamic argument."""
        return self._call[1][argument] if isinstance(argument, str) else self._call[0][argument]

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Calls `fn` on the call with traced leaves in it.

        Raises:
            NotPure: it gives back an nnx object.
        """
        result = fn(self._in_tree.unflatten(leaves))
        if self._holds_objects(result):
            raise NotPure
        entries, self.result_tree = jax.tree_util.tree_flatten_with_path(result)
        return [Result(keys, value) for keys, value in entries]

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """All: the caller gets every result."""
        return list(range(len(unchanged)))

    def structure(self, kept: Sequence[int]) -> PureStructure:
        """The structure of this call."""
        return PureStructure(self._in_tree, self.result_tree)

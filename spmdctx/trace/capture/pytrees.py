"""Pytrees as arguments, flattened by JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdctx.trace.capture.arguments import Call
from spmdctx.trace.capture.objects import has_objects
from spmdctx.trace.capture.partitioning import boxed_names
from spmdctx.trace.capture.structure import Leaf, Read, Result


@dataclass(frozen=True)
class PureStructure:
    """Arguments and results are pytrees."""

    in_tree: Any
    out_tree: Any

    def read(self, call: Call) -> Read | None:
        """Returns the leaves of a call, or None if it has another structure."""
        leaves, tree = jax.tree.flatten(call)
        return Read(leaves, None) if tree == self.in_tree else None

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Does nothing: a pytree belongs to the caller and stays unchanged."""

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """Builds the result of the user's function."""
        return self.out_tree.unflatten(outputs)

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the dynamic call with `leaves` in it."""
        return self.in_tree.unflatten(leaves)

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the result tree with `leaves` in it."""
        return self.out_tree.unflatten(leaves)


class NotPure(Exception):
    """A function of pytrees gives back an nnx object."""


class PureFlattening:
    """Flattens one call of a pure function, and remembers the structure of its results when it is traced."""

    def __init__(self, call: Call) -> None:
        self._in_tree: Any
        entries, self._in_tree = jax.tree_util.tree_flatten_with_path(call)
        names = boxed_names(call)
        self.leaves = [Leaf(keys, value, names=names.get(index)) for index, (keys, value) in enumerate(entries)]
        self._call = call
        self.num_state = 0
        self.result_tree: Any = None

    def argument(self, argument: int | str) -> Any:
        """Returns one dynamic argument."""
        return self._call[1][argument] if isinstance(argument, str) else self._call[0][argument]

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Calls `fn` on the call with traced leaves in it.

        Raises:
            NotPure: it gives back an nnx object.
        """
        result = fn(self._in_tree.unflatten(leaves))
        if has_objects(result):
            raise NotPure
        entries, self.result_tree = jax.tree_util.tree_flatten_with_path(result)
        return [Result(keys, value) for keys, value in entries]

    def filled(self, leaves: Sequence[Any]) -> Call:
        """Returns the call with these leaves in it."""
        call: Call = self._in_tree.unflatten(leaves)
        return call

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """Returns all results, since the caller gets every one."""
        return list(range(len(unchanged)))

    def structure(self, kept: Sequence[int]) -> PureStructure:
        """Returns the structure of this call."""
        return PureStructure(self._in_tree, self.result_tree)

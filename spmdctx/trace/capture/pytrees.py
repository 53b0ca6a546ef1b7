"""Pytrees as arguments, flattened by JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from spmdctx.trace.capture.arguments import Call
from spmdctx.trace.capture.objects import has_objects
from spmdctx.trace.capture.partitioning import boxed_names
from spmdctx.trace.capture.structure import Keys, Leaf, Read, Result


class TreeForm(NamedTuple):
    """The structure of a tree, and the functions in it, by their place among all leaves.

    Modules such as those of Equinox hold their activations as leaves, which are no arrays.
    """

    tree: Any
    functions: tuple[tuple[int, Any], ...]

    def read(self, other: Any) -> list[Any] | None:
        """Returns the arrays of a tree of the same structure with the same functions, else None."""
        leaves, tree = jax.tree.flatten(other)
        if tree != self.tree or any(leaves[place] is not own and leaves[place] != own for place, own in self.functions):
            return None
        for place, _ in reversed(self.functions):
            del leaves[place]
        return leaves

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with `arrays` in it."""
        leaves = list(arrays)
        for place, own in self.functions:
            leaves.insert(place, own)
        return self.tree.unflatten(leaves)

    @property
    def of_arrays(self) -> Any:
        """The structure with None in place of each function."""
        places = {place for place, _ in self.functions}
        if not places:
            return self.tree
        return jax.tree.structure(self.tree.unflatten([None if place in places else 0 for place in range(self.tree.num_leaves)]))


def _take_apart(tree: Any, depth: int) -> tuple[TreeForm, list[tuple[Keys, Any]]]:
    """Splits a tree into its form and its arrays; functions at less than `depth` keys count as arrays, and so are refused."""
    entries, structure = jax.tree_util.tree_flatten_with_path(tree)
    functions = {place: leaf for place, (keys, leaf) in enumerate(entries) if len(keys) >= depth and callable(leaf)}
    arrays = [entry for place, entry in enumerate(entries) if place not in functions]
    return TreeForm(structure, tuple(functions.items())), arrays


_IN_AN_ARGUMENT = 3
"""The keys of a leaf inside of an argument: positional or by keyword, which argument, and where in it."""


@dataclass(frozen=True)
class PureStructure:
    """Arguments and results are pytrees."""

    in_form: TreeForm
    out_form: TreeForm

    @property
    def has_functions(self) -> bool:
        """True if arguments or results hold functions, which jax.jit refuses."""
        return bool(self.in_form.functions or self.out_form.functions)

    def read(self, call: Call) -> Read | None:
        """Returns the leaves of a call, or None if it has another structure."""
        leaves = self.in_form.read(call)
        return None if leaves is None else Read(leaves, None)

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Does nothing: a pytree belongs to the caller and stays unchanged."""

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """Builds the result of the user's function."""
        return self.out_form.unflatten(outputs)

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the dynamic call with `leaves` in it."""
        return self.in_form.unflatten(leaves)

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the result tree with `leaves` in it."""
        return self.out_form.unflatten(leaves)


class NotPure(Exception):
    """A function of pytrees gives back an nnx object."""


class PureFlattening:
    """Flattens one call of a pure function, and remembers the structure of its results when it is traced."""

    def __init__(self, call: Call) -> None:
        self._in_form, entries = _take_apart(call, _IN_AN_ARGUMENT)
        names = boxed_names(call)
        self.leaves = [Leaf(keys, value, names=names.get(index)) for index, (keys, value) in enumerate(entries)]
        self._call = self._in_form.of_arrays.unflatten([value for _, value in entries]) if self._in_form.functions else call
        self.num_state = 0
        self._out_form = TreeForm(None, ())
        self.result_tree: Any = None

    def argument(self, argument: int | str) -> Any:
        """Returns one dynamic argument."""
        return self._call[1][argument] if isinstance(argument, str) else self._call[0][argument]

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Calls `fn` on the call with traced leaves in it.

        Raises:
            NotPure: it gives back an nnx object.
        """
        result = fn(self._in_form.unflatten(leaves))
        if has_objects(result):
            raise NotPure
        self._out_form, entries = _take_apart(result, 0)
        self.result_tree = self._out_form.of_arrays
        return [Result(keys, value) for keys, value in entries]

    def filled(self, leaves: Sequence[Any]) -> Call:
        """Returns the call with these leaves in it."""
        call: Call = self._in_form.unflatten(leaves)
        return call

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """Returns all results, since the caller gets every one."""
        return list(range(len(unchanged)))

    def structure(self, kept: Sequence[int]) -> PureStructure:
        """Returns the structure of this call."""
        return PureStructure(self._in_form, self._out_form)

"""nnx modules, optimizers and other objects as arguments: split into leaves, merged while tracing, and mutated in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.trace.capture.arguments import Call
from spmdctx.trace.capture.partitioning import variable_names
from spmdctx.trace.capture.structure import SERVED, Keys, Leaf, Read, Result
from spmdctx.trace.flax_modules import flax_is_used, nnx


def is_object(x: Any) -> bool:
    """Returns whether `x` is an nnx object with an identity: a Module, an Optimizer, Rngs, a standalone Variable."""
    return flax_is_used() and (isinstance(x, nnx.Variable) or bool(nnx.graph.is_graph_node(x)))


def _stops(x: Any) -> bool:
    # A State is a plain tree to JAX (functional nnx), though variables lie in it.
    return flax_is_used() and (isinstance(x, nnx.State) or is_object(x))


def has_objects(tree: Any) -> bool:
    """Returns whether `tree` contains nnx objects."""
    return flax_is_used() and any(is_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=_stops))


def model_name(tree: Any) -> str:
    """Returns the class of the first model in `tree`: an nnx Module, or the linen module of a TrainState; empty if there is none."""

    def holds(x: Any) -> bool:
        return is_object(x) or callable(getattr(x, "apply_fn", None))

    for leaf in jax.tree.leaves(tree, is_leaf=holds):
        if flax_is_used() and isinstance(leaf, nnx.Module) and not isinstance(leaf, nnx.Optimizer):
            return type(leaf).__name__
        owner = getattr(getattr(leaf, "apply_fn", None), "__self__", None)
        if owner is not None:
            return type(owner).__name__
    return ""


class _Form(NamedTuple):
    """The form of a tree with objects: its outer structure, the positions of the objects, and the structure of the rest."""

    outer: Any
    places: tuple[bool, ...]
    rest: Any

    def build(self, objects: Sequence[Any], rest: Sequence[Any]) -> Any:
        own, others = iter(objects), iter(self.rest.unflatten(rest))
        return self.outer.unflatten([next(own) if place else next(others) for place in self.places])


def _take_apart(tree: Any) -> tuple[_Form, tuple[Any, ...], list[Any]]:
    """Splits a tree into its form, its objects, and all other leaves."""
    nodes, outer = jax.tree.flatten(tree, is_leaf=_stops)
    places = tuple([is_object(node) for node in nodes])
    rest, rest_tree = jax.tree.flatten([node for node, place in zip(nodes, places, strict=True) if not place])
    return _Form(outer, places, rest_tree), tuple([node for node, place in zip(nodes, places, strict=True) if place]), rest


class _Update(NamedTuple):
    """A variable that the step changes: its number in the graph, and where its next value lies among the flat results.

    `tree` is the structure of the value, None for an array.
    """

    number: int
    start: int
    stop: int
    tree: Any


@dataclass(frozen=True)
class _Regrown:
    """Objects after a step that changed their structure, or returned some: rebuilt around the caller's own."""

    graphdef: Any
    values: Any

    def build(self, outputs: Sequence[Any], numbers: Any = None) -> tuple[Any, ...]:
        """Builds the returned objects; the caller's own, which `numbers` gives, are mutated to their state after the step."""
        known = None if numbers is None else nnx.graph.IndexMap.from_refmap(numbers)
        values = self.values.unflatten(outputs[: self.values.num_leaves])
        _, returned = nnx.graph.unflatten(self.graphdef, values, outer_index_outer_ref=known)
        return tuple(returned)


@dataclass(frozen=True)
class ObjectStructure:
    """Arguments hold nnx objects; results may.

    The flat inputs are the values of the objects' variables (structure `values`), then all other leaves. The flat results
    are the values that change, then the leaves that the user's function returns.
    """

    form: _Form
    graphdef: Any
    values: Any
    result: _Form
    updates: tuple[_Update, ...]
    regrown: _Regrown | None
    num_state: int

    def read(self, call: Call) -> Read | None:
        """Returns the leaves of a call, or None if it has another structure."""
        form, objects, rest = _take_apart(call)
        if form != self.form:
            return None
        numbers = nnx.graph.RefMap()
        graphdef, values = nnx.graph.flatten((objects, ()), with_paths=False, ref_index=numbers, graph=True)
        if graphdef != self.graphdef:
            return None
        leaves, tree = jax.tree.flatten(values)
        return Read(leaves + rest, (objects, numbers)) if tree == self.values else None

    def place(self, handle: Any, leaves: Sequence[Any]) -> None:
        """Puts moved values back into the variables they came from."""
        objects, _ = handle
        values = self.values.unflatten(leaves[: self.values.num_leaves])
        _, state = nnx.graph.flatten((objects, ()), with_paths=True, graph=True)
        for variable, value in zip(state.leaves, values, strict=True):
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(value)

    def finish(self, handle: Any, outputs: Sequence[Any]) -> Any:
        """Builds the result of the user's function, and mutates the objects of the call."""
        _, numbers = handle
        returned: tuple[Any, ...] = ()
        if self.regrown is not None:
            returned = self.regrown.build(outputs, numbers)
        elif self.updates:
            objects = nnx.graph.IndexMap.from_refmap(numbers)
            for number, start, stop, tree in self.updates:
                objects[number].set_raw_value(outputs[start] if tree is None else tree.unflatten(outputs[start:stop]))
        return self.result.build(returned, outputs[self.num_state :])

    def inputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the dynamic call with `leaves` in it and a state in place of each object."""
        values = self.values.unflatten(leaves[: self.values.num_leaves])
        objects, _ = nnx.graph.unflatten(self.graphdef, values)
        return self.form.build([_state(item) for item in objects], leaves[self.values.num_leaves :])

    def outputs(self, leaves: Sequence[Any]) -> Any:
        """Returns the result tree with `leaves` in it and a state in place of each returned object."""
        returned = () if self.regrown is None else self.regrown.build(leaves)
        return self.result.build([_state(item) for item in returned], leaves[self.num_state :])


def _state(item: Any) -> Any:
    return item if isinstance(item, nnx.Variable) else nnx.state(item, graph=True)


class _Held(NamedTuple):
    """A value that an object holds: where, its variable's number (None for a bare array), and its place among the leaves."""

    number: int | None
    start: int
    stop: int
    tree: Any


class ObjectFlattening:
    """Flattens one call with nnx objects, and remembers what the traced step did to them."""

    def __init__(self, call: Call) -> None:
        self._form, self._objects, rest = _take_apart(call)
        numbers = nnx.graph.RefMap()
        self._graphdef, state = nnx.graph.flatten((self._objects, ()), with_paths=True, ref_index=numbers, graph=True)
        object_keys, rest_keys = _places(call)
        owned: list[Leaf] = []
        self._held: list[_Held] = []
        for path, item in zip(state.paths, state.leaves, strict=True):
            position: Any = path[1]
            start = len(owned)
            owned.extend(_leaves_of(item, (*object_keys[position], *path[2:])))
            self._held.append(_Held(numbers.get(item) if isinstance(item, nnx.Variable) else None, start, len(owned), _tree_of(item)))
        self._values: Any = jax.tree.structure([_value_of(item) for item in state.leaves])
        self.leaves = owned + [Leaf(keys, value) for keys, value in zip(rest_keys, rest, strict=True)]
        self._num_owned = len(owned)
        self._call = call
        self.num_state = 0
        self.result_tree: Any = None

    def argument(self, argument: int | str) -> Any:
        """Returns the plain leaves of one dynamic argument."""
        value = self._call[1][argument] if isinstance(argument, str) else self._call[0][argument]
        form, _, rest = _take_apart(value)
        return value if not any(form.places) else rest

    def run(self, fn: Callable[[Call], Any], leaves: Sequence[Any]) -> list[Result]:
        """Merges the objects from traced leaves, calls `fn`, and splits them again."""
        inner = nnx.graph.IndexMap()
        objects, _ = nnx.graph.unflatten(self._graphdef, self._values.unflatten(leaves[: self._num_owned]), index_ref=inner)
        result = fn(self._form.build(objects, leaves[self._num_owned :]))
        self._result, returned, rest = _take_apart(result)
        self.result_tree = self._result.rest
        known = nnx.graph.RefMap.from_indexmap(inner)
        self._graphdef_after, values = nnx.graph.flatten((objects, returned), with_paths=False, ref_outer_index=known, graph=True)
        leaves_after, self._values_after = jax.tree.flatten(values)
        self.num_state = len(leaves_after)
        self._is_same = not returned and self._values_after == self._values and self._graphdef_after.with_no_outer_index() == self._graphdef
        if self._is_same:
            state = [Result(self.leaves[index].keys, value, index) for index, value in enumerate(leaves_after)]
        else:
            state = [Result(("state", str(index)), value) for index, value in enumerate(leaves_after)]
        return state + [Result(keys, value) for keys, value in zip(_places(result)[1], rest, strict=True)]

    def filled(self, leaves: Sequence[Any]) -> Call:
        """Returns the call with these leaves in it; its objects are the caller's own, which take the values over.

        Raises:
            UnsupportedError: an object holds an array in an attribute that is not a variable, and so cannot take another value.
        """
        values = self._values.unflatten(leaves[: self._num_owned])
        _, state = nnx.graph.flatten((self._objects, ()), with_paths=True, graph=True)
        for path, variable, value in zip(state.paths, state.leaves, values, strict=True):
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(value)
            elif variable is not value:
                raise UnsupportedError(
                    "An object holds an array that is no nnx.Variable, and cannot take another value.",
                    got="/".join(map(str, path[2:])),
                    fix="wrap the array in an nnx.Variable",
                )
        call: Call = self._form.build(self._objects, leaves[self._num_owned :])
        return call

    def kept(self, unchanged: Sequence[bool]) -> list[int]:
        """Returns all results except the variables that the step leaves unchanged."""
        everything = list(range(len(unchanged)))
        if not self._is_same:
            return everything
        dropped = {index for held in self._held for index in range(held.start, held.stop) if all(unchanged[held.start : held.stop])}
        if any(held.number is None and not dropped.issuperset(range(held.start, held.stop)) for held in self._held):
            # An array that is an attribute of its own changes: only rebuilding the object can set it.
            self._is_same = False
            return everything
        return [index for index in everything if index not in dropped]

    def structure(self, kept: Sequence[int]) -> ObjectStructure:
        """Returns the structure of this call for a flat program that gives the `kept` results."""
        position = {index: place for place, index in enumerate(kept)}
        updates: tuple[_Update, ...] = ()
        regrown: _Regrown | None = None
        if self._is_same:
            updates = tuple(
                _Update(held.number, position[held.start], position[held.start] + held.stop - held.start, held.tree)
                for held in self._held
                if held.number is not None and held.start in position
            )
        else:
            regrown = _Regrown(self._graphdef_after, self._values_after)
        num_state = sum(index < self.num_state for index in kept)
        return ObjectStructure(self._form, self._graphdef, self._values, self._result, updates, regrown, num_state)


def _places(tree: Any) -> tuple[list[Keys], list[Keys]]:
    """Returns the paths of the objects of a tree, and of all its other leaves."""
    objects: list[Keys] = []
    rest: list[Keys] = []
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_stops)[0]:
        if is_object(node):
            objects.append(keys)
        else:
            rest.extend((*keys, *inner) for inner, _ in jax.tree_util.tree_flatten_with_path(node)[0])
    return objects, rest


def _value_of(item: Any) -> Any:
    return item.get_raw_value() if isinstance(item, nnx.Variable) else item


def _tree_of(item: Any) -> Any:
    tree = jax.tree.structure(_value_of(item))
    return None if jax.tree_util.treedef_is_leaf(tree) else tree


def _leaves_of(item: Any, keys: Keys) -> list[Leaf]:
    role = _role_of(item)
    names = variable_names(item) if isinstance(item, nnx.Variable) else None
    entries, _ = jax.tree_util.tree_flatten_with_path(_value_of(item))
    layerwise = isinstance(item, nnx.Variable) and item.get_metadata().get("layerwise_parallel", False) is True
    statistic = isinstance(item, nnx.BatchStat)
    served = isinstance(item, nnx.Variable) and SERVED in item.get_metadata()
    return [Leaf((*keys, *inner), value, role, names, True, statistic, layerwise, served) for inner, value in entries]


def _role_of(item: Any) -> Role:
    if isinstance(item, nnx.Param):
        return Role.PARAMETER
    if isinstance(item, nnx.RngState):
        return Role.KEY
    return Role.OPTIMIZER if isinstance(item, nnx.OptState) else Role.STATE

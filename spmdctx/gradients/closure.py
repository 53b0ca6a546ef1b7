"""Closures: finds the traced arrays that a function closes over, and rebinds the function to others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import jax

from spmdctx._compat import is_jitted
from spmdctx.trace.capture.objects import is_object
from spmdctx.trace.capture.structure import path_text


class Closure:
    """A function with the traced arrays that it reaches: through cells, default arguments, partials, methods, and pytrees in those.

    `values` are the arrays, `paths` what messages call them. nnx objects are left as they are: their arrays are whole on every device.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._holds: dict[int, bool] = {}
        self._known: dict[int, int] = {}
        self.values: list[Any] = []
        self.paths: list[str] = []
        self._find(fn, "")

    def rebind(self, values: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function with `values` in place of its own."""
        copied: Callable[..., Any] = _Copier(self._holds, self._known, values).copy(self._fn)
        return copied

    def _find(self, item: Any, path: str) -> bool:
        """Collects the traced arrays in `item` and returns whether there are any; a function that reaches itself counts once."""
        if isinstance(item, jax.core.Tracer):
            if id(item) not in self._known:
                self._known[id(item)] = len(self.values)
                self.values.append(item)
                self.paths.append(path)
            return True
        known = self._holds.get(id(item))
        if known is None:
            self._holds[id(item)] = False
            found = [self._find(part, f"{path}/{name}" if path and name else path or name) for name, part in _parts(item)]
            known = self._holds[id(item)] = any(found)
        return known


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the contents of an item with names; nothing if the item cannot be inspected."""
    if is_object(item):
        return
    if isinstance(item, FunctionType):
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield name, cell.cell_contents
        yield from (("default", value) for value in item.__defaults__ or ())
        yield from (item.__kwdefaults__ or {}).items()
    elif isinstance(item, MethodType):
        yield "self", item.__self__
        yield "", item.__func__
    elif isinstance(item, functools.partial):
        yield "", item.func
        yield from ((str(index), value) for index, value in enumerate(item.args))
        yield from item.keywords.items()
    elif is_jitted(item):
        yield "", inspect.unwrap(item)
    elif not jax.tree_util.all_leaves([item], is_leaf=is_object):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(item, is_leaf=is_object)[0]:
            yield path_text(keys), leaf


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  an empty cell raises
    except ValueError:
        return False
    return True


class _Copier:
    """Copies what holds traced arrays, and nothing else."""

    def __init__(self, holds: dict[int, bool], known: dict[int, int], values: Sequence[Any]) -> None:
        self._holds, self._known, self._values = holds, known, values
        self._made: dict[int, Any] = {}

    def copy(self, item: Any) -> Any:
        if isinstance(item, jax.core.Tracer):
            return self._values[self._known[id(item)]]
        if not self._holds.get(id(item), False):
            return item
        if id(item) in self._made:
            return self._made[id(item)]
        if isinstance(item, FunctionType):
            return self._function(item)
        if isinstance(item, MethodType):
            return MethodType(self.copy(item.__func__), self.copy(item.__self__))
        if isinstance(item, functools.partial):
            words = {name: self.copy(value) for name, value in item.keywords.items()}
            return functools.partial(self.copy(item.func), *map(self.copy, item.args), **words)
        if is_jitted(item):
            # Arrays of another trace would become constants of the cached trace; its own trace takes them as they are.
            return self.copy(inspect.unwrap(item))
        tree: Any
        leaves, tree = jax.tree.flatten(item, is_leaf=is_object)
        return tree.unflatten([self.copy(leaf) for leaf in leaves])

    def _function(self, fn: FunctionType) -> FunctionType:
        cells = tuple(CellType() if _is_filled(cell) else cell for cell in fn.__closure__ or ())
        made = self._made[id(fn)] = FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
        for new, old in zip(cells, fn.__closure__ or (), strict=True):
            if new is not old:
                new.cell_contents = self.copy(old.cell_contents)
        made.__defaults__ = None if fn.__defaults__ is None else tuple(map(self.copy, fn.__defaults__))
        made.__kwdefaults__ = None if fn.__kwdefaults__ is None else {name: self.copy(value) for name, value in fn.__kwdefaults__.items()}
        functools.update_wrapper(made, fn, updated=("__dict__",))
        return made

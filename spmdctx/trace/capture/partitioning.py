"""Flax's partitioning metadata as names for each dimension: linen's boxes and the metadata of nnx variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.core import meta

from spmdctx.errors import StrategyError

PartitionNames = tuple[str | tuple[str, ...] | None, ...]
"""Axis names for each dimension, as Flax metadata gives them; None for a whole dimension."""


AxisRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]
"""Logical axis rules in order: a logical name, and the mesh axes over which dimensions of this name are split; None for none."""


@dataclass
class RulesRead:
    """The rules of a step, and what its arguments' metadata read of them."""

    rules: AxisRules
    axes: frozenset[str] = frozenset()
    read: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    @property
    def all_axes(self) -> frozenset[str]:
        """The axes of the mesh and of the rules."""
        return self.axes.union(*[(axes,) if isinstance(axes, str) else axes or () for _, axes in self.rules])

    def note(self, names: Any, found: Any) -> None:
        """Notes down which rules the names of a tensor have read, and what they gave."""
        known = {name for name, _ in self.rules}
        for name, axes in zip(names, found, strict=False):
            if not isinstance(name, str):
                continue
            if name in known:
                self.read.add(name)
                if axes is None and all(own is not None for other, own in self.rules if other == name):
                    self.taken.setdefault(name, ", ".join(str(one) for one in names))
            elif axes is None and name not in self.axes:
                self.missing.setdefault(name, ", ".join(str(one) for one in names))

    def notes(self) -> tuple[str, ...]:
        """Returns what a user would want to know of the rules."""
        unread = sorted({name for name, axes in self.rules if axes is not None} - self.read)
        return (
            *(
                f"rules: no argument's metadata has the name '{name}'; its rule acts on constraints inside of the step only."
                for name in unread
            ),
            *(
                f"rules: there is none for the name '{name}' of a tensor ({names}): that dimension is whole."
                for name, names in self.missing.items()
            ),
            *(
                f"rules: the axes of '{name}' split another dimension of the same tensor ({names}) already: that of '{name}' is whole."
                for name, names in self.taken.items()
            ),
        )


_rules: ContextVar[RulesRead | None] = ContextVar("spmdctx_rules", default=None)


@contextmanager
def reading_rules(rules: AxisRules, axes: Iterable[str]) -> Iterator[None]:
    """Resolves logical names by these rules where a step is captured inside; without rules, Flax's own context counts.

    `axes` are those of the mesh, which metadata may name too.
    """
    token = _rules.set(RulesRead(rules, frozenset(axes)) if rules else None)
    try:
        with linen.logical_axis_rules(rules) if rules else nullcontext():
            yield
    finally:
        _rules.reset(token)


def notes_on_rules() -> tuple[str, ...]:
    """Returns the notes on the rules by which the names so far were resolved."""
    reader = _rules.get()
    return reader.notes() if reader is not None else ()


def spec_names(spec: Any, rank: int) -> PartitionNames | None:
    """Returns the names of each dimension in a PartitionSpec, or None if it is empty or does not fit a tensor of `rank`."""
    entries = tuple(spec) if spec is not None else ()
    if not entries or len(entries) > rank:
        return None
    if any(not (entry is None or isinstance(entry, str | tuple)) for entry in entries):
        return None
    return entries + (None,) * (rank - len(entries))


def boxed_names(tree: Any) -> dict[int, PartitionNames]:
    """Maps the flat index of each leaf in a linen metadata box to its names."""
    found: dict[int, PartitionNames] = {}
    index = 0
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)):
        if not isinstance(node, meta.AxisMetadata):
            index += 1
            continue
        for leaf in jax.tree.leaves(node):
            names = spec_names(_box_spec(node), np.ndim(leaf))
            if names is not None:
                found[index] = names
            index += 1
    return found


def _box_spec(box: Any) -> Any:
    get_spec = getattr(box, "get_partition_spec", None)
    if get_spec is None:
        return None
    if isinstance(box, linen.LogicallyPartitioned):
        rules = box.rules or linen.get_logical_axis_rules()
        if rules:
            found = linen.spmd.logical_to_mesh_axes(box.names, rules)
            _note(box.names, found)
            return found
    return get_spec()


def variable_names(variable: Any) -> PartitionNames | None:
    """Returns the names of each dimension in an nnx variable's metadata, or None if it has none.

    Raises:
        StrategyError: rules that give two dimensions one mesh axis.
    """
    shape = getattr(variable.get_raw_value(), "shape", None)
    if shape is None:
        return None
    names = spec_names(nnx.get_partition_spec(variable).get_raw_value(), len(shape))
    given, reader = variable.get_metadata().get("out_sharding"), _rules.get()
    if reader is not None and names is not None:
        # By rules, a name that is neither of a rule nor of an axis splits nothing; without rules, a note says that it is no axis.
        names = tuple(None if isinstance(name, str) and name not in reader.all_axes else name for name in names)
    if isinstance(given, tuple | list):
        _note(given, names or ())
    axes = [axis for dim in names or () if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)]
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    if twice and reader is not None:
        raise StrategyError(
            "By the rules, two dimensions of a variable are split over one mesh axis.",
            got=f"{tuple(given or names or ())} of shape {tuple(shape)}: {', '.join(twice)} twice",
            fix="give one of the names another axis, or None, in rules=",
        )
    return names


def _note(names: Any, found: Any) -> None:
    reader = _rules.get()
    if reader is not None:
        reader.note(names, found)

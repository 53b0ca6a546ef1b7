"""Flax's partitioning metadata as names for each dimension: linen's boxes and the metadata of nnx variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from spmdctx.errors import StrategyError
from spmdctx.trace.flax_modules import flax_is_used, linen, meta, nnx

PartitionNames = tuple[str | tuple[str, ...] | None, ...]
"""Axis names for each dimension, as Flax metadata gives them; None for a whole dimension."""


AxisRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]
"""Logical axis rules in order: a logical name, and the mesh axes over which dimensions of this name are split; None for none."""

# The source line of a constraint is the user's, not that of what stands between the user's call and Flax.
source_info_util.register_exclusion(__file__)


@dataclass
class RulesRead:
    """The rules of a step, and what its arguments' metadata read of them.

    `rules` are those that act: an axis that the mesh does not have is taken out of them, as if its size were 1. `absent` are the rules
    that name such axes. `axes` are the sizes of the mesh's axes, none where the mesh is found later.
    """

    rules: AxisRules
    axes: Mapping[str, int] = field(default_factory=dict)
    absent: AxisRules = ()
    read: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rules: AxisRules, axes: Mapping[str, int]) -> RulesRead:
        """Reads rules for a mesh with these axes."""
        absent = tuple(rule for rule in rules if axes and not set(axes_of_rule(rule)) <= axes.keys())
        return cls(tuple(_without_absent(rule, axes) for rule in rules) if absent else rules, axes, absent)

    @property
    def all_axes(self) -> frozenset[str]:
        """The axes of the mesh and of the rules."""
        return frozenset(self.axes).union(*map(axes_of_rule, self.rules))

    @property
    def batch_axes(self) -> tuple[str, ...] | None:
        """The axes of the first rule of the batch, None where no rule speaks of it."""
        return next((axes_of_rule(rule) for name in BATCH_NAMES for rule in self.rules if rule[0] == name), None)

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
        """Returns what a user would want to know of the rules, one note for each kind."""
        unread = sorted({name for name, axes in self.rules if axes is not None} - self.read.union(BATCH_NAMES))
        notes = [absent_note(self.absent, self.axes)] if self.absent else []
        if unread:
            notes.append(f"rules: no argument's metadata has {_names(unread)}: such rules act on constraints inside of the step only.")
        if self.missing:
            tensors = _listed([f"({names})" for names in dict.fromkeys(self.missing.values())])
            notes.append(f"rules: there is none for {_names(self.missing)} of tensors named {tensors}: those dimensions are whole.")
        for name, names in self.taken.items():
            taken = f"split another dimension of the same tensor ({names}) already"
            notes.append(f"rules: the axes of '{name}' {taken}: that of '{name}' is whole.")
        return tuple(notes)


BATCH_NAMES = ("batch", "activation_batch")
"""Logical names of the batch, by which Flax's examples and MaxText split it."""


def axes_of_rule(rule: tuple[str, str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """Returns the mesh axes that a rule names."""
    axes = rule[1]
    return (axes,) if isinstance(axes, str) else axes or ()


def _without_absent(rule: tuple[str, str | tuple[str, ...] | None], axes: Mapping[str, int]) -> tuple[str, str | tuple[str, ...] | None]:
    kept = tuple(axis for axis in axes_of_rule(rule) if axis in axes)
    return rule[0], (kept[0] if len(kept) == 1 else kept or None)


def absent_note(absent: AxisRules, axes: Mapping[str, int]) -> str:
    """Names rules whose axes the mesh does not have, those axes and the mesh."""
    lacking = dict.fromkeys(axis for rule in absent for axis in axes_of_rule(rule) if axis not in axes)
    mesh = ", ".join(f"{name} {size}" for name, size in axes.items())
    shown = [f"'{name}': {given!r}" for name, given in absent]
    return (
        f"rules: the mesh ({mesh}) has no {'axis' if len(lacking) == 1 else 'axes'} {', '.join(lacking)}, which therefore "
        f"{'splits' if len(lacking) == 1 else 'split'} nothing. Named by {_listed(shown)}."
    )


def _names(names: Iterable[str]) -> str:
    own = [f"'{name}'" for name in names]
    return f"the name{'s' if len(own) > 1 else ''} {_listed(own)}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:_MOST_NAMED])}{f' and {len(words) - _MOST_NAMED} more' if len(words) > _MOST_NAMED else ''}"


_MOST_NAMED = 8


_rules: ContextVar[RulesRead | None] = ContextVar("spmdctx_rules", default=None)


@contextmanager
def reading_rules(rules: AxisRules, axes: Mapping[str, int]) -> Iterator[None]:
    """Resolves logical names by these rules where a step is captured inside; without rules, by those of Flax's own context.

    `axes` are the sizes of the mesh's axes, which metadata may name too.
    """
    reader = RulesRead.of(rules or _rules_of_flax(), axes)
    token = _rules.set(reader if reader.rules else None)
    try:
        with linen.logical_axis_rules(reader.rules) if reader.rules else nullcontext():
            yield
    finally:
        _rules.reset(token)


def _rules_of_flax() -> AxisRules:
    """Returns the rules of `logical_axis_rules` around the call."""
    if not flax_is_used():
        return ()
    return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in linen.get_logical_axis_rules())


def batch_axes() -> tuple[str, ...] | None:
    """Returns the mesh axes by which the rules split the batch, None where they do not speak of it."""
    reader = _rules.get()
    return reader.batch_axes if reader is not None else None


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
    if not flax_is_used():
        return found
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

"""Where the layers of stacked arrays are kept between steps, and which of them go to another stage to be used.

All stages keep equal shares, one after the other, if the layers divide; else all layers lie on the stage of the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spmdctx.ir.mesh import LogicalMesh


class Layers(NamedTuple):
    """Layers `first` to `last` - 1 of a stacked array as a variable of their own; `leaf` is their number among those of the loss."""

    var: Any
    leaf: int
    first: int
    last: int


class Stack(NamedTuple):
    """A parameter, or a gradient, that stacks layers of several chunks.

    Attributes:
        whole: the variable of all layers.
        parts: those of each chunk, in order.
        is_gradient: whether it is a gradient.
        may_spread: whether stages may share the layers: what the step computes before the loss reads them layer by layer.
    """

    whole: Any
    parts: tuple[Layers, ...]
    is_gradient: bool
    may_spread: bool


class Rows(NamedTuple):
    """Layers `first` to `last` - 1 on a stage."""

    stage: int
    first: int
    last: int


class Piece(NamedTuple):
    """Layers that go from one group of rows to another: the places of both, and which layers."""

    source: int
    target: int
    first: int
    last: int


@dataclass(frozen=True)
class StoredStack:
    """A stack with the rows that stages keep between steps, and the rows that chunks on stages use, in the order of `stack.parts`."""

    stack: Stack
    kept: tuple[Rows, ...]
    used: tuple[Rows, ...]

    @property
    def num_layers(self) -> int:
        """Returns how many layers the stack has."""
        return self.stack.parts[-1].last

    @property
    def is_spread(self) -> bool:
        """Returns whether all stages keep equal shares."""
        return len(self.kept) > 1

    @property
    def is_at_home(self) -> bool:
        """Returns whether each stage uses what it keeps, and nothing else."""
        return self.is_spread and self.kept == self.used

    @property
    def copied(self) -> list[Layers]:
        """Returns the parts that are no rows which their stage keeps anyway."""
        return [part for part, rows in zip(self.stack.parts, self.used, strict=True) if rows not in self.kept]

    @property
    def pieces(self) -> list[Piece]:
        """The layers that go from one place to the other in a step: parameters to where they are used, gradients to where they are kept."""
        source, target = (self.used, self.kept) if self.stack.is_gradient else (self.kept, self.used)
        return pieces_between(source, target)


def pieces_between(sources: Sequence[Rows], targets: Sequence[Rows]) -> list[Piece]:
    """Returns the layers that each group of rows takes of each other one, by target, in order."""
    found = []
    for number, target in enumerate(targets):
        for place, source in enumerate(sources):
            first, last = max(source.first, target.first), min(source.last, target.last)
            if first < last:
                found.append(Piece(place, number, first, last))
    return found


def stored(stack: Stack, stages: Sequence[int], num_stages: int) -> StoredStack:
    """Returns a stack, whose parts some stages use, as stages keep it."""
    used = tuple(Rows(stage, part.first, part.last) for stage, part in zip(stages, stack.parts, strict=True))
    total = stack.parts[-1].last
    if not stack.may_spread or total % num_stages:
        return StoredStack(stack, (Rows(stages[0], 0, total),), used)
    share = total // num_stages
    return StoredStack(stack, tuple(Rows(stage, stage * share, (stage + 1) * share) for stage in range(num_stages)), used)


def together(own: StoredStack) -> StoredStack:
    """Returns a stack all of whose layers lie on the stage that uses the first ones."""
    return replace(own, kept=(Rows(own.used[0].stage, 0, own.num_layers),))


def union_mesh(mesh: LogicalMesh, num_stages: int) -> LogicalMesh:
    """Returns the mesh of several stages: an axis for them before those of each."""
    name = "stage"
    while name in mesh.names:
        name += "_"
    return LogicalMesh(((name, num_stages), *mesh.axes))

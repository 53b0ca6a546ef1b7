"""Gives each chunk its layers of stacked parameters, and takes their gradients to the stages that keep them.

What a stage keeps and uses itself is never copied: its devices' parts of the stacked array are arrays of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.programs.stacks import Rows, StoredStack
from spmdctx.pipeline.programs.transfers import Moved
from spmdctx.pipeline.run.compiled import placed_types
from spmdctx.pipeline.run.grounds import Grounds, Values, crossing
from spmdctx.pipeline.run.lowered import Lowerable
from spmdctx.pipeline.run.routes import Spot, is_here, join, move, split
from spmdctx.pipeline.run.tape import Tape


class Handed(NamedTuple):
    """A stack whose layers go from rows that stages have to rows that they need, and the sharding on each stage."""

    own: StoredStack
    sources: tuple[Rows, ...]
    spots: list[Spot]
    targets: tuple[Rows, ...]
    dims: TensorSharding


class LayerWriter:
    """Writes what becomes of stacked parameters before the first task of a step, and of their gradients after the last one.

    Args:
        tape: where to write.
        values: those around the loss.
        grounds: the devices.
        lowerable: takes each program by its name.
        dims_of: gives the sharding of a stacked value.
    """

    def __init__(
        self, tape: Tape, values: Values, grounds: Grounds, lowerable: dict[str, Lowerable], dims_of: Callable[[Any], TensorSharding]
    ) -> None:
        self._tape, self._values, self._grounds, self._lowerable, self._dims_of = tape, values, grounds, lowerable, dims_of

    def take(self, stacks: Sequence[StoredStack]) -> None:
        """Gives chunks the layers of parameters that they use."""
        handed = []
        for own in stacks:
            dims, whole = self._on_stage(own), own.stack.whole
            stages = [rows.stage for rows in own.kept]
            spot = self._values.over(whole, stages, self._grounds.on(stages, self._dims_of(whole)))
            places = [self._grounds.on((stage,), dims) for stage in stages]
            spots = split(self._tape, spot, places, _rows_of(whole.aval, own.kept[0])) if own.is_spread else [spot]
            handed.append(Handed(own, own.kept, spots, own.used, dims))
        for one, spots in zip(handed, self._handed("layers", handed, Moved.WEIGHT), strict=True):
            for part, rows, spot in zip(one.own.stack.parts, one.targets, spots, strict=True):
                self._values.keep(part.var, (rows.stage,), spot)

    def give(self, stacks: Sequence[StoredStack]) -> None:
        """Takes the gradients of layers to the stages that keep these."""
        handed = []
        for own in stacks:
            dims, places = self._on_stage(own), [self._grounds.on((rows.stage,), self._on_stage(own)) for rows in own.used]
            rows = zip(own.stack.parts, own.used, places, strict=True)
            spots = [self._values.on(part.var, used.stage, place) for part, used, place in rows]
            handed.append(Handed(own, own.used, spots, own.kept, dims))
        for one, spots in zip(handed, self._handed("layers_back", handed, Moved.GRADIENT), strict=True):
            whole, stages = one.own.stack.whole, [rows.stage for rows in one.targets]
            place = self._grounds.on(stages, self._dims_of(whole))
            spot = join(self._tape, spots, place, whole.aval) if one.own.is_spread else spots[0]
            self._values.keep(whole, stages, spot, by_layers=one.own.is_spread)

    def _on_stage(self, own: StoredStack) -> TensorSharding:
        """Returns the sharding of a stack's layers on a stage."""
        (first, *rest) = self._dims_of(own.stack.whole)
        return (first[1:] if own.is_spread else first, *rest)

    def _handed(self, name: str, handed: Sequence[Handed], what: Moved) -> list[list[Spot]]:
        """Writes all moves of some stacks: what each stage cuts out, what crosses, and what each stage puts together."""
        cuts, joins = _Batch(name, "cut"), _Batch(name, "put")
        cut: list[list[tuple[int, Spot]]] = []
        for number, one in enumerate(handed):
            cut.append([])
            for place, piece in enumerate(one.own.pieces):
                rows, spot = one.sources[piece.source], one.spots[piece.source]
                if (rows.first, rows.last) != (piece.first, piece.last):
                    aval = _rows_of(one.own.stack.whole.aval, Rows(rows.stage, piece.first, piece.last))
                    made = Spot((name, "cut", number, place), spot.place, aval)
                    bounds = piece.first - rows.first, piece.last - rows.first
                    cuts.add(rows.stage, [spot], made, lambda given, bounds=bounds: jax.lax.slice_in_dim(given, *bounds))
                    spot = made
                cut[-1].append((piece.target, spot))
        self._write(cuts)
        found: list[list[Spot]] = []
        for number, (one, pieces) in enumerate(zip(handed, cut, strict=True)):
            found.append([])
            for place, target in enumerate(one.targets):
                there = self._grounds.on((target.stage,), one.dims)
                sources = [one.sources[piece.source].stage for piece in one.own.pieces if piece.target == place]
                own = [spot for index, spot in pieces if index == place]
                moved = [
                    move(self._tape, [spot], [there], crossing(what, source, target.stage, spot))[0]
                    for source, spot in zip(sources, own, strict=True)
                ]
                made = moved[0]
                if len(moved) > 1:
                    made = Spot((name, "put", number, place), there, _rows_of(one.own.stack.whole.aval, target))
                    joins.add(target.stage, moved, made, lambda *given: jnp.concatenate(given))
                found[-1].append(made)
        self._write(joins)
        return found

    def _write(self, batch: _Batch) -> None:
        """Writes one program for each stage."""
        for stage, rows in batch.rows.items():
            given = [spot for spots, _, _ in rows for spot in spots]
            made = [spot for _, spot, _ in rows]
            if is_here(made[0].place):
                run = _program([(len(spots), fn) for spots, _, fn in rows], [spot.place for spot in made])
                self._tape.run(run, [spot.name for spot in given], [spot.name for spot in made])
                types = placed_types([spot.aval for spot in given], [spot.place for spot in given])
                self._lowerable[f"{batch.name}_{stage}"] = Lowerable(run, types)


class _Batch:
    """What the stages compute for some stacks, by stage: the operands, the result, and how it comes about."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = f"{name}_{kind}"
        self.rows: dict[int, list[tuple[list[Spot], Spot, Callable[..., Any]]]] = {}

    def add(self, stage: int, given: list[Spot], made: Spot, fn: Callable[..., Any]) -> None:
        """Adds a result."""
        self.rows.setdefault(stage, []).append((given, made, fn))


def _rows_of(aval: Any, rows: Rows) -> Any:
    return aval.update(shape=(rows.last - rows.first, *aval.shape[1:]))


def _program(parts: Sequence[tuple[int, Callable[..., Any]]], places: Sequence[NamedSharding]) -> jax.stages.Wrapped:
    def pipeline_layers(*given: Any) -> list[Any]:
        found, first = [], 0
        for count, fn in parts:
            found.append(fn(*given[first : first + count]))
            first += count
        return found

    return jax.jit(pipeline_layers, out_shardings=list(places))

"""Where values around the loss lie: on one stage, or, scalars and parts of the batch, on several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding
from spmdctx.pipeline.cut.line import num_bytes
from spmdctx.pipeline.programs.stacks import union_mesh
from spmdctx.pipeline.programs.transfers import Moved, Route
from spmdctx.pipeline.run.routes import Spot, is_here, join, move, split
from spmdctx.pipeline.run.tape import Crossing, Tape
from spmdctx.trace.specs import make_mesh, named_sharding


class Grounds:
    """The devices of each stage.

    Args:
        mesh: of each stage.
        devices: of all stages, one after the other.
        num_stages: how many.
    """

    def __init__(self, mesh: LogicalMesh, devices: Sequence[Any], num_stages: int) -> None:
        self._mesh, count = mesh, mesh.num_devices
        self.devices = [devices[stage * count : (stage + 1) * count] for stage in range(num_stages)]
        self.meshes = [make_mesh(mesh, own) for own in self.devices]
        self.stages = tuple(range(num_stages))
        self._unions: dict[tuple[int, ...], Mesh] = {}

    def on(self, stages: Sequence[int], dims: TensorSharding) -> NamedSharding:
        """Returns a sharding on the devices of a stage, or of several, each of which holds the whole value."""
        if len(stages) == 1:
            return named_sharding(self.meshes[stages[0]], dims)
        return named_sharding(self.union(tuple(stages)), dims)

    def union(self, stages: tuple[int, ...]) -> Mesh:
        """Returns the mesh of several stages, with an axis for them before those of each; a single stage has its own."""
        if len(stages) == 1:
            return self.meshes[stages[0]]
        if stages not in self._unions:
            devices = [device for stage in stages for device in self.devices[stage]]
            self._unions[stages] = make_mesh(union_mesh(self._mesh, len(stages)), devices)
        return self._unions[stages]


class Values:
    """The values around the loss while a tape is written: where each is, and how it comes to another stage.

    Args:
        tape: where to write.
        grounds: the devices.
        constants: values that are the same in all steps.
    """

    def __init__(self, tape: Tape, grounds: Grounds, constants: Mapping[Any, Any]) -> None:
        self._tape, self._grounds, self._constants = tape, grounds, constants
        self._at: dict[Any, dict[int, Spot]] = {}
        self._whole: dict[Any, tuple[tuple[int, ...], Spot]] = {}
        self._moved: dict[tuple[Any, int, NamedSharding], Spot] = {}
        self._joined: dict[tuple[Any, NamedSharding], Spot] = {}
        self._by_layers: set[Any] = set()
        self._made: set[tuple[int, NamedSharding]] = set()

    def keep(self, var: Any, stages: Sequence[int], spot: Spot, *, by_layers: bool = False) -> None:
        """Notes that some stages have a value, each all of it, or with `by_layers` its layers."""
        if len(stages) == 1:
            self._at.setdefault(var, {})[stages[0]] = spot
        else:
            self._whole[var] = (tuple(stages), spot)
        if by_layers:
            self._by_layers.add(var)

    def on(self, atom: Any, stage: int, place: NamedSharding | None = None, what: Moved = Moved.VALUE) -> Spot:
        """Returns a value on a stage, moved there if another one has it, in the sharding `place`, or in any if that is None.

        `what` says what it is counted as if it crosses.
        """
        if isinstance(atom, jexc.Literal) or atom in self._constants:
            return self._constant(atom, place or self._grounds.on((stage,), ((),) * len(atom.aval.shape)))
        held = self._spots(atom)
        source = stage if stage in held else next(iter(held))
        spot = held[source]
        target = place or (spot.place if stage in held else NamedSharding(self._grounds.meshes[stage], spot.place.spec))
        key = (atom, stage, target)
        if key not in self._moved:
            (self._moved[key],) = move(self._tape, [spot], [target], crossing(what, source, stage, spot))
            held.setdefault(stage, self._moved[key])
        return self._moved[key]

    def over(self, atom: Any, stages: Sequence[int], place: NamedSharding) -> Spot:
        """Returns a value that several stages have, as one array."""
        if len(stages) == 1:
            return self.on(atom, stages[0], place)
        if isinstance(atom, jexc.Literal) or atom in self._constants:
            return self._constant(atom, place)
        if atom in self._whole and (self._whole[atom][1].place == place or atom in self._by_layers):
            (found,) = move(self._tape, [self._whole[atom][1]], [place])
            return found
        if (atom, place) not in self._joined:
            own = [NamedSharding(self._grounds.meshes[stage], place.spec) for stage in stages]
            spots = [self.on(atom, stage, one) for stage, one in zip(stages, own, strict=True)]
            self._joined[atom, place] = join(self._tape, spots, place)
        return self._joined[atom, place]

    def anywhere(self, atom: Any) -> Spot:
        """Returns a value where it is."""
        if isinstance(atom, jexc.Literal) or atom in self._constants:
            return self.on(atom, 0)
        return self._whole[atom][1] if atom in self._whole else next(iter(self._at[atom].values()))

    def _spots(self, var: Any) -> dict[int, Spot]:
        """Returns a value on each stage that has it; several may have made it, and all together."""
        held = self._at.setdefault(var, {})
        stages, spot = self._whole.get(var, ((), None))
        if spot is not None and not held.keys() >= set(stages):
            places = [NamedSharding(self._grounds.meshes[stage], spot.place.spec) for stage in stages]
            for stage, own in zip(stages, split(self._tape, spot, places), strict=True):
                held.setdefault(stage, own)
        return held

    def _constant(self, atom: Any, place: NamedSharding) -> Spot:
        spot = Spot(("constant", id(atom), place), place, atom.aval)
        if (id(atom), place) not in self._made:
            self._made.add((id(atom), place))
            if is_here(place):
                self._tape.constant(spot.name, self._maker(atom, place))
        return spot

    def _maker(self, atom: Any, place: NamedSharding) -> Callable[[], Any]:
        value = np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jexc.Literal) else self._constants[atom]
        return lambda: placed(value, place)


def crossing(what: Moved, source: int, target: int, spot: Spot) -> Crossing | None:
    """Returns the event of an array that goes from one stage to another; None if it stays."""
    return Crossing(Route(what, source, target), num_bytes(spot)) if source != target else None


def placed(value: Any, place: NamedSharding) -> Any:
    """Places a value that every process has."""
    if jax.process_count() == 1:
        return jax.device_put(value, place)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index], dtype=array.dtype)

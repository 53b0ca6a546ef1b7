"""Moves arrays between groups of devices, of this process or of others.

Processes match transfers by their order, so each of them takes part in every transfer between processes, in one order. One that has no
part of an array gives, or gets, an array without local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.dtypes import extended
from jax.sharding import NamedSharding

from spmdctx._compat import is_compile_only, shard_copier
from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.run.tape import Event, Tape


class Spot(NamedTuple):
    """An array on a tape: its name there, where it lies, and its type."""

    name: Hashable
    place: NamedSharding
    aval: Any


def processes_of(place: NamedSharding) -> frozenset[int]:
    """Returns the processes that have devices of a sharding."""
    return frozenset(device.process_index for device in place.mesh.devices.flat)


def is_here(place: NamedSharding) -> bool:
    """Returns whether this process has devices of a sharding, or they are none that run."""
    return jax.process_index() in processes_of(place) or is_compile_only(place.mesh.devices.flat[0])


def check_stages(places: Sequence[NamedSharding]) -> None:
    """Refuses stages that share some of their processes: JAX cannot move arrays between them.

    Raises:
        UnsupportedError: a process has a part of a stage that spans processes, and a part of another stage.
    """
    held = [processes_of(place) for place in places]
    for stage, own in enumerate(held):
        for other, theirs in enumerate(held[:stage]):
            if own & theirs and len(own | theirs) > 1:
                raise UnsupportedError(
                    f"Stages {other} and {stage} of the pipeline share a process, and one of them has devices of several processes.",
                    got=f"processes {sorted(theirs)} and {sorted(own)}",
                    need="as many devices per stage as whole processes have, or a part of one process's that divides them",
                    fix="set pipeline_stages to a multiple or a divisor of the number of processes",
                )


def without_shards(aval: Any, place: NamedSharding) -> jax.Array:
    """Returns an array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(aval.shape, place, [], dtype=aval.dtype)


def move(tape: Tape, spots: Sequence[Spot], targets: Sequence[NamedSharding], event: Event | None = None) -> list[Spot]:
    """Appends the move of some arrays of one group of devices to another group, or to other shardings on the same one.

    Arrays that lie right already stay as they are. `event` is what the process that has the arrays counts.
    """
    found = [
        spot if spot.place == place else Spot((spot.name, place), place, spot.aval) for spot, place in zip(spots, targets, strict=True)
    ]
    moved = [(spot, own) for spot, own in zip(spots, found, strict=True) if spot.name != own.name]
    if not moved:
        if event is not None and spots and is_here(spots[0].place):
            tape.run(lambda: (), (), (), event)
        return found
    source, target = moved[0][0].place, moved[0][1].place
    if processes_of(source) == processes_of(target):
        if is_here(source):
            _put(tape, [spot for spot, _ in moved], [own for _, own in moved], event)
        return found
    # Both sides of a transfer need the same sharding.
    landed = [Spot((own.name, "landed"), NamedSharding(own.place.mesh, spot.place.spec), own.aval) for spot, own in moved]
    landed = [own if spot.place == own.place else spot for spot, (_, own) in zip(landed, moved, strict=True)]
    if is_here(source):
        _put(tape, [spot for spot, _ in moved], landed, event)
    else:
        given = [without_shards(spot.aval, spot.place) for spot, _ in moved]
        tape.run(partial(jax.device_put, given, [spot.place for spot in landed]), (), [spot.name for spot in landed])
    if is_here(target):
        left = [(spot, own) for spot, (_, own) in zip(landed, moved, strict=True) if spot.name != own.name]
        if left:
            _put(tape, [spot for spot, _ in left], [own for _, own in left])
    return found


def _put(tape: Tape, spots: Sequence[Spot], targets: Sequence[Spot], event: Event | None = None) -> None:
    tape.run(_mover(spots, targets), [spot.name for spot in spots], [spot.name for spot in targets], event)


def _mover(spots: Sequence[Spot], targets: Sequence[Spot]) -> Callable[..., Sequence[Any]]:
    sources, places = [spot.place for spot in spots], tuple(spot.place for spot in targets)
    copied = shard_copier(places) if all(map(_is_copied, spots, targets)) else None

    def run(*arrays: Any) -> Sequence[Any]:
        # Callers may bring arrays that another sharding divides in the same way.
        if copied is not None and [array.sharding for array in arrays] == sources:
            return copied(arrays)
        moved: Sequence[Any] = jax.device_put(arrays, places)
        return moved

    return run


def _is_copied(spot: Spot, target: Spot) -> bool:
    """Returns whether each shard goes to one device of another group as it is, all of them on this process."""
    source, place = spot.place, target.place
    alike = source.spec == place.spec and source.memory_kind == place.memory_kind and source.mesh.shape == place.mesh.shape
    here = {jax.process_index()} == processes_of(source) == processes_of(place) and not is_compile_only(place.mesh.devices.flat[0])
    return alike and here and source.mesh != place.mesh and not jnp.issubdtype(spot.aval.dtype, extended)


def split(tape: Tape, spot: Spot, places: Sequence[NamedSharding], aval: Any = None) -> list[Spot]:
    """Appends the division of an array that several groups of devices hold into one array for each group; nothing is copied.

    Args:
        tape: where to append.
        spot: the array; the groups of its devices come one after the other.
        places: the sharding on each group.
        aval: the type of each group's array if it is a part of the whole one; otherwise each group holds all of that.
    """
    found = [Spot((spot.name, place), place, spot.aval if aval is None else aval) for place in places]
    own = [one for one in found if is_here(one.place)]
    shape, here = found[0].aval.shape, [one.place for one in own]
    counts = [len(place.addressable_devices) for place in here]

    def run(array: Any) -> list[Any]:
        shards, made, first = array.addressable_shards, [], 0
        for place, count in zip(here, counts, strict=True):
            parts = [shard.data for shard in shards[first : first + count]]
            made.append(jax.make_array_from_single_device_arrays(shape, place, parts))
            first += count
        return made

    if own:
        tape.run(run, [spot.name], [one.name for one in own])
    return found


def join(tape: Tape, spots: Sequence[Spot], place: NamedSharding, aval: Any = None) -> Spot:
    """Appends the union of arrays of several groups of devices into one; nothing is copied.

    Each holds the same, unless `aval` is the type of an array of which they hold one part after the other.
    """
    found = Spot((tuple(spot.name for spot in spots), place), place, spots[0].aval if aval is None else aval)
    own, shape = [spot.name for spot in spots if is_here(spot.place)], found.aval.shape

    def run(*arrays: Any) -> tuple[Any]:
        parts = [shard.data for array in arrays for shard in array.addressable_shards]
        return (jax.make_array_from_single_device_arrays(shape, place, parts),)

    tape.run(run, own, [found.name])
    return found

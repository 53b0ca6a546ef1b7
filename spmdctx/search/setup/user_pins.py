"""The pins that the user's own code makes: constraints, shardings of jax.jit, and partitioning metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdctx.errors import StrategyError
from spmdctx.ir.analysis.batch import dividing_axes
from spmdctx.ir.graph import Graph
from spmdctx.ir.mesh import LogicalMesh, divides, format_sharding
from spmdctx.search.setup.marks import PinnedDims
from spmdctx.search.setup.request import Request, Setup, ValuePin
from spmdctx.wording import counted

_MOST_NAMED = 8
_MOST_TENSORS = 3
_OF_JIT = ("in_shardings", "out_shardings")


@dataclass
class _Notes:
    """What was not done as asked, by the origin of the pins."""

    unknown: dict[str, _Unknown] = field(default_factory=dict)
    foreign: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    undivided: dict[str, dict[tuple[str, str], list[str]]] = field(default_factory=dict)


class _Unknown(NamedTuple):
    axes: dict[str, None]
    places: list[str]


def pin_user_shardings(graph: Graph, request: Request, setup: Setup) -> None:
    """Pins what the user's code asks for; axes that the mesh does not have, or that do not divide, split nothing, and notes say so.

    Raises:
        StrategyError: a constraint for another mesh than the step's.
    """
    notes = _Notes()
    for pin in request.value_pins:
        if pin.mesh_axes and (foreign := _foreign(pin, setup.mesh)):
            if pin.origin not in _OF_JIT:
                raise StrategyError(
                    f"{pin.origin} names mesh axes that the step's mesh does not have: {', '.join(foreign)}.",
                    got=f"{dict(pin.mesh_axes)}, the step's mesh is {dict(setup.mesh.axes)}",
                    fix="pass the mesh of the constraint as mesh=, or use axes of spmdctx.get_mesh()",
                )
            named = notes.foreign.setdefault((pin.origin, str(dict(pin.mesh_axes))), [])
            named += [_name_of(graph, pin.value)] if graph.values[pin.value].path else []
            continue
        setup.reasons[pin.value] = pin.origin
        dims = _fitting(graph, pin, setup.mesh, notes)
        if dims is not None:
            fix(setup, pin.value, dims)
    setup.notes += _written(notes, setup.mesh)


def _foreign(pin: ValuePin, mesh: LogicalMesh) -> list[str]:
    """Returns the axes of a pin that the step's mesh does not have, or has in another size."""
    sizes, own = mesh.sizes, dict(pin.mesh_axes)
    return sorted({name for dim in pin.dims for name in dim or () if name not in sizes or own.get(name, sizes[name]) != sizes[name]})


def _fitting(graph: Graph, pin: ValuePin, mesh: LogicalMesh, notes: _Notes) -> PinnedDims | None:
    """Returns the dimensions of a pin with the axes that the mesh has and that divide, or None if none of its axes is left."""
    shape = graph.values[pin.value].shape
    known: PinnedDims = tuple(None if dim is None else tuple(name for name in dim if name in mesh.sizes) for dim in pin.dims)
    if known != pin.dims:
        unknown = notes.unknown.setdefault(pin.origin, _Unknown({}, []))
        unknown.axes.update(dict.fromkeys(name for dim in pin.dims for name in dim or () if name not in mesh.sizes))
        unknown.places.append(_name_of(graph, pin.value))
    asked = tuple(dim or () for dim in known)
    fitting = known
    if 0 not in shape and not divides(shape, asked, mesh):
        fitting = tuple(dim and dividing_axes(size, dim, mesh) for dim, size in zip(known, shape, strict=True))
        kept = tuple(dim or () for dim in fitting)
        done = f"kept as {format_sharding(kept)}" if any(kept) else "ignored"
        text = f"{format_sharding(asked)} does not divide shape {shape}"
        notes.undivided.setdefault(pin.origin, {}).setdefault((text, done), []).append(place_of(graph, pin.value))
    return fitting if any(fitting) or fitting == pin.dims else None


def _written(notes: _Notes, mesh: LogicalMesh) -> list[str]:
    """Returns one note for each kind and origin."""
    texts = [
        f"{origin} are for the mesh {axes}, and the step's mesh is {dict(mesh.axes)}: ignored.{_some(places)}"
        for (origin, axes), places in notes.foreign.items()
    ]
    own = ", ".join(f"{name} {size}" for name, size in mesh.axes)
    for origin, (axes, places) in notes.unknown.items():
        text = f"{origin} of {counted(len(places), 'tensor')} names {', '.join(sorted(axes))}, which the mesh ({own}) does not have"
        texts.append(f"{text}: no split.{_some(places)} Logical names need rules=.")
    for origin, entries in notes.undivided.items():
        given = [f"{text} {places[0]}{_and_more(places, 1)}: {done}" for (text, done), places in entries.items()]
        texts.append(f"{origin} {'; '.join(given[:_MOST_NAMED])}{_and_more(given, _MOST_NAMED)}.")
    return texts


def _some(places: Sequence[str]) -> str:
    """Names a few of the tensors, if any."""
    return f" Tensors: {', '.join(places[:_MOST_TENSORS])}{_and_more(places, _MOST_TENSORS)}." if places else ""


def _and_more(given: Sequence[str], named: int) -> str:
    return f" and {len(given) - named} more" if len(given) > named else ""


def _name_of(graph: Graph, value: int) -> str:
    return place_of(graph, value).removeprefix("of ").removeprefix("at ")


def place_of(graph: Graph, value: int) -> str:
    """Returns where a value comes from: its path, or the line that makes it."""
    path = graph.values[value].path
    return f"of '{path}'" if path else f"at {graph.origins[graph.producers[value]].source}"


def fix(setup: Setup, value: int, dims: PinnedDims) -> None:
    """Pins a value whose every dimension is fixed; makes a seed of any other."""
    where = setup.seeds if None in dims else setup.pins
    where[value] = tuple(dim or () for dim in dims)
    if None in dims and any(dim is not None for dim in dims):
        setup.partial_pins[value] = dims

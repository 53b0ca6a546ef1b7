"""Matches compiled collectives with planned ones, execution by execution, and names how each planned one was realised.

A planned collective is found if a compiled one has its axes, and its payload within 10 %. It is also found if the compiler is known to
write it in another way. Each such way has a name, which the result carries together with the bytes really moved.

The caller knows the ways that are one for one (`machine.xla.collectives.ways`). The functions below find collectives over several axes
that run one axis at a time, and those over one axis each that run at once. They also find collectives moved out of a loop, and partial
results added up before they are reduced. All of them allow for the types in which those ways move a kind (`_ratios`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from spmdctx.audit.collectives import CompiledCollective
from spmdctx.audit.groups import in_mesh_order
from spmdctx.audit.pairs import Pairs
from spmdctx.ir.collective import Collective, Way
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import AxisNames

TOLERANCE = 0.1
STACKED = "once after its loop, stacked"
HOISTED = "once after its loop"
HOISTED_SLICE = "reduce_scatter after its loop"
JOINED = "added to another before the reduction"
PER_AXIS = "one per axis"
AT_ONCE = "one over all axes"
HALVES = "real and imaginary parts apart"

_SMALL_BYTES, _MOST_PADDED = 4096, 4
"""Tiles may make a payload so many bytes, or so many times as large."""


@dataclass(slots=True)
class _Planned:
    """A planned collective, and the number of its executions that are not found yet."""

    item: Collective
    axes: AxisNames
    left: int


@dataclass(slots=True)
class _Compiled:
    """A compiled collective, and the number of its executions that realise nothing yet; its sums may hold `spare` more."""

    item: CompiledCollective
    left: int
    spare: int


@dataclass(frozen=True, slots=True)
class Match:
    """`count` executions of a planned collective, found in the way named, in `realised_bytes` of the compiled program."""

    planned: Collective
    count: int
    realised_bytes: int
    way: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome: the matches, the planned collectives that are missing, and the compiled ones that the plan does not know of.

    The `repeats` of the last two are the executions left over.
    """

    matches: tuple[Match, ...]
    missing: tuple[Collective, ...]
    unplanned: tuple[CompiledCollective, ...]


@dataclass
class _Ledger:
    planned: list[_Planned]
    compiled: list[_Compiled]
    matches: list[Match] = field(default_factory=list)

    def close(self, planned: _Planned, count: int, used: Iterable[tuple[_Compiled, int]], way: str) -> None:
        """Books `count` executions as found in the executions `used`."""
        planned.left -= count
        realised = 0
        for one, executions in used:
            one.left -= executions
            realised += executions * one.item.payload_bytes
        self.matches.append(Match(planned.item, count, realised, way))


def compare(planned: Iterable[Collective], compiled: Iterable[CompiledCollective], mesh: LogicalMesh, ways: Sequence[Way]) -> Comparison:
    """Matches compiled with planned collectives; each execution is used once.

    Args:
        planned: The plan's collectives. Those over axes of size 1, or without payload, are left out.
        compiled: What `parse_collectives` found for the same mesh.
        mesh: The plan's mesh.
        ways: The ways in which the compiler may write a planned collective as one other; among equally many matches,
            earlier ways are preferred.
    """
    found = _compared(planned, compiled, mesh, ways, by_axes=False)
    if found.missing and found.unplanned:
        # What runs over few axes may have taken a step of what runs over many, one axis at a time.
        return min(found, _compared(planned, compiled, mesh, ways, by_axes=True), key=_left_bytes)
    return found


def _compared(
    planned: Iterable[Collective], compiled: Iterable[CompiledCollective], mesh: LogicalMesh, ways: Sequence[Way], *, by_axes: bool
) -> Comparison:
    """Returns the matches; those over more axes come first if they are looked for `by_axes`."""
    own = [_Planned(one, in_mesh_order(one.axes, mesh), one.repeats) for one in planned if one.payload_bytes]
    ledger = _Ledger(
        sorted((one for one in own if one.axes), key=lambda one: -one.item.payload_bytes),
        [_Compiled(one, one.repeats, one.repeats * (one.summands - 1)) for one in compiled],
    )
    for number in sorted({len(one.axes) for one in ledger.planned}, reverse=True) if by_axes else ():
        some = _Ledger([one for one in ledger.planned if len(one.axes) == number], ledger.compiled, ledger.matches)
        _match_ways(some, ways)
        _match_per_axis(some, mesh, ways)
    _match_ways(ledger, ways)
    _match_per_axis(ledger, mesh, ways)
    _match_at_once(ledger, mesh, ways)
    _match_stacked(ledger, ways)
    _match_hoisted(ledger)
    _match_hoisted_slices(ledger, ways)
    _match_joined(ledger, ways)
    _match_halves(ledger)
    return Comparison(
        tuple(ledger.matches),
        tuple(replace(one.item, repeats=one.left) for one in ledger.planned if one.left),
        tuple(replace(one.item, repeats=one.left) for one in ledger.compiled if one.left),
    )


def _left_bytes(found: Comparison) -> int:
    missing = sum(one.payload_bytes * one.repeats for one in found.missing)
    return missing + sum(one.total_bytes for one in found.unplanned)


def _match_ways(ledger: _Ledger, ways: Sequence[Way]) -> None:
    """Matches collectives one for one, as many as can be; earlier ways are preferred."""
    pairs = Pairs([one.left for one in ledger.planned], [one.left for one in ledger.compiled])
    places: dict[AxisNames, list[int]] = {}
    for place, compiled in enumerate(ledger.compiled):
        if compiled.left:
            places.setdefault(compiled.item.axes, []).append(place)
    for number, way in enumerate(ways):
        for place, planned in enumerate(ledger.planned):
            if planned.item.kind == way.planned and pairs.left_planned[place]:
                own = [one for one in places.get(planned.axes, ()) if pairs.left_compiled[one]]
                wanted = round(planned.item.payload_bytes * way.ratio)
                fitting = [one for one in own if _realises(ledger.compiled[one].item, planned.item, (way,))]
                for one in sorted(fitting, key=lambda one: _distance(planned.item, ledger.compiled[one].item, wanted)):
                    pairs.add(place, one, number)

    def fits(place: int) -> Iterator[tuple[int, int]]:
        planned = ledger.planned[place]
        for one in places.get(planned.axes, ()):
            for number, way in enumerate(ways):
                if _realises(ledger.compiled[one].item, planned.item, (way,)):
                    yield one, number
                    break

    pairs.improve(fits, [one.item.repeats > 1 for one in ledger.planned])
    for pair in sorted(pairs.found(), key=lambda pair: (pair.way, pair.planned)):
        ledger.close(
            ledger.planned[pair.planned], pair.executions, [(ledger.compiled[pair.compiled], pair.executions)], ways[pair.way].name
        )


def _distance(planned: Collective, compiled: CompiledCollective, wanted: int) -> tuple[int, bool, bool]:
    """Returns the sort key of candidates: the nearest payload first, then the same loop, then the same source line."""
    return abs(compiled.payload_bytes - wanted), planned.repeats != compiled.repeats, _line(planned) != _line(compiled)


def _match_per_axis(ledger: _Ledger, mesh: LogicalMesh, ways: Sequence[Way]) -> None:
    """Matches one planned collective over several axes with compiled ones that run over some of the axes each, one after the other."""
    for planned in ledger.planned:
        kinds = ("reduce_scatter", "all_reduce") if planned.item.kind == "reduce_scatter" else (planned.item.kind,)
        for kind in kinds if len(planned.axes) > 1 else ():
            # All steps are moved in one type.
            for ratio in dict.fromkeys(way.ratio for way in ways):
                while planned.left and (steps := _steps(planned, kind, ratio, ledger, mesh, ways)):
                    count = min(planned.left, *(one.left for one in steps))
                    ledger.close(planned, count, [(one, count) for one in steps], PER_AXIS)


def _steps(planned: _Planned, kind: str, ratio: float, ledger: _Ledger, mesh: LogicalMesh, ways: Sequence[Way]) -> tuple[_Compiled, ...]:
    """Returns compiled collectives of a kind that run over the axes of a planned one in steps, or an empty tuple."""
    own = [one for one in ledger.compiled if one.left and one.item.kind == kind and set(one.item.axes) < set(planned.axes)]

    def rest_of(axes: AxisNames, payload: int) -> tuple[_Compiled, ...]:
        tried: set[AxisNames] = set()
        for one in own:
            name = one.item.axes
            if name in tried or not set(name) <= set(axes) or ratio not in _ratios(one.item, payload, ways):
                continue
            tried.add(name)
            left = tuple(axis for axis in axes if axis not in name)
            others = rest_of(left, _second_payload(kind, payload, mesh.num_slices(name))) if left else ()
            if others or not left:
                return one, *others
        return ()

    return rest_of(planned.axes, planned.item.payload_bytes)


def _match_at_once(ledger: _Ledger, mesh: LogicalMesh, ways: Sequence[Way]) -> None:
    """Matches two planned collectives over different axes with a compiled one over both."""
    for compiled in ledger.compiled:
        item = compiled.item
        own = [one for one in ledger.planned if one.left and one.item.kind == item.kind and set(one.axes) < set(item.axes)]
        for whole in own if compiled.left else ():
            rest = tuple(name for name in item.axes if name not in whole.axes)
            share = _second_payload(item.kind, whole.item.payload_bytes, mesh.num_slices(whole.axes))
            part = next((one for one in own if one.left and one.axes == rest and _near(one.item.payload_bytes, share)), None)
            if part is not None and _ratios(item, whole.item.payload_bytes, ways):
                count = min(whole.left, part.left, compiled.left)
                ledger.close(whole, count, [(compiled, count)], AT_ONCE)
                ledger.close(part, count, [], AT_ONCE)


def _second_payload(kind: str, payload: int, num_slices: int) -> int:
    """Returns the payload of the smaller step of a collective that runs over one axis after the other."""
    return payload // num_slices if kind in ("all_gather", "reduce_scatter") else payload


def _match_stacked(ledger: _Ledger, ways: Sequence[Way]) -> None:
    """Matches a collective planned once per iteration with one compiled for the stacked results of all iterations."""
    for planned in ledger.planned:
        for one in ledger.compiled if planned.left > 1 else ():
            same = one.left and (one.item.kind, one.item.axes) == (planned.item.kind, planned.axes)
            iterations = _iterations(planned, one.item, ways) if same else 0
            count = min(planned.left // iterations, one.left) if iterations else 0
            if count:
                ledger.close(planned, count * iterations, [(one, count)], STACKED)


def _iterations(planned: _Planned, compiled: CompiledCollective, ways: Sequence[Way]) -> int:
    """Returns how many iterations of a planned collective a compiled one holds, or 0 if that is no number of them."""
    payload, repeats = planned.item.payload_bytes, planned.item.repeats
    for ratio in _known_ratios(compiled, ways):
        iterations = round(compiled.payload_bytes / (payload * ratio))
        near = _near(compiled.payload_bytes, round(iterations * payload * ratio))
        if 1 < iterations <= planned.left and repeats % iterations == 0 and near:
            return iterations
    return 0


def _match_hoisted(ledger: _Ledger) -> None:
    """Matches a collective planned once per iteration with one compiled after the loop, which reduces the sum of all iterations."""
    groups: dict[tuple[str, AxisNames, int], list[_Planned]] = {}
    for one in ledger.planned:
        groups.setdefault((one.item.kind, one.axes, one.item.payload_bytes), []).append(one)
    for group in groups.values():
        found = sum(one.item.repeats - one.left for one in group)
        open_ones = [one for one in group if one.left]
        if found >= len(group) and all(one.item.repeats > 1 for one in open_ones):
            for one in open_ones:
                ledger.close(one, one.left, [], HOISTED)


def _match_hoisted_slices(ledger: _Ledger, ways: Sequence[Way]) -> None:
    """Matches reductions planned once per iteration with one compiled after the loop, of which every device keeps a slice."""
    for planned in ledger.planned:
        if planned.item.kind == "all_reduce" and planned.left == planned.item.repeats > 1:
            own = (one for one in ledger.compiled if one.left and one.item.kind == "reduce_scatter" and one.item.axes == planned.axes)
            one = next((one for one in own if _ratios(one.item, planned.item.payload_bytes, ways)), None)
            if one is not None:
                ledger.close(planned, planned.left, [(one, 1)], HOISTED_SLICE)


def _match_joined(ledger: _Ledger, ways: Sequence[Way]) -> None:
    """Matches several planned reductions of terms of one sum with one compiled reduction of the sum."""
    for planned in ledger.planned:
        for one in ledger.compiled if planned.item.kind in ("all_reduce", "reduce_scatter") else ():
            count = min(planned.left, one.spare)
            if count > 0 and one.item.axes == planned.axes and _realises(one.item, planned.item, ways):
                one.spare -= count
                ledger.close(planned, count, [], JOINED)


def _match_halves(ledger: _Ledger) -> None:
    """Matches a planned collective of complex numbers with one of their real and one of their imaginary parts, as on TPU."""
    for planned in ledger.planned:
        half = planned.item.payload_bytes // 2
        own = [one for one in ledger.compiled if planned.left and one.left and one.item.axes == planned.axes]
        own = [one for one in own if _line(one.item) == _line(planned.item) and _writes(one.item, planned.item.kind, half)]
        for first, second in itertools.combinations(own, 2):
            count = min(planned.left, first.left, second.left)
            if count and first.item.repeats == second.item.repeats:
                ledger.close(planned, count, [(first, count), (second, count)], HALVES)


def _line(one: Collective | CompiledCollective) -> str:
    """Returns the source line without the function, which not all compilers keep."""
    return one.source.partition(" (")[0]


def _writes(compiled: CompiledCollective, kind: str, payload: int) -> bool:
    """Returns whether a compiled collective is of this kind, or a sum to be sliced, with exactly this payload."""
    kinds = ("reduce_scatter", "all_reduce") if kind == "reduce_scatter" else (kind,)
    return compiled.kind in kinds and compiled.payload_bytes == payload and compiled.dtype.startswith("float")


def _realises(compiled: CompiledCollective, planned: Collective, ways: Sequence[Way]) -> bool:
    """Returns whether a compiled collective realises a planned one in some way."""
    return any(
        (way.planned, way.compiled) == (planned.kind, compiled.kind)
        and (not way.dtypes or compiled.dtype in way.dtypes)
        and (_is_padded if way.is_padded else _near)(compiled.payload_bytes, round(planned.payload_bytes * way.ratio))
        for way in ways
    )


def _ratios(compiled: CompiledCollective, payload: int, ways: Sequence[Way]) -> list[float]:
    """Returns the multiples of a planned payload that a compiled collective moves: 1 in its own type, 2 as float32 for bfloat16."""
    return [ratio for ratio in _known_ratios(compiled, ways) if _near(compiled.payload_bytes, round(payload * ratio))]


def _known_ratios(compiled: CompiledCollective, ways: Sequence[Way]) -> list[float]:
    """Returns the multiples of a payload that collectives of this kind may move in this type."""
    return [way.ratio for way in ways if way.planned == way.compiled == compiled.kind and (not way.dtypes or compiled.dtype in way.dtypes)]


def _is_padded(value: int, wanted: int) -> bool:
    """Returns whether a payload may be the wanted one, padded to tiles, of whose shapes a payload alone does not tell."""
    return wanted <= value <= max(_SMALL_BYTES, _MOST_PADDED * wanted)


def _near(value: int, wanted: int) -> bool:
    return abs(value - wanted) <= TOLERANCE * wanted

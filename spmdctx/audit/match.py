"""Holds compiled collectives against planned ones, execution by execution, and names how each planned one was realised.

A planned collective is found where a compiled one has its axes and its payload within 10 %, or where the compiler is known
to write it otherwise: each such way is a line of `_WAYS`, or a split or fusion over axes, and is named in the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spmdctx.audit.collectives import CompiledCollective
from spmdctx.audit.groups import in_mesh_order
from spmdctx.ir import AxisNames, Collective
from spmdctx.mesh import LogicalMesh

TOLERANCE = 0.1
AS_PLANNED = "as planned"


class _Way(NamedTuple):
    """One way to write a planned kind: the compiled kind, its payload over the planned one's, and its dtype if that tells."""

    planned: str
    compiled: str
    ratio: float
    dtypes: tuple[str, ...]
    name: str


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
_NARROW = ("bfloat16", "float16")
_WIDE = ("float32",)
_WAYS: tuple[_Way, ...] = (
    *(_Way(kind, kind, 1.0, (), AS_PLANNED) for kind in _KINDS),
    _Way("reduce_scatter", "all_reduce", 1.0, (), "all_reduce and slice"),
    *(_Way(kind, kind, 2.0, _WIDE, "float32 for bfloat16") for kind in _KINDS),
    _Way("reduce_scatter", "all_reduce", 2.0, _WIDE, "all_reduce and slice, float32 for bfloat16"),
    *(_Way(kind, kind, 0.5, _NARROW, "bfloat16 for float32") for kind in _KINDS),
)


@dataclass(slots=True)
class _Open:
    """Executions of one collective that are not matched yet."""

    kind: str
    axes: AxisNames
    payload: int
    left: int


@dataclass(slots=True)
class _OpenPlanned(_Open):
    item: Collective


@dataclass(slots=True)
class _OpenCompiled(_Open):
    item: CompiledCollective


@dataclass(frozen=True, slots=True)
class Match:
    """`count` executions of a planned collective, and the compiled ones that realise each of them."""

    planned: Collective
    compiled: tuple[CompiledCollective, ...]
    count: int
    way: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome: what was found, what of the plan is missing, what the plan does not know of (`repeats` left over)."""

    matches: tuple[Match, ...]
    missing: tuple[Collective, ...]
    unplanned: tuple[CompiledCollective, ...]


@dataclass
class _Ledger:
    planned: list[_OpenPlanned]
    compiled: list[_OpenCompiled]
    matches: list[Match] = field(default_factory=list)

    def close(self, planned: _OpenPlanned, compiled: tuple[_OpenCompiled, ...], way: str) -> None:
        count = min(planned.left, *(one.left for one in compiled))
        for one in (planned, *compiled):
            one.left -= count
        self.matches.append(Match(planned.item, tuple(one.item for one in compiled), count, way))


def compare(planned: Iterable[Collective], compiled: Iterable[CompiledCollective], mesh: LogicalMesh) -> Comparison:
    """Matches compiled with planned collectives; each execution is used once.

    Args:
        planned: The plan's collectives. Those over axes of size 1, or without payload, count as none.
        compiled: What `parse_collectives` found for the same mesh.
        mesh: The plan's mesh.
    """
    open_planned = [_OpenPlanned(one.kind, in_mesh_order(one.axes, mesh), one.payload_bytes, one.repeats, one) for one in planned]
    ledger = _Ledger(
        sorted((one for one in open_planned if one.axes and one.payload), key=lambda one: -one.payload),
        [_OpenCompiled(one.kind, one.axes, one.payload_bytes, one.repeats, one) for one in compiled],
    )
    for way in _WAYS:
        _match_way(ledger, way)
    _match_split(ledger, mesh)
    _match_fused(ledger, mesh)
    return Comparison(
        tuple(ledger.matches),
        tuple(replace(one.item, repeats=one.left) for one in ledger.planned if one.left),
        tuple(replace(one.item, repeats=one.left) for one in ledger.compiled if one.left),
    )


def _match_way(ledger: _Ledger, way: _Way) -> None:
    candidates: dict[AxisNames, list[_OpenCompiled]] = {}
    for one in ledger.compiled:
        if one.left and one.kind == way.compiled and (not way.dtypes or one.item.dtype in way.dtypes):
            candidates.setdefault(one.axes, []).append(one)
    for planned in ledger.planned:
        if planned.kind != way.planned or not planned.left:
            continue
        wanted = planned.payload * way.ratio
        fitting = [one for one in candidates.get(planned.axes, ()) if abs(one.payload - wanted) <= TOLERANCE * wanted]
        # The nearest payload first; then the same loop, then the same source line.
        for one in sorted(fitting, key=lambda one: _distance(planned, one, wanted)):
            if planned.left and one.left:
                ledger.close(planned, (one,), way.name)


def _distance(planned: _OpenPlanned, compiled: _OpenCompiled, wanted: float) -> tuple[float, bool, bool]:
    return abs(compiled.payload - wanted), planned.item.repeats != compiled.item.repeats, planned.item.source != compiled.item.source


def _match_split(ledger: _Ledger, mesh: LogicalMesh) -> None:
    """One planned collective over several axes, compiled as one per axis, or part of the axes."""
    for planned in ledger.planned:
        for steps in _compiled_steps(planned, ledger, mesh) if len(planned.axes) > 1 else ():
            if planned.left and all(one.left for one in steps):
                ledger.close(planned, steps, "one per axis")


def _compiled_steps(planned: _OpenPlanned, ledger: _Ledger, mesh: LogicalMesh) -> Iterator[tuple[_OpenCompiled, _OpenCompiled]]:
    own = [one for one in ledger.compiled if one.left and one.kind == planned.kind and set(one.axes) < set(planned.axes)]
    for whole in own:
        for part in own:
            rest = tuple(name for name in planned.axes if name not in whole.axes)
            share = _second_payload(planned.kind, planned.payload, mesh.num_slices(whole.axes))
            if part.axes == rest and _near(whole.payload, planned.payload) and _near(part.payload, share):
                yield whole, part


def _match_fused(ledger: _Ledger, mesh: LogicalMesh) -> None:
    """Two planned collectives over different axes, compiled as one over both."""
    for compiled in ledger.compiled:
        own = [one for one in ledger.planned if one.left and one.kind == compiled.kind and set(one.axes) < set(compiled.axes)]
        for whole in own if compiled.left and len(compiled.axes) > 1 else ():
            rest = tuple(name for name in compiled.axes if name not in whole.axes)
            share = _second_payload(compiled.kind, compiled.payload, mesh.num_slices(whole.axes))
            part = next((one for one in own if one.left and one.axes == rest and _near(one.payload, share)), None)
            if part is None or not _near(whole.payload, compiled.payload) or not whole.left or not compiled.left:
                continue
            count = min(whole.left, part.left, compiled.left)
            for one in (whole, part, compiled):
                one.left -= count
            ledger.matches.append(Match(whole.item, (compiled.item,), count, f"one over {'+'.join(compiled.axes)}"))
            ledger.matches.append(Match(part.item, (), count, f"one over {'+'.join(compiled.axes)}"))


def _second_payload(kind: str, payload: int, num_slices: int) -> int:
    """Payload of the smaller step when a collective is done over one axis after the other."""
    return payload // num_slices if kind in ("all_gather", "reduce_scatter") else payload


def _near(value: int, wanted: int) -> bool:
    return abs(value - wanted) <= TOLERANCE * wanted

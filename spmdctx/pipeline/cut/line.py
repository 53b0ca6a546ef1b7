"""Puts the equations of a loss into one line, which can be cut between any two of them.

On the line stand the equations that depend on parameters and on the batch, and whatever is dear. All others, such as masks, rotary tables
and casts of weights, are copied: each chunk computes those that it reads, so that they never cross a cut. Dear equations that read
parameters alone, and what follows from them, stand before the first equation that reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.ir.primitives import HEAVY
from spmdctx.pipeline.cut.inline import Opened, Region, opened_calls
from spmdctx.pipeline.cut.living import living
from spmdctx.pipeline.cut.scans import Tag, divided_scans, num_iterations
from spmdctx.rules.control_flow import CONTROL_FLOW, RECOMPUTED, bodies_of, opened


@dataclass(frozen=True)
class Line:
    """The equations of a loss in the order in which they are cut.

    A checkpointed region that mixes parameters and batch is opened, and a scan over stacked parameters is written one iteration at a time,
    so that a cut can lie inside.

    Attributes:
        jaxpr: the open program of the forward pass.
        consts: its constants.
        eqns: those on the line.
        copied: the equation that makes each value that chunks compute by themselves.
        crossing: for each equation but the last, the bytes of what is read behind it and made up to it. Inside of a checkpointed region
            they count twice, since what crosses there is kept, too.
        region_of: the region of each equation that was in one, by its identity.
        tag_of: what each equation is, whatever the lengths of scans.
        source_of: the identity of the equation of the given program from which each one comes, by its identity.
        opened: the program with its regions open and its scans whole.
        scans: the scans of the program that can be cut.
        is_parameter: one flag for each input of the loss.
    """

    jaxpr: Any
    consts: Sequence[Any]
    eqns: tuple[Any, ...]
    copied: dict[Any, Any]
    crossing: tuple[float, ...]
    region_of: Mapping[int, Region]
    tag_of: Mapping[int, Tag]
    source_of: Mapping[int, int]
    opened: Opened
    scans: tuple[Any, ...]
    is_parameter: tuple[bool, ...]

    @cached_property
    def _sizes(self) -> Counter[int]:
        """How many equations of each region stand on the line, by the region's identity."""
        return Counter(id(self.region_of[id(eqn)]) for eqn in self.eqns if id(eqn) in self.region_of)

    def is_whole(self, region: Region, run: Sequence[Any]) -> bool:
        """Returns whether a run of equations is all of its region that stands on the line."""
        return len(run) == self._sizes[id(region)]


def line_of(closed: jexc.ClosedJaxpr, is_parameter: Sequence[bool]) -> Line:
    """Returns the line of a program; `is_parameter` marks the inputs that stay on the devices of a stage from step to step."""
    mixing = _Reached(closed.jaxpr, is_parameter, closed.jaxpr.eqns)
    opened = living(opened_calls(closed, lambda eqn: eqn.primitive.name in RECOMPUTED and mixing.mixes(eqn)))
    flat = opened.closed.jaxpr
    reached = _Reached(flat, is_parameter, flat.eqns)
    scans = [eqn for eqn in flat.eqns if eqn.primitive.name == "scan" and reached.mixes(eqn) and _is_over_parameters(eqn, reached)]
    return _divided(opened, scans, [[1] * eqn.params["length"] for eqn in scans], is_parameter)


def joined_scans(line: Line, places: Sequence[int]) -> tuple[Line, list[int]]:
    """Returns a line whose scans have as few parts as its cuts allow, and the places of the cuts on it."""
    if not line.scans:
        return line, list(places)
    lengths = []
    for number, eqn in enumerate(line.scans):
        ends = [max((num_iterations(line.tag_of[id(own)], number) for own in line.eqns[: place + 1]), default=0) for place in places]
        bounds = sorted({0, *ends, eqn.params["length"]})
        lengths.append([last - first for first, last in pairwise(bounds)])
    found = _divided(line.opened, line.scans, lengths, line.is_parameter)
    place_of = {found.tag_of[id(own)]: place for place, own in enumerate(found.eqns)}
    tags = [line.tag_of[id(own)] for own in line.eqns]
    # What only the next part of a scan reads may stand before a cut.
    return found, [next(place_of[tag] for tag in reversed(tags[: place + 1]) if tag in place_of) for place in places]


def _divided(opened: Opened, scans: Sequence[Any], lengths: Sequence[Sequence[int]], is_parameter: Sequence[bool]) -> Line:
    parts = divided_scans(opened, scans, lengths)
    jaxpr = opened.closed.jaxpr.replace(eqns=parts.eqns)
    reached = _Reached(jaxpr, is_parameter, parts.eqns)
    main: list[Any] = []
    copied: dict[Any, Any] = {}
    early: dict[Any, Any] = {}
    for eqn in parts.eqns:
        if reached.mixes(eqn) or (is_dear(eqn) and id(eqn) in parts.region_of):
            main.append(eqn)
        elif is_dear(eqn) or not early.keys().isdisjoint(variables(eqn.invars)):
            early.update(dict.fromkeys(eqn.outvars, eqn))
        else:
            copied.update(dict.fromkeys(eqn.outvars, eqn))
    eqns = _in_line(main, early, copied, variables(jaxpr.outvars))
    return Line(
        jaxpr=jaxpr,
        consts=opened.closed.consts,
        eqns=tuple(eqns),
        copied=copied,
        crossing=tuple(_crossing(eqns, parts.region_of)),
        region_of=parts.region_of,
        tag_of=parts.tag_of,
        source_of=parts.source_of,
        opened=opened,
        scans=tuple(scans),
        is_parameter=tuple(is_parameter),
    )


class _Reached:
    """Which equations of a program depend on parameters and on the batch, directly or by what they read."""

    def __init__(self, jaxpr: Any, is_parameter: Sequence[bool], eqns: Sequence[Any]) -> None:
        self.parameter = {var for var, mark in zip(jaxpr.invars, is_parameter, strict=True) if mark}
        batch = {var for var, mark in zip(jaxpr.invars, is_parameter, strict=True) if not mark}
        on_line: set[Any] = set()
        self._mixing: set[int] = set()
        for eqn in eqns:
            operands = set(variables(eqn.invars))
            for reached in (self.parameter, batch):
                if not reached.isdisjoint(operands):
                    reached.update(eqn.outvars)
            mixes = not self.parameter.isdisjoint(operands) and not batch.isdisjoint(operands)
            if mixes or not on_line.isdisjoint(operands) or eqn.effects:
                self._mixing.add(id(eqn))
                on_line.update(eqn.outvars)

    def mixes(self, eqn: Any) -> bool:
        """Returns whether an equation depends on parameters and on the batch, or has an effect."""
        return id(eqn) in self._mixing


def _is_over_parameters(scan: Any, reached: _Reached) -> bool:
    """Returns whether each iteration of a scan reads parameters of its own."""
    first = sum(scan_counts(scan.params))
    return scan.params["length"] > 1 and not reached.parameter.isdisjoint(variables(scan.invars[first:])) and not scan.effects


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are variables."""
    return [atom for atom in atoms if not isinstance(atom, jexc.Literal)]


def is_array(var: Any) -> bool:
    """Returns whether a value is more than a scalar, so that it has a stage."""
    return math.prod(getattr(var.aval, "shape", ())) > 1


def needed(eqns: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the equations on which some variables depend, in order."""
    wanted, found = set(values), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(variables(eqn.invars))
    return found[::-1]


def is_dear(eqn: Any) -> bool:
    """Returns whether an equation is too dear to be computed by several chunks: it multiplies matrices, or may hold a loop."""
    if eqn.primitive.name in HEAVY or eqn.primitive.name in ("scan", "while"):
        return True
    return eqn.primitive.name in CONTROL_FLOW and any(is_dear(inner) for body in bodies_of(eqn.params) for inner in opened(body).eqns)


def num_bytes(var: Any) -> int:
    """Returns the bytes of a value; keys count as their words."""
    aval = var.aval
    return math.prod(getattr(aval, "shape", ())) * int(getattr(getattr(aval, "dtype", None), "itemsize", 8))


def _in_line(main: Sequence[Any], early: dict[Any, Any], copied: dict[Any, Any], results: Iterable[Any]) -> list[Any]:
    """Returns the main equations, with the dear ones that need nothing of them before their first readers."""
    eqns: list[Any] = []
    placed: set[int] = set()

    def place(atoms: Iterable[Any]) -> None:
        pending = list(variables(atoms))
        while pending:
            var = pending.pop()
            eqn = early.get(var)
            if eqn is None:
                eqn = copied.get(var)
                if eqn is not None and id(eqn) not in placed:
                    placed.add(id(eqn))
                    pending += variables(eqn.invars)
            elif id(eqn) not in placed:
                placed.add(id(eqn))
                place(eqn.invars)
                eqns.append(eqn)

    for eqn in main:
        place(eqn.invars)
        eqns.append(eqn)
    place(results)
    return eqns


def _crossing(eqns: Sequence[Any], region_of: Mapping[int, Region]) -> list[float]:
    """Returns the bytes that cross a cut behind each equation but the last; results of the program need not cross."""
    regions = [region_of.get(id(eqn)) for eqn in eqns]
    made: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for place, eqn in enumerate(eqns):
        for var in variables(eqn.invars):
            if var in made:
                last[var] = place
        made.update(dict.fromkeys(eqn.outvars, place))
    change = [0.0] * (len(eqns) + 1)
    for var, place in last.items():
        change[made[var]] += num_bytes(var)
        change[place] -= num_bytes(var)
    found, total = [], 0.0
    for place in range(len(eqns) - 1):
        total += change[place]
        is_inside = regions[place] is not None and regions[place] is regions[place + 1]
        found.append(2 * total if is_inside else total)
    return found

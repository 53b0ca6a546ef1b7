"""Puts the equations of a loss into one line, which can be cut between any two of them.

On the line stand the equations that depend on parameters and on the batch, and whatever is dear. All others, such as masks, rotary tables
and casts of weights, are copied: each chunk computes those that it reads, so that they never cross a cut. Dear equations that read
parameters alone, and what follows from them, stand before the first equation that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.ir.primitives import HEAVY
from spmdctx.rules.control_flow import CONTROL_FLOW, bodies_of, opened


class Line(NamedTuple):
    """The equations of a loss in the order in which they are cut.

    Attributes:
        jaxpr: the open program of the forward pass.
        consts: its constants.
        eqns: those on the line.
        copied: the equation that makes each value that chunks compute by themselves.
        crossing: for each equation but the last, the bytes of what is read behind it and made up to it.
    """

    jaxpr: Any
    consts: Sequence[Any]
    eqns: tuple[Any, ...]
    copied: dict[Any, Any]
    crossing: tuple[float, ...]


def line_of(closed: jexc.ClosedJaxpr, is_parameter: Sequence[bool]) -> Line:
    """Returns the line of a program; `is_parameter` marks the inputs that stay on the devices of a stage from step to step."""
    jaxpr = closed.jaxpr
    reads_parameter = {var for var, mark in zip(jaxpr.invars, is_parameter, strict=True) if mark}
    reads_batch = {var for var, mark in zip(jaxpr.invars, is_parameter, strict=True) if not mark}
    main: list[Any] = []
    copied: dict[Any, Any] = {}
    early: dict[Any, Any] = {}
    on_line: set[Any] = set()
    for eqn in jaxpr.eqns:
        operands = set(variables(eqn.invars))
        for reached in (reads_parameter, reads_batch):
            if not reached.isdisjoint(operands):
                reached.update(eqn.outvars)
        mixes = not reads_parameter.isdisjoint(operands) and not reads_batch.isdisjoint(operands)
        if mixes or not on_line.isdisjoint(operands) or eqn.effects:
            main.append(eqn)
            on_line.update(eqn.outvars)
        elif is_dear(eqn) or not early.keys().isdisjoint(operands):
            early.update(dict.fromkeys(eqn.outvars, eqn))
        else:
            copied.update(dict.fromkeys(eqn.outvars, eqn))
    eqns = _in_line(main, early, copied, variables(jaxpr.outvars))
    return Line(jaxpr, closed.consts, tuple(eqns), copied, tuple(_crossing(eqns)))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are variables."""
    return [atom for atom in atoms if not isinstance(atom, jexc.Literal)]


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


def _crossing(eqns: Sequence[Any]) -> list[float]:
    """Returns the bytes that cross a cut behind each equation but the last; results of the program need not cross."""
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
        found.append(total)
    return found

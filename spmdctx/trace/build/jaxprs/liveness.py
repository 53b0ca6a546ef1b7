"""Walks programs backwards, through calls, loops and branches: which equations run for some results, and what these read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spmdctx._compat import acts_outside, scan_counts
from spmdctx.rules.control_flow import CALLS, bodies_of, call_body, call_operands, opened

Flags = list[bool]

Reads = Callable[[Any, Sequence[bool]], Sequence[bool] | None]
"""Tells which operands an equation reads for its needed results; None where its bodies tell."""


class Inner(NamedTuple):
    """A body that an equation runs `runs` times: which of its results are needed, which operands it takes and which it reads."""

    jaxpr: Any
    needed: Sequence[bool]
    operands: Sequence[int]
    reads: Sequence[bool]
    runs: int = 1


class Liveness:
    """Finds what is alive: what a needed result depends on, and what runs for its own sake."""

    def __init__(self, runs_anyway: Callable[[Any], bool], reads: Reads) -> None:
        """Takes what tells of an equation that it runs whether or not its results are needed, and what it reads."""
        self._runs_anyway, self._reads = runs_anyway, reads

    def alive(self, jaxpr: Any, needed: Sequence[bool]) -> tuple[list[tuple[Any, Flags]], Flags]:
        """Returns the equations that are alive, each with its needed results, and the inputs that are needed."""
        wanted = {id(atom) for atom, is_needed in zip(jaxpr.outvars, needed, strict=True) if is_needed}
        alive = []
        for eqn in reversed(jaxpr.eqns):
            of_results = [id(var) in wanted for var in eqn.outvars]
            if any(of_results) or self._runs_anyway(eqn):
                alive.append((eqn, of_results))
                wanted.update(id(atom) for atom, is_read in zip(eqn.invars, self._read(eqn, of_results), strict=True) if is_read)
        return alive[::-1], [id(var) in wanted for var in jaxpr.invars]

    def _read(self, eqn: Any, needed: Flags) -> Sequence[bool]:
        own = self._reads(eqn, needed)
        if own is not None:
            return own
        inside = self.inner(eqn, needed)
        taken = {place for one in inside for place in one.operands}
        read = [place not in taken for place in range(len(eqn.invars))]
        for one in inside:
            for place, is_read in zip(one.operands, one.reads, strict=True):
                read[place] |= is_read
        return read

    def inner(self, eqn: Any, needed: Flags) -> list[Inner]:
        """Returns the bodies that an equation runs; those of no call, loop or branch take no operands as they are."""
        name, params = eqn.primitive.name, eqn.params
        every = range(len(eqn.invars))
        if name == "scan":
            return [self._repeated(opened(params["jaxpr"]), needed, every, *scan_counts(params), int(params["length"]))]
        if name == "while":
            num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
            # The test decides on all results, and on what the body does beside them.
            test = self._once(params["cond_jaxpr"], [any(needed) or acts_outside(eqn)], [*every[:num_test], *every[num_test + num_body :]])
            wanted = [own or tested for own, tested in zip(needed, test.reads[num_test:], strict=True)]
            return [test, self._repeated(opened(params["body_jaxpr"]), wanted, every[num_test:], num_body, len(needed))]
        if name == "cond":
            return [self._once(branch, needed, every[1:]) for branch in params["branches"]]
        if name in CALLS:
            body, taken = call_body(name, params), call_operands(name, params, len(every))
            if len(opened(body).invars) == len(taken):
                return [self._once(body, needed, taken)]
        return [Inner(body, [True] * len(body.outvars), (), ()) for body in map(opened, bodies_of(params))]

    def _once(self, body: Any, needed: Flags, operands: Sequence[int]) -> Inner:
        jaxpr = opened(body)
        return Inner(jaxpr, needed, operands, self.alive(jaxpr, needed)[1])

    def _repeated(self, body: Any, needed: Flags, operands: Sequence[int], num_consts: int, num_carried: int, runs: int = 1) -> Inner:
        """Returns the body of a loop: what it carries is needed also if the next iteration reads it for other results."""
        while True:
            read = self.alive(body, needed)[1]
            carried = [own or again for own, again in zip(needed, read[num_consts : num_consts + num_carried], strict=False)]
            if carried == needed[:num_carried]:
                return Inner(body, needed, operands, [*read[:num_consts], *carried, *read[num_consts + num_carried :]], runs)
            needed = [*carried, *needed[num_carried:]]

"""The programs of the chunks into which a line of equations is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.pipeline.cut.line import Line, variables
from spmdctx.pipeline.cut.regions import closed_regions


class Chunk(NamedTuple):
    """A part of the forward pass.

    Attributes:
        program: takes the chunk's leaves, then what enters; gives what leaves, then its results.
        leaves: the inputs of the loss that it reads, by number.
        entering: what chunks before it hand over, for itself or for later ones.
        leaving: what it hands to the next chunk.
        results: the results of the loss that it makes, by number.
    """

    program: jexc.ClosedJaxpr
    leaves: tuple[int, ...]
    entering: tuple[Any, ...]
    leaving: tuple[Any, ...]
    results: tuple[int, ...]


def chunks_of(line: Line, places: Sequence[int], carried: Mapping[int, int] = MappingProxyType({})) -> list[Chunk]:
    """Returns the chunks of a line that is cut behind the equations `places`.

    A result of the loss belongs to the chunk that computes it. A leaf that is a result belongs to the first chunk that reads it, and what
    no chunk computes or reads to the last one. The next value of a leaf that takes no equation of the line, as the count of a stream of
    keys, is computed by each chunk that reads the leaf.

    Args:
        line: the line, each scan in as few parts as its cuts allow (`joined_scans`).
        places: the numbers of the last equations before the cuts.
        carried: for leaves that one micro-batch takes from the one before, the results that are their next values.
    """
    bounds = [0, *(place + 1 for place in places), len(line.eqns)]
    made = {var: place for place, eqn in enumerate(line.eqns) for var in eqn.outvars}
    last_read: dict[Any, int] = {}
    for place, eqn in enumerate(line.eqns):
        last_read.update(dict.fromkeys((var for var in variables(eqn.invars) if var in made), place))
    last_chunk = len(bounds) - 2
    owner_of: dict[int, int] = {}
    found: list[Chunk] = []
    passed = {index for index, atom in enumerate(line.jaxpr.outvars) if not isinstance(atom, jexc.Literal) and atom not in made}
    leaf_of = {var: index for index, var in enumerate(line.jaxpr.invars)}
    for number, (first, last) in enumerate(pairwise(bounds)):
        entering = tuple(var for var, place in last_read.items() if made[var] < first <= place)
        leaving = tuple(var for var, place in last_read.items() if made[var] < last <= place)
        results = [
            index
            for index, atom in enumerate(line.jaxpr.outvars)
            if index not in passed and (number == last_chunk if isinstance(atom, jexc.Literal) else first <= made[atom] < last)
        ]
        found.append(_chunk(line, line.eqns[first:last], entering, leaving, results))
        for leaf in found[-1].leaves:
            owner_of.setdefault(leaf, number)
    for number, chunk in enumerate(found):
        alone = [result for leaf, result in carried.items() if leaf in chunk.leaves and result in passed]
        own = [index for index in passed if owner_of.get(leaf_of.get(line.jaxpr.outvars[index], -1), last_chunk) == number]
        more = sorted({*alone, *own} - set(chunk.results))
        if more:
            eqns = line.eqns[bounds[number] : bounds[number + 1]]
            found[number] = _chunk(line, eqns, chunk.entering, chunk.leaving, [*chunk.results, *more])
    return found


def _chunk(line: Line, eqns: Sequence[Any], entering: tuple[Any, ...], leaving: tuple[Any, ...], results: Sequence[int]) -> Chunk:
    outvars = [*leaving, *(line.jaxpr.outvars[index] for index in results)]
    eqns = closed_regions(
        eqns, outvars, line.region_of, line.is_whole, lambda run: _copies(line, (atom for eqn in run for atom in eqn.invars))
    )
    own = [*_copies(line, [*(atom for eqn in eqns for atom in eqn.invars), *outvars]), *eqns]
    read = {var for eqn in own for var in variables(eqn.invars)} | set(variables(outvars))
    leaves = tuple(index for index, var in enumerate(line.jaxpr.invars) if var in read)
    consts = [(var, value) for var, value in zip(line.jaxpr.constvars, line.consts, strict=True) if var in read]
    jaxpr = line.jaxpr.replace(
        constvars=[var for var, _ in consts],
        invars=[*(line.jaxpr.invars[index] for index in leaves), *entering],
        outvars=outvars,
        eqns=own,
        effects=frozenset().union(*(eqn.effects for eqn in own)),
        debug_info=line.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return Chunk(jexc.ClosedJaxpr(jaxpr, [value for _, value in consts]), leaves, entering, leaving, tuple(results))


def _copies(line: Line, atoms: Iterable[Any]) -> list[Any]:
    """Returns the equations that a chunk computes by itself, each after those that it reads."""
    found: dict[int, Any] = {}

    def pull(atom: Any) -> None:
        eqn = line.copied.get(atom) if not isinstance(atom, jexc.Literal) else None
        if eqn is not None and id(eqn) not in found:
            for operand in eqn.invars:
                pull(operand)
            found[id(eqn)] = eqn

    for atom in atoms:
        pull(atom)
    return list(found.values())

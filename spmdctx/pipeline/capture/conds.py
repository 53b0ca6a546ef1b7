"""Divides conditionals after the loss, such as one around a whole optimizer, so that each stage takes the branches of its own arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import is_array, variables


def divided(eqns: Iterable[Any]) -> list[Any]:
    """Returns equations in which each `cond` without effects is one for each group of results that share no array in any branch.

    A scalar that follows from scalars alone is computed in each group that reads it.
    """
    return [own for eqn in eqns for own in (_parts(eqn) if eqn.primitive.name == "cond" and not eqn.effects else [eqn])]


def _parts(eqn: Any) -> list[Any]:
    branches = [inlined(branch) for branch in eqn.params["branches"]]
    groups = _groups(len(eqn.outvars), branches)
    return [_part(eqn, branches, group) for group in groups] if len(groups) > 1 else [eqn]


def _groups(count: int, branches: Sequence[jexc.ClosedJaxpr]) -> list[list[int]]:
    """Returns the results of a conditional, by number, in groups that need not be computed together."""
    sets = _Sets()
    for number, branch in enumerate(branches):
        body = branch.jaxpr
        # What makes each value that arrays lead to; operands are made by nobody.
        maker: dict[Any, Hashable] = {}
        arrays = {var for var in (*body.invars, *body.constvars) if is_array(var)}
        for place, eqn in enumerate(body.eqns):
            operands = variables(eqn.invars)
            if any(is_array(var) for var in eqn.outvars) or any(var in maker or var in arrays for var in operands):
                maker.update(dict.fromkeys(eqn.outvars, (number, place)))
                for var in operands:
                    if var in maker:
                        sets.join((number, place), maker[var])
        for index, atom in enumerate(body.outvars):
            if not isinstance(atom, jexc.Literal) and atom in maker:
                sets.join(index, maker[atom])
    found: dict[Hashable, list[int]] = {}
    for index in range(count):
        found.setdefault(sets.root(index), []).append(index)
    return list(found.values())


class _Sets:
    """Disjoint sets of anything."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def root(self, own: Hashable) -> Hashable:
        """Returns what stands for the set of something."""
        while (above := self._above.get(own, own)) != own:
            self._above[own] = self._above.get(above, above)
            own = above
        return own

    def join(self, one: Hashable, other: Hashable) -> None:
        """Makes one set of two."""
        self._above[self.root(one)] = self.root(other)


def _part(eqn: Any, branches: Sequence[jexc.ClosedJaxpr], group: Sequence[int]) -> Any:
    """Returns a conditional of some of the results, with the operands that they need in any branch."""
    needed = [_needed(branch.jaxpr, group) for branch in branches]
    places = [
        place
        for place in range(len(eqn.invars) - 1)
        if any(branch.jaxpr.invars[place] in wanted for branch, (wanted, _) in zip(branches, needed, strict=True))
    ]
    own = []
    for branch, (wanted, eqns) in zip(branches, needed, strict=True):
        body = branch.jaxpr
        consts = [(var, value) for var, value in zip(body.constvars, branch.consts, strict=True) if var in wanted]
        jaxpr = body.replace(
            constvars=[var for var, _ in consts],
            invars=[body.invars[place] for place in places],
            outvars=[body.outvars[index] for index in group],
            eqns=eqns,
            debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
        )
        own.append(jexc.ClosedJaxpr(jaxpr, [value for _, value in consts]))
    index, *operands = eqn.invars
    params = {**eqn.params, "branches": tuple(own)}
    return eqn.replace(
        invars=[index, *(operands[place] for place in places)], outvars=[eqn.outvars[number] for number in group], params=params
    )


def _needed(body: Any, group: Sequence[int]) -> tuple[set[Any], list[Any]]:
    """Returns the values on which some results of a branch depend, and the equations that make them."""
    wanted, eqns = set(variables(body.outvars[index] for index in group)), []
    for eqn in reversed(body.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            wanted.update(variables(eqn.invars))
    return wanted, eqns[::-1]

"""Divides conditionals after the loss, such as one around a whole optimizer, so that each stage takes the branches of its own arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import is_array, variables
from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.trace.build.jaxprs.equations import written


def divided(eqns: Iterable[Any]) -> tuple[list[Any], int]:
    """Returns equations in which each `cond` without effects is one for each group of results that share no array in any branch.

    A scalar that follows from scalars alone is computed in each group that reads it. Where one that follows from arrays, such as a global
    norm, is all that holds a group together, all branches are computed, and their results selected; the second result counts these.
    """
    found: list[Any] = []
    num_selected = 0
    for eqn in eqns:
        if eqn.primitive.name == "cond" and not eqn.effects:
            parts, is_selected = _parts(eqn)
            found += parts
            num_selected += is_selected
        else:
            found.append(eqn)
    return found, num_selected


def _parts(eqn: Any) -> tuple[list[Any], bool]:
    """Returns what a conditional is divided into, and whether all branches of some part are computed."""
    branches = [inlined(branch) for branch in eqn.params["branches"]]
    groups = _groups(len(eqn.outvars), branches)
    apart = [[index for index in own if is_array(eqn.outvars[index])] for own in _groups(len(eqn.outvars), branches, ignores_scalars=True)]
    can_select = not any(branch.consts or _may_run_on(branch.jaxpr) for branch in branches)
    found: list[Any] = []
    is_selected = False
    for group in groups:
        if can_select and sum(not set(own).isdisjoint(group) for own in apart) > 1:
            found += _selected(_part(eqn, branches, group))
            is_selected = True
        else:
            found.append(_part(eqn, branches, group) if len(groups) > 1 else eqn)
    return found, is_selected


def _may_run_on(jaxpr: Any) -> bool:
    """Returns whether a branch has a loop that may not end where the branch is not taken."""
    return any(eqn.primitive.name == "while" or any(_may_run_on(opened(body)) for body in bodies_of(eqn.params)) for eqn in jaxpr.eqns)


def _selected(eqn: Any) -> list[Any]:
    """Returns the equations of all branches of a conditional, and of the selection of its results."""

    def run(index: Any, *operands: Any) -> list[Any]:
        made = [jexc.jaxpr_as_fun(branch)(*operands) for branch in eqn.params["branches"]]
        return [jax.lax.select_n(index, *cases) for cases in zip(*made, strict=True)]

    eqns, atoms = written(run, eqn.invars, eqn.source_info)
    names = dict(zip(atoms, eqn.outvars, strict=True))
    return [own.replace(outvars=[names.get(var, var) for var in own.outvars]) for own in eqns]


def _groups(count: int, branches: Sequence[jexc.ClosedJaxpr], *, ignores_scalars: bool = False) -> list[list[int]]:
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
                    if var in maker and (is_array(var) or not ignores_scalars):
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

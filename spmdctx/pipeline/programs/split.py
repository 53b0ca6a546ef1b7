"""Splits a backward pass in two: the gradients of inputs, which the chunk before waits for, and those of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram, slots
from spmdctx.pipeline.schedule.tasks import Kind


def split_backward(backward: TaskProgram) -> tuple[TaskProgram, TaskProgram]:
    """Returns the two parts, which compute nothing twice; the second reads what the first links to it.

    A checkpointed region is one equation of the backward pass: the first part computes it whole, and adds its gradients to their sums.
    """
    closed = inlined(backward.jaxpr)
    body = closed.jaxpr
    made = dict(zip(backward.outputs, body.outvars, strict=True))
    early = _made_early(body, made)
    first = _needed(body.eqns, [atom for slot, atom in made.items() if slot.holds is not Holds.SUM or slot in early])
    sums = [(slot, atom) for slot, atom in made.items() if slot.holds is Holds.SUM and slot not in early]
    second = _needed([eqn for eqn in body.eqns if id(eqn) not in set(map(id, first))], [atom for _, atom in sums])
    wanted = [*(atom for eqn in second for atom in eqn.invars), *(atom for _, atom in sums)]
    in_first = {var for eqn in first for var in eqn.outvars}
    links = list(dict.fromkeys(var for var in variables(wanted) if var in in_first))
    numbers = range(len(links))
    results = [(slot, atom) for slot, atom in made.items() if slot.holds is not Holds.SUM or slot in early]
    one = _program(backward, closed, Kind.INPUT, first, [*results, *zip(slots(Holds.LINK, numbers), links, strict=True)], [])
    other = _program(backward, closed, Kind.WEIGHT, second, sums, list(zip(slots(Holds.LINK, numbers), links, strict=True)))
    return one, other


def _made_early(body: Any, made: Mapping[Slot, Any]) -> set[Slot]:
    """Returns the sums to which gradients are added that the first part makes anyway, so that nothing but additions is left of them."""
    first = {var for eqn in _needed(body.eqns, [atom for slot, atom in made.items() if slot.holds is not Holds.SUM]) for var in eqn.outvars}
    maker = {var: eqn for eqn in body.eqns for var in eqn.outvars}

    def is_early(atom: Any) -> bool:
        waiting, in_first = list(variables([atom])), False
        while waiting:
            var = waiting.pop()
            in_first |= var in first
            if var not in first and var in maker:
                if maker[var].primitive.name not in _ADDING_UP:
                    return False
                waiting += variables(maker[var].invars)
        return in_first

    return {slot for slot, atom in made.items() if slot.holds is Holds.SUM and is_early(atom)}


_ADDING_UP = frozenset({"add", "add_any", "convert_element_type"})
"""Equations by which a gradient is added to its sum."""


def _needed(eqns: Sequence[Any], atoms: Iterable[Any]) -> list[Any]:
    """Returns the equations on which some atoms depend, in order."""
    wanted, found = set(variables(atoms)), []
    for eqn in reversed(eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(variables(eqn.invars))
    return found[::-1]


def _program(
    backward: TaskProgram, closed: jexc.ClosedJaxpr, kind: Kind, eqns: Sequence[Any], outputs: Sequence[Any], links: Sequence[Any]
) -> TaskProgram:
    """Returns a part of the backward pass, with the operands that it reads."""
    body = closed.jaxpr
    read = {var for eqn in eqns for var in variables(eqn.invars)} | set(variables(atom for _, atom in outputs))
    inputs = [(slot, var) for slot, var in zip(backward.inputs, body.invars, strict=True) if var in read]
    consts = [(var, value) for var, value in zip(body.constvars, closed.consts, strict=True) if var in read]
    jaxpr = body.replace(
        constvars=[var for var, _ in consts],
        invars=[var for _, var in (*inputs, *links)],
        outvars=[atom for _, atom in outputs],
        eqns=list(eqns),
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    own = jexc.ClosedJaxpr(jaxpr, [value for _, value in consts])
    return TaskProgram(kind, own, tuple(slot for slot, _ in (*inputs, *links)), tuple(slot for slot, _ in outputs))

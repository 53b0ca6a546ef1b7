"""Traces operands of a compiled program back through copies and fusions to the ops that made them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spmdctx.audit.hlo import Computation, Instruction, Module

_SAME_ELEMENTS = ("copy", "bitcast", "reshape", "convert", "transpose", "copy-start", "copy-done", "optimization-barrier")
_MAX_STEPS = 64
_MAX_TERMS = 256


@dataclass(frozen=True)
class Scope:
    """A computation as one caller runs it; `call` is the instruction of `caller` that does, None for entry and loop bodies."""

    computation: Computation
    caller: Scope | None = None
    call: Instruction | None = None


class Place(NamedTuple):
    """An instruction in its scope."""

    instruction: Instruction
    scope: Scope


def operands(place: Place) -> Iterator[Place]:
    """Yields the instructions that the one at `place` reads."""
    for name in place.instruction.operands:
        yield Place(place.scope.computation.instructions[name], place.scope)


def trail(place: Place, module: Module) -> Iterator[Place]:
    """Yields `place`, then each instruction from which its value was copied; the last is the op that made the value."""
    for _ in range(_MAX_STEPS):
        yield place
        before = _before(place, module)
        if before is None:
            return
        place = before


def terms(place: Place, module: Module) -> int:
    """Counts the values that are added up to make the one at `place`."""
    pending = [place]
    count = 0
    while pending and count < _MAX_TERMS:
        *_, maker = trail(pending.pop(), module)
        if maker.instruction.opcode == "add":
            pending += operands(maker)
        else:
            count += 1
    return count


def parts(place: Place, module: Module) -> list[Place]:
    """Returns the tensors that the compiler concatenates to make the one at `place`, or that one alone.

    Concatenations of the program, and those of the pieces of an all_to_all, have the name of their op: they are one tensor.
    """
    *_, maker = trail(place, module)
    made = maker.instruction
    return list(operands(maker)) if made.opcode == "concatenate" and "op_name=" not in made.attributes else [place]


def source(place: Place, module: Module) -> str:
    """Returns the source line of the nearest op on the trail that has one, or ""."""
    return next((found for found in (module.source(one.instruction) for one in trail(place, module)) if found), "")


def _before(place: Place, module: Module) -> Place | None:
    instruction, scope = place
    if instruction.opcode in _SAME_ELEMENTS:
        return next(operands(place), None)
    if instruction.opcode == "parameter" and scope.call is not None and scope.caller is not None:
        number = int(instruction.arguments)
        name = scope.call.operands[number] if number < len(scope.call.operands) else ""
        found = scope.caller.computation.instructions.get(name)
        return Place(found, scope.caller) if found else None
    if instruction.opcode == "fusion":
        root = _root(place, module)
        return root if root and root.instruction.opcode != "tuple" else None
    return _element(place, module) if instruction.opcode == "get-tuple-element" else None


def _element(place: Place, module: Module) -> Place | None:
    """Returns the element that a get-tuple-element picks, or None if the op that makes its tuple cannot be found."""
    index = re.search(r"index=(\d+)", place.instruction.attributes)
    whole = next(operands(place), None)
    if whole is not None and whole.instruction.opcode == "fusion":
        whole = _root(whole, module)
    if index is None or whole is None or whole.instruction.opcode != "tuple":
        return None
    return list(operands(whole))[int(index.group(1))]


def _root(place: Place, module: Module) -> Place | None:
    for name in place.instruction.callees("calls"):
        called = module.computations[name]
        return Place(called.root, Scope(called, place.scope, place.instruction)) if called.root else None
    return None

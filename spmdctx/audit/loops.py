"""Finds how often the body of a compiled while loop runs: from the compiler's count, or from the loop's condition."""

from __future__ import annotations

import re

from spmdctx.audit.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=([A-Z]{2})")
_SAME_NUMBER = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction, caller: Computation, module: Module) -> int | None:
    """Returns the iterations of the while instruction `loop` of `caller`, or None if they depend on data."""
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations.get("".join(loop.callees("condition")[:1]))
    body = module.computations.get("".join(loop.callees("body")[:1]))
    if condition is None or body is None or condition.root is None:
        return None
    test = _read_test(condition, condition.root, module)
    if test is None:
        return None
    index, bound, direction = test
    start = _initial(caller, loop, index)
    step = _step(body, index)
    return None if start is None or step is None else _iterations(start, bound, step, direction)


def _iterations(start: int, bound: int, step: int, direction: str) -> int | None:
    if step == 0 or (step > 0) is (direction in ("GT", "GE")):
        return None
    reach = bound + (1 if direction == "LE" else -1 if direction == "GE" else 0)
    return max(0, -((start - reach) // step))


def _read_test(condition: Computation, root: Instruction, module: Module) -> tuple[int, int, str] | None:
    """Reads `counter < bound`; returns the counter's index in the loop's state, the bound, and the direction."""
    inner, arguments = condition, {}
    if root.opcode == "fusion":
        called = module.computations.get("".join(root.callees("calls")[:1]))
        if called is None or called.root is None:
            return None
        arguments = dict(zip(called.parameters, root.operands, strict=False))
        inner, root = called, called.root
    found = _DIRECTION.search(root.attributes)
    if root.opcode != "compare" or found is None or len(root.operands) != 2:
        return None
    sides = [_counter_or_constant(inner, condition, name, arguments) for name in root.operands]
    left, right = sides
    direction = found.group(1)
    if left is None or right is None or direction not in _MIRRORED or left[0] == right[0]:
        return None
    return (left[1], right[1], direction) if left[0] else (right[1], left[1], _MIRRORED[direction])


def _counter_or_constant(inner: Computation, outer: Computation, name: str, arguments: dict[str, str]) -> tuple[bool, int] | None:
    """Returns (True, index) for an element of the loop's state, or (False, number) for a constant."""
    found = _follow(inner, name)
    if found is not None and found.opcode == "parameter" and found.name in arguments:
        found = _follow(outer, arguments[found.name])
    if found is None:
        return None
    if found.opcode == "get-tuple-element":
        return True, _tuple_index(found)
    number = _number(found)
    return None if number is None else (False, number)


def _initial(caller: Computation, loop: Instruction, index: int) -> int | None:
    """Returns the start of the counter; 0 if the compiler computes it elsewhere, as in loops over a known range."""
    state = caller.instructions.get(loop.operands[0]) if loop.operands else None
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return 0
    found = _follow(caller, state.operands[index])
    number = None if found is None else _number(found)
    return 0 if number is None else number


def _step(body: Computation, index: int) -> int | None:
    """Returns how much one iteration adds to the counter, or 1 if the addition is inside a fusion."""
    root = body.root
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return 1
    found = _follow(body, root.operands[index])
    if found is None or found.opcode not in ("add", "subtract"):
        return 1
    terms = [_follow(body, name) for name in found.operands]
    numbers = [number for number in (None if term is None else _number(term) for term in terms) if number is not None]
    if len(numbers) != 1:
        return None
    return numbers[0] if found.opcode == "add" else -numbers[0]


def _follow(computation: Computation, name: str) -> Instruction | None:
    """Returns the instruction behind copies."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in _SAME_NUMBER and found.operands:
        found = computation.instructions.get(found.operands[0])
    return found


def _number(instruction: Instruction) -> int | None:
    text = instruction.arguments.strip()
    return int(text) if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", text) else None


def _tuple_index(instruction: Instruction) -> int:
    found = re.search(r"index=(\d+)", instruction.attributes)
    return int(found.group(1)) if found else 0

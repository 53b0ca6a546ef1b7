"""Reads the text of a compiled HLO module: computations, instructions, shapes and source lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from spmdctx.ir.graph import item_bytes
from spmdctx.wording import file_text, is_framework, is_own

_DTYPE_OF_HLO = {
    "pred": "bool",
    "s2": "int2",
    "u2": "uint2",
    "s4": "int4",
    "u4": "uint4",
    "s8": "int8",
    "u8": "uint8",
    "s16": "int16",
    "u16": "uint16",
    "f16": "float16",
    "bf16": "bfloat16",
    "s32": "int32",
    "u32": "uint32",
    "f32": "float32",
    "s64": "int64",
    "u64": "uint64",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}
_NARROW_FLOAT = re.compile(r"f([468])(e\d+m\d+\w*)")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Leaf(NamedTuple):
    """One array of an HLO shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * item_bytes(self.dtype)


def read_leaves(text: str) -> tuple[Leaf, ...]:
    """Returns the arrays of an HLO shape with tuples flattened; tokens and other opaque parts hold none."""
    found = _SHAPE.findall(text)
    return tuple(Leaf(_dtype(name), tuple(int(size) for size in dims.split(",") if size)) for name, dims in found if name != "token")


def _dtype(name: str) -> str:
    narrow = _NARROW_FLOAT.fullmatch(name)
    return _DTYPE_OF_HLO.get(name) or (f"float{narrow[1]}_{narrow[2]}" if narrow else name)


class Instruction(NamedTuple):
    """One instruction: the text of its result shape, operand names, and everything after the operands."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Arrays of the result."""
        return read_leaves(self.shape)

    def callees(self, key: str) -> tuple[str, ...]:
        """Returns the computations named by the attribute `key`, one or a braced list."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        if found is None:
            return ()
        text = found.group(1)
        return tuple(_NAME.findall(text)) or tuple(part.strip() for part in text.strip("{}").split(",") if part.strip())


@dataclass(frozen=True)
class Computation:
    """One computation, its instructions by name in printed order."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction whose result is the computation's."""
        return next((one for one in self.instructions.values() if one.is_root), None)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, by number."""
        own = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return tuple(one.name for one in sorted(own, key=lambda one: int(one.arguments)))


@dataclass(frozen=True)
class Module:
    """A compiled module."""

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    locations: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    def source(self, instruction: Instruction, *, of_users: bool = False) -> str:
        """Returns `file.py:line` of the innermost frame outside of frameworks and of this package, or "" if the compiler kept none.

        Where all frames are theirs it is the innermost of these, or "" if only lines of users are asked for.
        """
        found = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        if found is None:
            plain = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
            return f"{file_text(plain.group(1))}:{plain.group(2)}" if plain else ""
        stack = list(self._stack(int(found.group(1))))
        own = [place for place in stack if not is_framework(place[0]) and not is_own(place[0])] or ([] if of_users else stack)
        return f"{file_text(own[0][0])}:{own[0][1]}" if own else ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        # Printed parents are one too high: the root frame 1 is printed with parent 1, where 0 means none.
        shift = 1 if self.frames.get(1, (0, 0))[1] == 1 else 0
        while frame in self.frames:
            location, parent = self.frames[frame]
            if location in self.locations:
                yield self.locations[location]
            if parent - shift >= frame:
                return
            frame = parent - shift


def read_module(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    header: dict[str, list[str]] = {table: [] for table in _TABLES}
    computations: dict[str, Computation] = {}
    entry = ""
    table = ""
    current: dict[str, Instruction] | None = None
    pending = ""
    for line in text.splitlines():
        if current is not None:
            is_end = _END.match(line) is not None and _is_closed(pending)
            if not is_end and _INSTRUCTION.match(line) is None:
                pending += "\n" + line  # kernels bring attributes of several lines
                continue
            if (instruction := read_instruction(pending)) is not None:
                current[instruction.name] = instruction
            pending, current = ("", None) if is_end else (line, current)
        elif line in header:
            table = line
        elif (opened := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = {}
            name = opened.group(2)
            computations[name] = Computation(name, current)
            entry = name if opened.group(1) else entry
        elif table and line:
            header[table].append(line)
    return Module(computations, entry, _read_frames(header["StackFrames"]), _read_locations(header))


def _is_closed(text: str) -> bool:
    """Returns whether each brace outside of strings is closed."""
    bare = _STRING.sub("", text)
    return bare.count("{") <= bare.count("}")


def _read_frames(lines: list[str]) -> dict[int, tuple[int, int]]:
    found = (_FRAME.match(line) for line in lines)
    return {int(one.group(1)): (int(one.group(2)), int(one.group(3) or 0)) for one in found if one}


def _read_locations(header: Mapping[str, list[str]]) -> dict[int, tuple[str, int]]:
    files = {int(one.group(1)): one.group(2) for one in map(_FILE.match, header["FileNames"]) if one}
    found = (_LOCATION.match(line) for line in header["FileLocations"])
    return {int(one.group(1)): (files.get(int(one.group(2)), ""), int(one.group(3))) for one in found if one}


def read_instruction(line: str) -> Instruction | None:
    """Reads the lines of one instruction; None where they hold none."""
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    at = start.end()
    shape_end = _closing(line, at) + 1 if line[at] == "(" else line.find(" ", at)
    opcode = _OPCODE.match(line, shape_end)
    if shape_end < 0 or opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    operands = tuple(_NAME.findall(arguments))
    return Instruction(start.group(2), opcode.group(1), line[at:shape_end], operands, arguments, line[close + 1 :], bool(start.group(1)))


def _closing(text: str, at: int) -> int:
    """Returns the index of the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(text)

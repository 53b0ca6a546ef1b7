"""Origins of ops: name scope and source line, read from JAX's source info only on demand."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple, overload

from jax.extend import source_info_util

from spmdctx.ir.graph import Origin
from spmdctx.trace.build.program import Program
from spmdctx.wording import PACKAGE, file_text, is_framework, is_own

_REGION = re.compile(r"\bshard\d+:")
_FRAME = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?::\d+)? (?P<function>\(.*\))")
_TRANSFORMS = re.compile(r"\w+\(|\)")
_FRAME_COUNTS = (8, 128)
"""How many frames to read in search of the user's own; most lie near, and each read frame costs time."""

_CALLED = tuple(f"{PACKAGE}{place}" for place in ("gradients/", "ops/", "shard/", "pipeline/capture/", "server/", "trace/marker.py"))
"""What a step calls inside: above its frames are the user's."""

DIFFERENTIATED = "jvp("
"""Part of the name scope of every op of a differentiated function, also of its backward pass."""

_LOSS = re.compile(re.escape(DIFFERENTIATED))


class Place(NamedTuple):
    """JAX's source info of an equation, and the place of the call or loop around it."""

    info: Any
    caller: Place | None


class Frame(NamedTuple):
    """The surroundings of ops: the call or loop, the name scope of the enclosing calls, the computation, and how often it runs."""

    caller: Place | None
    prefix: str
    scope: int
    repeats: int


class LazyOrigins(Sequence[Origin]):
    """Origins of ops: JAX's source info of each, and the number of its frame; `home` is the line where no line of the user's made one."""

    def __init__(self, infos: Sequence[Any], frames: Sequence[Frame], frame_of: Sequence[int], home: str = "") -> None:
        self._infos = infos
        self._home = home
        self._frames = frames
        self._frame_of = frame_of
        # Unrolled layers come from the same lines, and ops of one scope share its name stack.
        self._lines: dict[Any, str] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._known: dict[int, Origin] = {}

    def __len__(self) -> int:
        return len(self._infos)

    @overload
    def __getitem__(self, index: int) -> Origin: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Origin]: ...
    def __getitem__(self, index: int | slice) -> Origin | Sequence[Origin]:
        if isinstance(index, slice):
            return [self[item] for item in range(*index.indices(len(self)))]
        known = self._known.get(index)
        if known is None:
            place = Place(self._infos[index], self._frames[self._frame_of[index]].caller)
            name, source = self._name(index), self._source(place) or self._home
            scope = scope_path(name)
            known = self._known[index] = Origin(name, f"{source[:-1]} in {scope})" if scope and source.endswith(")") else source)
        return known

    def _name(self, index: int) -> str:
        prefix, stack = self._frames[self._frame_of[index]].prefix, self._infos[index].name_stack
        name = self._names.get((prefix, id(stack)))
        if name is None:
            name = "/".join(part for part in (prefix, str(stack)) if part)
            # Region numbers depend on what was traced before in this process.
            name = self._names[prefix, id(stack)] = _REGION.sub("shard:", name)
        return name

    def _source(self, place: Place) -> str:
        """Returns the source line; ops of JAX's own jitted functions have none and get the caller's."""
        line = self._lines.get(place.info.traceback)
        if line is None:
            line = self._lines[place.info.traceback] = source_line(place.info)
        return line if line or place.caller is None else self._source(place.caller)

    def inside_regions(self) -> frozenset[int]:
        """Returns the indices of the ops that were traced inside a `shard()` region, including their backward ops."""
        return self.named(_REGION)

    def named(self, pattern: re.Pattern[str]) -> frozenset[int]:
        """Returns the indices of the ops in whose name scope a pattern is found."""
        # Ops traced in one scope share its name stack, so that few have to be written out.
        stacks = [info.name_stack for info in self._infos]
        keys = list(zip(self._frame_of, map(id, stacks), strict=True))
        known = {
            (frame, name): pattern.search(f"{self._frames[frame].prefix}/{stack}") is not None
            for (frame, name), stack in dict(zip(keys, stacks, strict=True)).items()
        }
        return frozenset([index for index, key in enumerate(keys) if known[key]])

    def select(self, indices: Sequence[int]) -> LazyOrigins:
        """Returns the origins of some of the ops, in the given order."""
        infos, frame_of = [self._infos[index] for index in indices], [self._frame_of[index] for index in indices]
        return LazyOrigins(infos, self._frames, frame_of, self._home)

    def at(self, home: str) -> LazyOrigins:
        """Returns the same origins, where ops that no line of the user's makes come from the line `home`."""
        return LazyOrigins(self._infos, self._frames, self._frame_of, home)


@lru_cache(maxsize=4096)
def scope_path(name: str) -> str:
    """Returns the named scopes in an op's name, which are the modules in flax.linen, without transformations and regions."""
    parts = [
        part for part in _TRANSFORMS.sub("", name).split("/") if part not in ("", "rematted_computation") and not part.startswith("shard:")
    ]
    for length in range(len(parts) // 2, 0, -1):
        if parts[:length] == parts[length : 2 * length]:  # a recomputed body repeats the scopes around it
            parts = parts[length:]
            break
    return "/".join(parts)


def differentiated_ops(program: Program) -> frozenset[int]:
    """Returns the ops of differentiated functions and of their gradients, with the user's own shard_maps, which may hold some."""
    origins = program.graph.origins
    if not isinstance(origins, LazyOrigins):
        return frozenset()
    return origins.named(_LOSS) | {region.op for region in program.manual if region.op >= 0}


def source_line(info: Any) -> str:
    """Returns a source line such as `model.py:41 (forward)`: the innermost that lies outside of frameworks and of this package.

    The file's name comes without its folder, so that plans do not depend on where code lies. A notebook's cell is `cell:41`. A framework's
    line stands where there is no other; what this package makes by itself has none, and the result is empty.
    """
    text = source_info_util.summarize(info)
    for count in _FRAME_COUNTS:
        if not is_framework(text) and not is_own(text):
            break
        frames = source_info_util.summarize(info, num_frames=count).splitlines()
        # Outside of what traces, there are only the lines that called for a plan.
        inside = itertools.takewhile(lambda frame: not _traces(frame), reversed(frames))
        text = next((frame for frame in inside if not is_framework(frame) and not is_own(frame)), text)
    if is_own(text):
        return ""
    found = _FRAME.fullmatch(text)
    return f"{file_text(found['file'])}:{found['line']} {found['function']}" if found else file_text(text)


def _traces(frame: str) -> bool:
    """Returns whether a frame is one of this package that traces a step, and not of what a step calls."""
    return is_own(frame) and not frame.startswith(_CALLED)


def definition_line(fn: Any) -> str:
    """Returns the line at which the user defines a function, such as `model.py:41 (loss)`; empty if it is no function of theirs."""
    while isinstance(fn, functools.partial | MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None or is_framework(code.co_filename) or is_own(code.co_filename):
        return ""
    return f"{file_text(code.co_filename)}:{code.co_firstlineno} ({fn.__qualname__})"


def at_home(program: Program, home: str) -> Program:
    """Returns a program whose ops come from the line `home` where no line of the user's makes them."""
    origins = program.graph.origins
    return replace(program, graph=replace(program.graph, origins=origins.at(home))) if isinstance(origins, LazyOrigins) else program

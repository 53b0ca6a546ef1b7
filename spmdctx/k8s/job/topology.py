"""TPU slices: what a pod has to ask for, by the names that users give them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from spmdctx.errors import ContextError


class Generation(NamedTuple):
    """A generation of TPUs on GKE.

    Attributes:
        accelerator: the label of its nodes.
        cores: what the number in a slice's name counts, for each chip.
        axes: dimensions of its topologies.
        per_host: chips that a host may have, for slices of one host and of several.
    """

    accelerator: str
    cores: int
    axes: int
    per_host: tuple[int, ...]


_GENERATIONS = {
    "v4": Generation("tpu-v4-podslice", 2, 3, (4,)),
    "v5e": Generation("tpu-v5-lite-podslice", 1, 2, (1, 4, 8)),
    "v5p": Generation("tpu-v5p-slice", 2, 3, (4,)),
    "v6e": Generation("tpu-v6e-slice", 1, 2, (1, 4, 8)),
}
"""Labels and slices as in GKE's documentation of TPUs (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)."""

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}
_NAME = re.compile(r"(v[0-9]+[a-z]?)(?:-([0-9]{1,5})|:([0-9]{1,3}(?:x[0-9]{1,3}){1,2}))")
_LONG_NAMES = {"v5litepod": "v5e"}
"""As Google Cloud calls accelerator types."""


class Slice(NamedTuple):
    """A slice of TPUs: the labels of its nodes, and its chips."""

    accelerator: str
    topology: str
    chips: int
    per_host: tuple[int, ...]


def read_slice(text: str) -> Slice:
    """Returns the slice that "v5e-16" or "v5e:4x4" names.

    Raises:
        ContextError: there is no such slice.
    """
    short = text.lower().removeprefix("tpu-")
    for long, name in _LONG_NAMES.items():
        short = re.sub(f"^{long}(?=[-:])", name, short)
    found = _NAME.fullmatch(short)
    generation = _GENERATIONS.get(found[1]) if found else None
    if found is None or generation is None:
        raise ContextError(
            "--topology names no slice of TPUs.", got=ascii(text[:80]), need=f"one of {', '.join(_GENERATIONS)}, as in v5e-16"
        )
    by_chips = _FLAT if generation.axes == 2 else _CUBES
    if found[3] is None:
        chips, left = divmod(int(found[2]), generation.cores)
        if left or chips not in by_chips:
            known = ", ".join(f"{found[1]}-{generation.cores * number}" for number in by_chips)
            raise ContextError("There is no slice of TPUs of this size.", got=ascii(text[:80]), need=f"one of {known}")
        return Slice(generation.accelerator, by_chips[chips], chips, generation.per_host)
    sizes = [int(size) for size in found[3].split("x")]
    if len(sizes) != generation.axes or 0 in sizes:
        raise ContextError(f"A topology of {found[1]} has {generation.axes} sizes.", got=ascii(text[:80]))
    shape, is_large = "x".join(map(str, sizes)), generation.axes == 3 and all(size % 4 == 0 for size in sizes)
    if shape not in by_chips.values() and not (is_large and sizes == sorted(sizes)):
        more = ", or three multiples of 4 in ascending order" if generation.axes == 3 else ""
        raise ContextError("There is no slice of TPUs of this shape.", got=ascii(text[:80]), need=f"{', '.join(by_chips.values())}{more}")
    return Slice(generation.accelerator, shape, math.prod(sizes), generation.per_host)

"""Quantities as people read them."""

from __future__ import annotations

import re

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding

TIMES = "\N{MULTIPLICATION SIGN}"

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def seconds_text(seconds: float) -> str:
    """`12.3 ms`, `870 µs`."""
    if seconds == 0:
        return "0 s"
    for unit, name in _SECONDS:
        if abs(seconds) >= unit * 0.9995:
            return f"{three_digits(seconds / unit)} {name}"
    return f"{seconds:.1e} s"


def share_text(part: float, whole: float) -> str:
    """`18 %`; empty where there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def dtype_text(dtype: str) -> str:
    """`float32` as `f32`, the way compiler dumps write it."""
    for long, short in _SHORT_DTYPES.items():
        if dtype.startswith(long) and dtype[len(long) :].isdigit():
            return short + dtype[len(long) :]
    return dtype


def mesh_text(mesh: LogicalMesh) -> str:
    """Axes with their sizes, as a product."""
    return f" {TIMES} ".join(f"{name} {size}" for name, size in mesh.axes) or "one device"


def tensor_text(shape: tuple[int, ...], dtype: str) -> str:
    """`f32[4096, 11008]`."""
    return f"{dtype_text(dtype)}[{', '.join(map(str, shape))}]"


def split_text(sharding: TensorSharding) -> str:
    """`[data, -]` where something is split, `whole` where nothing is."""
    return "[" + ", ".join("+".join(axes) or "-" for axes in sharding) + "]" if any(sharding) else "whole"


def place_text(source: str) -> str:
    """`model.py:41 (step.<locals>.loss)` as `model.py:41 (loss)`."""
    place, bracket, function = source.partition(" (")
    names = [name for name in function.rstrip(")").split(".") if not name.startswith("<")]
    return f"{place} ({names[-1]})" if bracket and names else place


_NOTEBOOK = re.compile(r"(?:^|/)(?:ipykernel_\d+/\d+\.py|<ipython-input-[^/]*>)$")

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """`0 B`, `17.2 KiB`, `3.42 GiB`."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{three_digits(count)} {_BYTE_UNITS[power]}"


def exact_bytes_text(count: int) -> str:
    """The number that an option takes, with what people read: `12884901888 bytes (12.0 GiB)`; `512 bytes`."""
    number = f"{count} byte{'' if count == 1 else 's'}"
    return number if abs(count) < 1024 else f"{number} ({bytes_text(count)})"


def counted(count: int, noun: str) -> str:
    """`1 device`, `8 devices`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def three_digits(number: float) -> str:
    """The number with three significant digits, more before the point where it is large."""
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def file_text(path: str) -> str:
    """A source file's name without its folder; `cell` for what IPython makes of a notebook's cell."""
    path = path.replace("\\", "/")
    return "cell" if _NOTEBOOK.search(path) else path.rsplit("/", 1)[-1]

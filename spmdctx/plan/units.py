"""Quantities as people read them."""

from __future__ import annotations

from spmdctx.ir import TensorSharding
from spmdctx.mesh import LogicalMesh
from spmdctx.wording import three_digits

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

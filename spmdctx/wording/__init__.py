"""Formats quantities for people to read."""

from __future__ import annotations

import re
from pathlib import Path

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import TensorSharding

TIMES = "\N{MULTIPLICATION SIGN}"

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def seconds_text(seconds: float) -> str:
    """Formats seconds, as in `12.3 ms` or `870 µs`."""
    if seconds == 0:
        return "0 s"
    for unit, name in _SECONDS:
        if abs(seconds) >= unit * 0.9995:
            return f"{three_digits(seconds / unit)} {name}"
    nanoseconds = abs(seconds) / 1e-9
    return f"{seconds / 1e-9:.2g} ns" if nanoseconds >= 0.001 else "<0.001 ns"


def rate_text(count: float) -> str:
    """Formats a count of things in a second, as in `12,345` or `0.87`."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def share_text(part: float, whole: float) -> str:
    """Formats a share, as in `18 %`; empty if the whole is zero."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def dtype_text(dtype: str) -> str:
    """Shortens `float32` to `f32`, as in compiler dumps."""
    for long, short in _SHORT_DTYPES.items():
        if dtype.startswith(long) and dtype[len(long) :].isdigit():
            return short + dtype[len(long) :]
    return dtype


def mesh_text(mesh: LogicalMesh) -> str:
    """Formats the axes of a mesh with their sizes, as a product."""
    return f" {TIMES} ".join(f"{name} {size}" for name, size in mesh.axes) or "one device"


def tensor_text(shape: tuple[int, ...], dtype: str) -> str:
    """Formats a type, as in `f32[4096, 11008]`."""
    return f"{dtype_text(dtype)}[{', '.join(map(str, shape))}]"


def split_text(sharding: TensorSharding) -> str:
    """Formats a sharding, as in `[data, -]`, or `whole` if nothing is split."""
    return "[" + ", ".join("+".join(axes) or "-" for axes in sharding) + "]" if any(sharding) else "whole"


def place_text(source: str) -> str:
    """Shortens a place such as `model.py:41 (step.<locals>.loss)` to `model.py:41 (loss)`.

    Modules tell more than functions: `model.py:41 (Mlp.__call__ in Model/layers_3/mlp)` becomes `model.py:41 (layers_3/mlp)`.
    """
    place, bracket, function = source.partition(" (")
    function, _, scope = function.partition(" in ")
    if scope:
        return f"{place} ({'/'.join(scope.rstrip(')').split('/')[-2:])})"
    names = [name for name in function.rstrip(")").split(".") if not name.startswith("<")]
    # The class tells more than `__call__`, which all modules have.
    shown = names[-2:] if names and names[-1] == "__call__" else names[-1:]
    return f"{place} ({'.'.join(shown)})" if bracket and names else place


_NOTEBOOK = re.compile(r"(?:^|/)(?:ipykernel_\d+/\d+\.py|<ipython-input-[^/]*>)$")

_FRAMEWORKS = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "chex", "einops", "jaxtyping", "numpyro", "distrax", "orbax", "penzai")
_FRAMEWORK = re.compile(rf"/(?:site|dist)-packages/(?:{'|'.join(_FRAMEWORKS)})/")

PACKAGE = f"{Path(__file__).parents[1]}/"
"""The folder of this package."""
_MODELS = f"{PACKAGE}models/"

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """Formats a number of bytes, as in `0 B`, `17.2 KiB` or `3.42 GiB`."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{three_digits(count)} {_BYTE_UNITS[power]}"


def exact_bytes_text(count: int) -> str:
    """Formats the number that an option takes with a readable form: `12884901888 bytes (12.0 GiB)`, `512 bytes`."""
    number = f"{count} byte{'' if count == 1 else 's'}"
    return number if abs(count) < 1024 else f"{number} ({bytes_text(count)})"


def peak_text(likely: float, safe: float) -> str:
    """Formats the interval of a peak, as in `12.3 GiB (likely), 13.9 GiB (safe)`; one number where both ends are alike."""
    return f"{bytes_text(likely)} (likely), {bytes_text(safe)} (safe)" if safe > likely else bytes_text(likely)


def counted(count: int, noun: str) -> str:
    """Formats a count, as in `1 device` or `8 devices`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def three_digits(number: float) -> str:
    """Formats a number with three significant digits, or with all digits before the point if it is large."""
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"


def is_framework(path: str) -> bool:
    """Returns whether a source file belongs to an installed framework, so that a step's author finds no line of theirs in it."""
    return _FRAMEWORK.search(path.replace("\\", "/")) is not None


def is_own(path: str) -> bool:
    """Returns whether a source file belongs to this package, but for models: these are what a user's step calls."""
    return path.startswith(PACKAGE) and not path.startswith(_MODELS)


def file_text(path: str) -> str:
    """Returns a source file's name without its folder, or `cell` for the file that IPython makes of a notebook's cell."""
    path = path.replace("\\", "/")
    return "cell" if _NOTEBOOK.search(path) else path.rsplit("/", 1)[-1]

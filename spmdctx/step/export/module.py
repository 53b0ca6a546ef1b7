"""Writes the text of an exported module: what it says of the step, its tables, and the code that reads them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdctx.step.export import blocks, runtime
from spmdctx.step.export.blocks import Body, Named
from spmdctx.step.export.literals import source
from spmdctx.step.export.operations import Code

_MARK = "# MARK\n"
_WIDTH = 140


@dataclass(frozen=True)
class Tables:
    """What an exported module holds; `inputs` and `outputs` have (path, type, spec) for each leaf."""

    name: str
    axes: Mapping[str, int]
    traced_on: Mapping[str, int]
    arguments: Sequence[str]
    objects: Sequence[str]
    static: Sequence[str]
    inputs: Sequence[tuple[str, str, Any]]
    outputs: Sequence[tuple[str, str, Any]]
    donated: Sequence[str]
    compiler_options: Mapping[str, Any]
    digest: str
    bodies: Mapping[str, Mapping[str, Any]]
    has_losses: bool = False


def module_text(tables: Tables) -> str:
    """Returns the source of the module."""
    first, code = (inspect.getsource(module).partition(_MARK)[2] for module in (blocks, runtime))
    parts = [
        f'"""{_docstring(tables)}"""',
        "",
        "from __future__ import annotations",
        "",
        "import hashlib",
        "from typing import Any, NamedTuple",
        "",
        "import jax",
        "import jax.extend.core as jexc",
        "from jax.extend.core import primitives",
        "from jax.sharding import NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        "",
        first.strip(),
        "",
        "",
        f"AXES = {source(dict(tables.axes))}",
        f"TRACED_ON = {source(dict(tables.traced_on))}  # the mesh that is set while the step is traced",
        f"ARGUMENT_NAMES = {source(tuple(tables.arguments))}",
        "",
        "# The leaves of the arguments and of the result, in order: path, type, sharding.",
        *_leaves("INPUTS", tables.inputs),
        *_leaves("OUTPUTS", tables.outputs),
        f"DONATED = {source(tuple(tables.donated))}",
        f"COMPILER_OPTIONS = {source(dict(tables.compiler_options))}",
        "",
        "# The step as this module was written for it: its digest, and the version of JAX that traced it.",
        f"DIGEST = {source(tables.digest)}",
        f"JAX_VERSION = {source(jax.__version__)}",
        "",
        "# What is written into each body of the step, row by row: `run` runs the step's own equations from one number up to another,",
        "# `constrain` splits a value as its PartitionSpec says (its last entry is the equation that made it: primitive, type, scope),",
        "# `equation` runs one equation on other values, and the other rows are methods of `Writer` below as well.",
        *_bodies(tables.bodies),
        code.rstrip(),
        "",
    ]
    return "\n".join(parts)


def _docstring(tables: Tables) -> str:
    mesh = ", ".join(f"{name} {size}" for name, size in tables.axes.items())
    use = f"    step = parallel({tables.name})"
    lines = [f"The step `{tables.name}`, split over the mesh {mesh}. Needs JAX alone.", ""]
    if tables.static:
        lines += [f"Bind the static arguments ({', '.join(tables.static)}) first, with functools.partial.", ""]
    if tables.has_losses:
        module = "nnx" if tables.objects else "jax"
        lines += [
            "Each device differentiates the loss of its own rows, and the gradients are reduced: the module does so. In the step,",
            f"{module}.value_and_grad and {module}.grad stand where those of spmdctx stood.",
            "",
        ]
    if tables.objects:
        objects = ", ".join(tables.objects) + ("," if len(tables.objects) == 1 else "")
        rest = ", ".join(tables.arguments[1:])
        lines += [
            "The state of the nnx objects goes in and comes back:",
            "",
            f"    graphdef, state = nnx.split(({objects}))",
            "",
            f"    def functional(state{', ' + rest if rest else ''}):",
            f"        {objects} = objects = nnx.merge(graphdef, state)",
            f"        result = {tables.name}({', '.join([*tables.objects, *tables.arguments[1:]])})",
            "        return nnx.state(objects), result",
            "",
            "    step = parallel(functional)",
            f"    state, result = step(state{', ' + rest if rest else ''})",
            f"    nnx.update(({objects}), state)",
        ]
    else:
        lines += [use, f"    result = step({', '.join(tables.arguments)})"]
    return "\n".join([*lines, ""])


def _leaves(name: str, leaves: Sequence[tuple[str, str, Any]]) -> list[str]:
    return [f"{name} = (", *[f"    ({source(path)}, {source(type_)}, {source(spec)})," for path, type_, spec in leaves], ")"]


def _bodies(bodies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["EDITS = {"]
    for key, table in sorted(bodies.items()):
        lines.append(f"    {source(key)}: {{")
        for name, entry in table.items():
            if name == "rows":
                lines += ['        "rows": (', *[f"            {_row(row)}," for row in entry], "        ),"]
            else:
                lines.append(f"        {source(name)}: {_row(entry)},")
        lines.append("    },")
    return [*lines, "}", ""]


def _row(value: Any) -> str:
    """Returns the source of a row, in which some entries are source already."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, Body | Named):
        return f"{type(value).__name__}({', '.join(map(_row, value))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_row, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{source(key)}: {_row(entry)}' for key, entry in value.items())}}}"
    return source(value)

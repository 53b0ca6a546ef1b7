"""Writes a plan as logical axis rules, as Flax and MaxText read them, and names what they cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import format_sharding
from spmdctx.ir.sharding import AxisNames
from spmdctx.plan.data import PlanData, PlannedTensor
from spmdctx.wording import counted

BATCH = "batch"
"""The logical name of the first dimension of what a step takes as its batch."""


def rules_text(plan: PlanData) -> str:
    """Returns the source of a Python module without imports: MESH, LOGICAL_AXIS_RULES, PARAMETER_AXES and NOT_SAID.

    A dimension that is split has a name made of its axes and its size, such as `model_256`: dimensions of one name are split alike. One
    that is whole has none, so that no tensor has a name or an axis twice.

    Raises:
        UnsupportedError: the plan knows no parameters, or two of the same path.
    """
    parameters = [tensor for tensor in plan.inputs if tensor.role is Role.PARAMETER]
    if not parameters:
        raise UnsupportedError(
            'export("rules") needs parameters, and this plan has none.',
            got=", ".join(sorted({tensor.role.value for tensor in plan.inputs})) or "a step without arguments",
            fix="export the plan of a training step",
        )
    axes_of = {tensor.path: _names(tensor) for tensor in parameters}
    if len(axes_of) < len(parameters):
        twice = next(path for path, count in Counter(tensor.path for tensor in parameters).items() if count > 1)
        raise UnsupportedError("Two parameters of the plan have the same path.", got=twice, fix="rename a key that holds a slash")
    rules: dict[str, AxisNames] = {}
    for tensor in parameters:
        rules.update((name, axes) for name, axes in zip(axes_of[tensor.path], tensor.sharding, strict=True) if name)
    batch = _batch_axes(plan)
    if batch:
        rules = {BATCH: batch, **rules}
    lines = [
        f'"""Logical axis rules of a plan for the mesh {", ".join(f"{name} {size}" for name, size in plan.mesh.items())}.',
        "",
        "LOGICAL_AXIS_RULES goes to flax.linen.logical_axis_rules, to `logical_axis_rules` of MaxText, or to `rules=` of spmdctx.parallel.",
        "PARAMETER_AXES has the names of each parameter's dimensions, for flax.linen.with_logical_partitioning or `out_sharding` of nnx.",
        "NOT_SAID names what the plan decides and rules cannot say.",
        '"""',
        "",
        f"MESH = {_mapping(plan.mesh)}",
        "",
        "LOGICAL_AXIS_RULES = (",
        *[f"    ({_quoted(name)}, {_axes(axes)})," for name, axes in rules.items()],
        ")",
        "",
        "PARAMETER_AXES = {",
        *[f"    {_quoted(path)}: {_tuple(map(_quoted_or_none, names))}," for path, names in axes_of.items()],
        "}",
        "",
        "NOT_SAID = (",
        *[f"    {_quoted(sentence)}," for sentence in _not_said(plan, parameters, batch)],
        ")",
        "",
    ]
    return "\n".join(lines)


def _names(tensor: PlannedTensor) -> tuple[str | None, ...]:
    return tuple(f"{'_'.join(axes)}_{size}" if axes else None for size, axes in zip(tensor.shape, tensor.sharding, strict=True))


def _batch_axes(plan: PlanData) -> AxisNames:
    """Returns the axes over which all of the batch is split along its first dimension, none if its leaves differ."""
    found = {tensor.sharding[0] for tensor in plan.inputs if tensor.role is Role.BATCH and tensor.shape}
    return found.pop() if len(found) == 1 else ()


def _not_said(plan: PlanData, parameters: Sequence[PlannedTensor], batch: AxisNames) -> Iterator[str]:
    """Yields what the rules do not say."""
    for tensor in plan.inputs:
        split = format_sharding(tensor.sharding)
        if tensor.role is Role.BATCH:
            if any(tensor.sharding[1:]) or (tensor.sharding[:1] and tensor.sharding[0] != batch):
                yield f"{tensor.path} of the batch is split as {split}."
            continue
        if tensor.role is Role.PARAMETER:
            continue
        owner = _owner(tensor, parameters)
        if owner is not None and owner.sharding != tensor.sharding:
            yield f"{tensor.path} is split as {split}, and its parameter {owner.path} as {format_sharding(owner.sharding)}."
        elif owner is None and any(tensor.sharding):
            yield f"{tensor.path}, which is no parameter, is split as {split}."
    before = {tensor.path: tensor.sharding for tensor in plan.inputs}
    for tensor in plan.outputs:
        if tensor.path in before and tensor.sharding != before[tensor.path]:
            yield f"{tensor.path} comes back split as {format_sharding(tensor.sharding)}."
    inside = counted(len(plan.ops), "op")
    yield f"The plan fixes the shardings of {inside} inside of the step; without constraints there, XLA's partitioner chooses."
    for name, value in plan.options:
        yield f"The option {name}={value!r} of the plan."


def _owner(tensor: PlannedTensor, parameters: Sequence[PlannedTensor]) -> PlannedTensor | None:
    """Returns the parameter whose shape a tensor has, and with whose path its own ends for the longest."""
    alike = [one for one in parameters if one.shape == tensor.shape]
    lengths = [(_common(tensor.path.split("/"), one.path.split("/")), -place) for place, one in enumerate(alike)]
    best = max(lengths, default=(0, 0))
    return alike[-best[1]] if best[0] else None


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns how many last keys of two paths are equal."""
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted_or_none(text: str | None) -> str:
    return "None" if text is None else _quoted(text)


def _tuple(entries: Iterator[str] | map[str]) -> str:
    own = list(entries)
    return f"({', '.join(own)}{',' if len(own) == 1 else ''})"


def _axes(axes: AxisNames) -> str:
    return _quoted(axes[0]) if len(axes) == 1 else _tuple(map(_quoted, axes))


def _mapping(sizes: Mapping[str, int]) -> str:
    return f"{{{', '.join(f'{_quoted(name)}: {size}' for name, size in sizes.items())}}}"

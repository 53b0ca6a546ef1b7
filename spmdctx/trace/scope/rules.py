"""Logical axis rules as an option of a step: their checks, and the mesh whose axes they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from spmdctx._compat import entered_mesh
from spmdctx.errors import ContextError, message, shown
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.trace.capture.partitioning import AxisRules, axes_of_rule

_FORM = 'such as {"embed": "model", "batch": ("data", "fsdp"), "norm": None}, or a list of such pairs'


def axis_rules(given: Any) -> AxisRules:
    """Checks logical axis rules, a mapping or a list of pairs (of which the first that can act counts), and returns the pairs.

    Raises:
        ContextError: an empty name, or an axis twice in one rule.
        TypeError: another form.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(message("rules must be a mapping or a list of pairs.", got=shown(given), need=_FORM))
    return tuple(_rule(pair) for pair in pairs)


def _rule(pair: Any) -> tuple[str, str | tuple[str, ...] | None]:
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(message("A rule must be a pair of a logical name and mesh axes.", got=shown(pair), need=_FORM))
    name, axes = pair
    own = (axes,) if isinstance(axes, str) else () if axes is None else axes
    if not isinstance(own, tuple | list) or not all(isinstance(axis, str) for axis in own):
        raise TypeError(message(f"The rule of {name!r} must give a mesh axis, several, or None.", got=shown(axes), need=_FORM))
    if not name or not all(own):
        raise ContextError("A rule has an empty name.", got=shown(tuple(pair)))
    if len(set(own)) < len(own):
        raise ContextError(f"The rule of {name!r} names a mesh axis twice.", got=shown(axes))
    return name, axes if axes is None or isinstance(axes, str) else tuple(own) if len(own) != 1 else own[0]


def sizes_around() -> dict[str, int]:
    """Returns the axes and sizes of the mesh that is set; none where no mesh is."""
    around = jax.sharding.get_abstract_mesh()
    return dict(around.shape if not around.empty else entered_mesh().shape)


def mesh_for_rules(rules: AxisRules, mesh: LogicalMesh | None, num_devices: int) -> LogicalMesh | None:
    """Returns the mesh of a step with rules: the given one, that which is set, or one axis over all devices if the rules name but one.

    Raises:
        ContextError: the mesh has none of the axes, or the rules name several axes, whose sizes nothing tells.
    """
    named = list(dict.fromkeys(axis for rule in rules for axis in axes_of_rule(rule)))
    known = mesh.sizes if mesh is not None else sizes_around()
    if known:
        if named and known.keys().isdisjoint(named):
            raise ContextError(
                f"rules name only mesh axes that the mesh does not have: {', '.join(named)}.",
                got=", ".join(f"{rule[0]!r}: {rule[1]!r}" for rule in rules if axes_of_rule(rule)),
                need=f"axes of the mesh ({', '.join(known)}) or None",
                fix="name an axis of the mesh in the rule, or another mesh in mesh=",
            )
        return mesh
    if len(named) > 1:
        raise ContextError(
            "rules name several mesh axes, and no mesh says how large they are.",
            got=", ".join(named),
            fix=f"mesh={{{', '.join(f'{chr(34)}{axis}{chr(34)}: size' for axis in named)}}}, whose product is the number of devices",
        )
    return LogicalMesh.of({named[0]: num_devices}) if named else None

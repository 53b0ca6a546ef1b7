"""Flax's partitioning metadata as names for each dimension: linen's boxes and the metadata of nnx variables."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.core import meta

PartitionNames = tuple[str | tuple[str, ...] | None, ...]
"""Axis names for each dimension, as Flax metadata gives them; None for a whole dimension."""


def spec_names(spec: Any, rank: int) -> PartitionNames | None:
    """Returns the names of each dimension in a PartitionSpec, or None if it is empty or does not fit a tensor of `rank`."""
    entries = tuple(spec) if spec is not None else ()
    if not entries or len(entries) > rank:
        return None
    if any(not (entry is None or isinstance(entry, str | tuple)) for entry in entries):
        return None
    return entries + (None,) * (rank - len(entries))


def boxed_names(tree: Any) -> dict[int, PartitionNames]:
    """Maps the flat index of each leaf in a linen metadata box to its names."""
    found: dict[int, PartitionNames] = {}
    index = 0
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)):
        if not isinstance(node, meta.AxisMetadata):
            index += 1
            continue
        for leaf in jax.tree.leaves(node):
            names = spec_names(_box_spec(node), np.ndim(leaf))
            if names is not None:
                found[index] = names
            index += 1
    return found


def _box_spec(box: Any) -> Any:
    get_spec = getattr(box, "get_partition_spec", None)
    if get_spec is None:
        return None
    if isinstance(box, linen.LogicallyPartitioned):
        rules = box.rules or linen.get_logical_axis_rules()
        if rules:
            return linen.spmd.logical_to_mesh_axes(box.names, rules)
    return get_spec()


def variable_names(variable: Any) -> PartitionNames | None:
    """Returns the names of each dimension in an nnx variable's metadata, or None if it has none."""
    shape = getattr(variable.get_raw_value(), "shape", None)
    if shape is None:
        return None
    return spec_names(nnx.get_partition_spec(variable).get_raw_value(), len(shape))

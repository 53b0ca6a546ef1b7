"""The targets of batches: the sharding of each leaf by a planned step, a plan, or a pytree of shardings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding

from spmdctx.errors import PlanError, message
from spmdctx.ir.graph import Role
from spmdctx.plan.plan import Plan
from spmdctx.trace.specs import make_mesh, named_sharding

Mask = str | int
"""The key, or the position, of a batch's mask."""


@dataclass(frozen=True)
class Leaf:
    """The target of one leaf of a batch; shape (global) and dtype are None if only the sharding is known."""

    path: str
    sharding: Sharding
    shape: tuple[int, ...] | None = None
    dtype: Any = None


class Matched(NamedTuple):
    """A batch matched with its targets: values and leaves in order, the index of the mask, and the structure of the result.

    The value of a mask that the batch does not bring is None.
    """

    values: list[Any]
    leaves: list[Leaf]
    mask: int | None
    structure: Any


class Targets(NamedTuple):
    """The batch arguments of a step.

    `arguments` holds a pytree of `Leaf` per argument; None where only the order of `flat` is known. `whole` says whether every
    process is given whole batches.
    """

    arguments: tuple[Any, ...] | None
    flat: tuple[Leaf, ...]
    whole: bool = False

    def match(self, batch: Any, mask: Mask | None = None) -> Matched:
        """Matches a batch, one argument or a tuple of all, with a leaf for each value.

        Raises:
            PlanError: the batch has another structure.
        """
        structure: Any = jax.tree.structure(batch)
        for tree in self._trees():
            leaves, own = jax.tree.flatten(tree)
            where = None if mask is None else _mask_index(tree, mask)
            if mask is not None and where is None:
                continue
            if own == structure:
                return Matched(jax.tree.leaves(batch), leaves, where, own)
            if where is not None and jax.tree.structure(_without(tree, mask)) == structure:
                values: list[Any] = jax.tree.leaves(batch)
                values.insert(where, None)
                return Matched(values, leaves, where, own)
        if self.arguments is None and mask is None and structure.num_leaves == len(self.flat):
            return Matched(jax.tree.leaves(batch), list(self.flat), None, structure)
        raise self._unknown(structure, mask)

    def _trees(self) -> list[Any]:
        arguments = self.arguments or ()
        return [*arguments, tuple(arguments), list(arguments)] if arguments else []

    def _unknown(self, structure: Any, mask: Mask | None) -> PlanError:
        if self.arguments is None:
            need = f"{len(self.flat)} leaves: " + ", ".join(leaf.path for leaf in self.flat)
            fix = "give the step instead of its plan: it knows the place of the mask" if mask is not None else ""
        else:
            need = " or ".join(str(jax.tree.structure(tree)) for tree in self.arguments) or "a step with a batch"
            fix = f"let the step take a batch with the mask {mask!r}, {('rows',)} long" if mask is not None else ""
        return PlanError("The plan has no batch of this structure.", got=str(structure), need=need, fix=fix)


@runtime_checkable
class TakesBatches(Protocol):
    """A step that knows where its batch goes; `spmdctx.parallel` makes one."""

    def batch_targets(self) -> Targets:
        """Returns the targets of the last plan's batch."""


def targets_of(target: Any) -> Targets:
    """Returns the targets of a step, a plan or a pytree of shardings.

    Raises:
        PlanError: nothing was planned for the step.
        TypeError: the target is something else.
    """
    if isinstance(target, TakesBatches):
        return target.batch_targets()
    if isinstance(target, Plan):
        return _of_plan(target, jax.devices())
    shardings = jax.tree.leaves(target)
    if shardings and all(isinstance(leaf, Sharding) for leaf in shardings):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(target)]
        flat = tuple(Leaf(path, sharding) for path, sharding in zip(paths, shardings, strict=True))
        return Targets((jax.tree.unflatten(jax.tree.structure(target), flat),), flat)
    raise TypeError(
        message(
            "data.shard does not know where batches go.",
            got=type(target).__name__,
            need="a step made by spmdctx.parallel, a Plan, or a pytree of shardings",
        )
    )


def _of_plan(plan: Plan, devices: Sequence[Any]) -> Targets:
    mesh = make_mesh(plan.logical_mesh, devices)
    flat = tuple(
        Leaf(tensor.path, named_sharding(mesh, tensor.sharding), tensor.shape, np.dtype(tensor.dtype))
        for tensor in plan.inputs
        if tensor.role is Role.BATCH
    )
    options = dict(plan.options)
    return Targets(None, flat, bool(options.get("full_batch")))


def _mask_index(tree: Any, mask: Mask) -> int | None:
    """Returns the position of the mask among the leaves of a dict, tuple or list, or None if there is none."""
    is_sequence = isinstance(tree, tuple | list) and isinstance(mask, int) and 0 <= mask < len(tree)
    if not is_sequence and not (isinstance(tree, dict) and mask in tree):
        return None
    if not isinstance(tree[mask], Leaf):
        return None
    return next(index for index, leaf in enumerate(jax.tree.leaves(tree)) if leaf is tree[mask])


def _without(tree: Any, mask: Any) -> Any:
    if isinstance(tree, dict):
        return {key: part for key, part in tree.items() if key != mask}
    return type(tree)(part for index, part in enumerate(tree) if index != mask)

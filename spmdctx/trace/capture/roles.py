"""Roles of argument leaves in a step: parameter, optimizer state, other state, key, batch, or plain argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.errors import listed
from spmdctx.ir.graph import Role
from spmdctx.trace.capture.arguments import Selection
from spmdctx.trace.capture.carry import Span, children
from spmdctx.trace.capture.structure import Leaf, key_text
from spmdctx.trace.capture.updates import Updates
from spmdctx.trace.flax_modules import flax_is_used

_PARAMETER_NAMES = ("params", "param", "parameters", "weights", "kernel")
_OPTIMIZER_NAMES = (
    *("opt_state", "opt_states", "opt", "optimizer", "optim", "optimizer_state", "momentum", "momenta", "velocity", "mu", "nu", "trace"),
)
_STATE_NAMES = ("batch_stats", "stats", "step", "steps", "count", "ema", "cache", "carry", "hidden", "model_state")
_ROLE_OF_NAME = {
    **dict.fromkeys(_PARAMETER_NAMES, Role.PARAMETER),
    **dict.fromkeys(_OPTIMIZER_NAMES, Role.OPTIMIZER),
    **dict.fromkeys(_STATE_NAMES, Role.STATE),
}
_KEY_WORDS = ("key", "rng", "seed")


class Argument:
    """One dynamic argument of the call, with its run of flat leaves."""

    def __init__(self, name: str, argument: int | str, span: Span, leaves: Sequence[Leaf], avals: Sequence[Any]) -> None:
        self.name = name
        self.argument = argument
        self.span = span
        self.leaves = leaves
        self.avals = avals

    @property
    def is_object(self) -> bool:
        """True if nnx or linen tells the roles of the argument's leaves."""
        return any(leaf.owned for leaf in self.leaves) or _has_linen_node(self.span.tree)

    @property
    def is_key(self) -> bool:
        """True if all leaves are PRNG keys."""
        return bool(self.avals) and all(is_key(aval, self.name) for aval in self.avals)


def is_key(aval: Any, name: str) -> bool:
    """Returns whether a leaf is a PRNG key.

    A key is typed, a raw pair (or four) of uint32 words, or an array of such words whose name says so.
    """
    if _is_of(aval.dtype, jax.dtypes.prng_key):
        return True
    if aval.dtype != jnp.uint32 or not aval.shape or aval.shape[-1] not in (2, 4):
        return False
    return len(aval.shape) == 1 or any(word in name.lower() for word in _KEY_WORDS)


@lru_cache(maxsize=256)
def _is_of(dtype: Any, family: Any) -> bool:
    """Returns `jnp.issubdtype`, computed once for each type."""
    return bool(jnp.issubdtype(dtype, family))


def roles_of(arguments: Sequence[Argument], carried: frozenset[int], batch: Selection | None) -> list[Role]:
    """Returns the role of each flat input of all `arguments`, in order.

    `batch` selects the batch. Without it, the batch is every argument that is not an nnx or linen object, not a PRNG key, and not
    carried. If nothing is carried and there is no such object, the first argument is not part of it. Nor are leaves of one row beside
    others of more.
    """
    is_state = [argument.is_object or not carried.isdisjoint(range(argument.span.start, argument.span.stop)) for argument in arguments]
    first_is_state = not any(is_state)
    parameters: Any = None
    roles: list[Role] = []
    for index, (argument, state) in enumerate(zip(arguments, is_state, strict=True)):
        if batch is not None:
            is_batch = batch.holds(argument.argument)
        else:
            is_batch = not state and not argument.is_key and not (first_is_state and index == 0)
        if is_batch:
            roles += [_batch_role(argument, leaf, aval) for leaf, aval in zip(argument.leaves, argument.avals, strict=True)]
            continue
        follows = parameters is not None and argument.span.tree == parameters
        own = _state_roles(argument, Role.OPTIMIZER if follows else Role.PARAMETER)
        roles += own
        if parameters is None and Role.PARAMETER in own:
            parameters = argument.span.tree
    return roles if batch is not None else _without_single_rows(arguments, roles)


def _without_single_rows(arguments: Sequence[Argument], roles: Sequence[Role]) -> list[Role]:
    """Returns the roles, where leaves of one row beside others of more are no batch: statistics are such leaves."""
    avals = [aval for argument in arguments for aval in argument.avals]
    is_batch = [role is Role.BATCH for role in roles]
    rows = max((aval.shape[0] for aval, own in zip(avals, is_batch, strict=True) if own), default=0)
    return [Role.ARGUMENT if own and aval.shape[0] == 1 < rows else role for aval, own, role in zip(avals, is_batch, roles, strict=True)]


def with_update_roles(roles: Sequence[Role], arguments: Sequence[Argument], updates: Updates) -> list[Role]:
    """Returns the roles, with those of optimizer state that only the data flow shows.

    Such state is read by no differentiated function, and changes the next value of another input, whatever its shape and name. So is
    what lies beside it in the arguments and is not read either, and integers that are not read, such as counters.
    """
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = [aval for argument in arguments for aval in argument.avals]
    asked = [index for index, role in enumerate(roles) if role in (Role.PARAMETER, Role.STATE) and avals[index].shape]
    unread = updates.unread(asked)
    if not unread:
        return list(roles)
    found = updates.of_others(unread)
    found |= {index for index in unread if roles[index] is Role.STATE and _is_counter(leaves[index], avals[index])}
    read = [index for index in asked if index not in unread]
    found |= _beside(leaves, [index for index in unread - found if roles[index] is Role.PARAMETER], found, read)
    return [Role.OPTIMIZER if index in found else role for index, role in enumerate(roles)]


def _is_counter(leaf: Leaf, aval: Any) -> bool:
    return leaf.role is None and not _is_of(aval.dtype, jnp.inexact)


def _beside(leaves: Sequence[Leaf], asked: Iterable[int], found: Iterable[int], read: Iterable[int]) -> set[int]:
    """Returns those of some leaves whose nearest neighbours in the tree of their argument are found, and none of them read."""
    near, far = _subtrees(leaves, found), _subtrees(leaves, read)
    beside = set()
    for index in asked:
        around = next((part for part in _around(leaves[index]) if part in near or part in far), None)
        if around in near and around not in far:
            beside.add(index)
    return beside


def _subtrees(leaves: Sequence[Leaf], indices: Iterable[int]) -> set[Any]:
    return {part for index in indices for part in _around(leaves[index])}


def _around(leaf: Leaf) -> list[Any]:
    """Returns the paths of the subtrees of an argument that hold a leaf, the smallest first."""
    return [tuple(leaf.keys[:end]) for end in range(len(leaf.keys) - 1, 1, -1)]


def guesses(arguments: Sequence[Argument], roles: Sequence[Role], carried: frozenset[int], batch: Selection | None) -> tuple[str, ...]:
    """Returns notes on guesses about the arguments that their structure does not show."""
    keys: dict[str, list[str]] = {}
    for argument in arguments:
        for aval, role in zip(argument.avals, roles[argument.span.start : argument.span.stop], strict=True):
            if role is Role.KEY and str(aval.dtype) == "uint32" and aval.shape:
                keys.setdefault(leaf_text(aval), []).append(argument.name)
    notes = [f"{listed(list(dict.fromkeys(names)))}: {text} is taken as a raw PRNG key." for text, names in keys.items()]
    own = [argument for argument in arguments if argument.leaves]
    taken = [argument.name for argument in own if Role.BATCH in roles[argument.span.start : argument.span.stop]]
    if batch is None and not carried and taken and not any(argument.is_object for argument in own):
        notes.append(
            f"{', '.join(taken)}: taken as the batch, and {own[0].name} not, as no argument comes back as a result; "
            "batch_argnums= says it otherwise."
        )
    single = [] if batch is not None else [argument.name for argument in own if _has_single_rows(argument, roles)]
    if single:
        notes.append(
            f"{', '.join(single)}: leaves of one row are not taken as the batch, whose rows are more; batch_argnums= says it otherwise."
        )
    return tuple(notes)


def _has_single_rows(argument: Argument, roles: Sequence[Role]) -> bool:
    """Returns whether leaves of an argument are no batch for their one row alone."""
    own = zip(argument.avals, roles[argument.span.start : argument.span.stop], strict=True)
    return not argument.is_object and any(role is Role.ARGUMENT and aval.shape[:1] == (1,) for aval, role in own)


def leaf_text(aval: Any) -> str:
    """Returns a text such as `uint32[2]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _batch_role(argument: Argument, leaf: Leaf, aval: Any) -> Role:
    if leaf.role is not None:
        return leaf.role
    if is_key(aval, _leaf_name(argument, leaf)):
        return Role.KEY
    return Role.BATCH if aval.shape else Role.ARGUMENT


def _leaf_name(argument: Argument, leaf: Leaf) -> str:
    return key_text(leaf.keys[-1]) if len(leaf.keys) > 2 else argument.name


def _state_roles(argument: Argument, default: Role) -> list[Role]:
    from_optax = _optax_leaves(argument.span)
    roles = []
    for offset, (leaf, aval) in enumerate(zip(argument.leaves, argument.avals, strict=True)):
        if leaf.role is not None:
            roles.append(leaf.role)
        elif argument.span.start + offset in from_optax:
            roles.append(Role.OPTIMIZER)
        else:
            roles.append(_named_role(argument, leaf, aval, default))
    return roles


def _named_role(argument: Argument, leaf: Leaf, aval: Any, default: Role) -> Role:
    if is_key(aval, _leaf_name(argument, leaf)):
        return Role.KEY
    for word in chain([argument.name], map(key_text, leaf.keys[2:])):
        known = _ROLE_OF_NAME.get(word.lower())
        if known is not None:
            return known
    if not _is_of(aval.dtype, jnp.inexact) or not aval.shape:
        return Role.STATE
    return default


def _optax_leaves(span: Span) -> frozenset[int]:
    """Returns the flat leaves that lie in a state of optax."""
    kind = span.tree.node_data()
    if kind is None:
        return frozenset()
    if kind[0].__module__.startswith("optax"):
        return frozenset(range(span.start, span.stop))
    return frozenset().union(*[_optax_leaves(child) for child in children(span)]) if _has_inner_nodes(span.tree) else frozenset()


def _has_linen_node(tree: Any) -> bool:
    """Returns whether a structure contains a TrainState, a FrozenDict or a metadata box."""
    kind = tree.node_data()
    if kind is None or not flax_is_used():
        return False
    if issubclass(kind[0], _linen_kinds()):
        return True
    return _has_inner_nodes(tree) and any(_has_linen_node(child) for child in tree.children())


@lru_cache(maxsize=1)
def _linen_kinds() -> tuple[type, ...]:
    from flax.core import FrozenDict, meta
    from flax.training.train_state import TrainState

    return TrainState, FrozenDict, meta.AxisMetadata


def _has_inner_nodes(tree: Any) -> bool:
    """Returns whether a node has more than leaves below it."""
    return bool(tree.num_nodes > tree.num_leaves + 1)

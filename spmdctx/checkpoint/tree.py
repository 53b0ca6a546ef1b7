"""A training state as arrays by path: converts its leaves for storage, and restores them to their kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx.errors import CheckpointError, message
from spmdctx.trace.capture.capture import flattening_of
from spmdctx.trace.capture.structure import path_text

_VALUE = "value"


class Stored(NamedTuple):
    """The stored form of a leaf: its bytes as an array; `key` is the type of random keys, whose raw numbers are stored."""

    shape: tuple[int, ...]
    dtype: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" of {self.key}" if self.key else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class StateTree:
    """A state and its leaves by path: nnx objects, pytrees such as a linen TrainState, or trees that mix them.

    Paths equal those of plans if the state is a dict by the names of the step's arguments: `model/layers/0/up/kernel`.

    Args:
        state: the state; leaves are arrays, random keys, numbers, or shapes (`jax.ShapeDtypeStruct`).

    Attributes:
        paths: the path of each leaf.
        leaves: the leaves.
        returned: the paths of leaves outside of nnx objects; `filled` cannot change these in place, and returns new ones.
    """

    def __init__(self, state: Any) -> None:
        self._flattening = flattening_of(((state,), {}))
        leaves = self._flattening.leaves
        self.paths: tuple[str, ...] = tuple(path_text(leaf.keys[2:]) or _VALUE for leaf in leaves)
        self.leaves: tuple[Any, ...] = tuple(leaf.value for leaf in leaves)
        self.returned: tuple[str, ...] = tuple(path for path, leaf in zip(self.paths, leaves, strict=True) if not leaf.owned)
        twice = [path for path in self.paths if self.paths.count(path) > 1] if len(set(self.paths)) < len(self.paths) else []
        if twice:
            raise CheckpointError("Two leaves of the state have the same path.", got=twice[0], fix="rename a key that holds a slash")

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Returns the state with these leaves in it; nnx objects are the caller's own, changed in place."""
        (state,), _ = self._flattening.filled(leaves)
        return state


def stored_form(path: str, leaf: Any) -> Stored:
    """Returns the form in which a leaf, real or abstract, is stored.

    Raises:
        TypeError: the leaf is not an array, key or number.
    """
    if isinstance(leaf, bool | int | float | complex):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(message("A checkpoint holds arrays, random keys and numbers.", where=path, got=type(leaf).__name__))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        abstract = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Stored(tuple(abstract.shape), str(abstract.dtype), str(leaf.dtype))
    return Stored(tuple(leaf.shape), str(leaf.dtype))


def has_no_part(leaf: Any) -> bool:
    """Returns whether a leaf lies on devices of other processes alone, as those of other stages of a pipeline do."""
    return isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices


def to_stored(leaf: Any, *, is_shared: bool) -> Any:
    """Returns the array that is stored for a leaf.

    An array that each of several processes holds by itself should be equal in all of them; that of process 0 is stored.

    Args:
        leaf: the leaf.
        is_shared: whether some process has no part of it, so that the others hold it for all.
    """
    if isinstance(leaf, jax.Array):
        array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return np.asarray(array) if jax.process_count() > 1 and array.is_fully_addressable and not is_shared else array
    return np.array(leaf)  # a copy: the user may change theirs while it is written


def target_sharding(leaf: Any, given: Any) -> Any:
    """Returns the sharding to which a leaf is restored.

    Returns None for a leaf that goes through the host, since it is small or belongs to this process alone.
    """
    if getattr(leaf, "weak_type", False) or isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "dtype"):
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    sharding = given if given is not None else getattr(leaf, "sharding", None)
    return None if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable) else sharding


def from_stored(leaf: Any, array: Any, form: Stored, given: Any) -> Any:
    """Returns the replacement of a leaf, of the same kind, from the stored array, which is on the host unless it has a target."""
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(array.item())
    if isinstance(leaf, np.ndarray | np.generic):
        return array[()] if isinstance(leaf, np.generic) else array
    if not isinstance(array, jax.Array):
        sharding = given if given is not None else getattr(leaf, "sharding", None)
        value = array.item() if getattr(leaf, "weak_type", False) and not form.shape else array
        array = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
    return jax.random.wrap_key_data(array, impl=leaf.dtype) if form.key else array


def shardings_by_path(shardings: Any) -> Mapping[str, Any]:
    """Returns a tree of shardings by path, as `ParallelStep.in_shardings` gives them: states stand for nnx objects."""
    entries = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda node: isinstance(node, jax.sharding.Sharding))[0]
    return {(path_text(keys).removesuffix(f"/{_VALUE}") or _VALUE): sharding for keys, sharding in entries}

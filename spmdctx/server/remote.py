"""Arrays that servers hold: handles that a step returns in place of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Owner(Protocol):
    """The run of a step that has returned handles."""

    def read(self, numbers: Sequence[int]) -> Mapping[int, jax.Array]:
        """Returns arrays by the number of the input; in "sync" all are of one version."""


class Origin(NamedTuple):
    """Where a handle comes from: the run of the step that has returned it, the number of the input that it is, and the steps done."""

    owner: Owner
    number: int
    steps: int


class RemoteArray:
    """An array of a step's state that a server holds; reading it gets it as the server has it now.

    Attributes:
        aval: its type.
        path: of the input of the step that it is.
        origin: what has returned it; None for one that no step has returned.
    """

    def __init__(self, aval: Any, path: str, origin: Origin | None, fetch: Callable[[], Any]) -> None:
        self.aval, self.path, self.origin, self._fetch = aval, path, origin, fetch

    @property
    def remote_aval(self) -> Any:
        """Its type, by which a step is traced."""
        return self.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """Its type."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """Its number of dimensions."""
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        """Its number of elements."""
        return int(np.prod(self.aval.shape))

    def fetch(self) -> jax.Array:
        """Returns its value."""
        found: jax.Array = self._fetch()
        return found

    def block_until_ready(self) -> RemoteArray:
        """Returns itself: a server that has the array has computed it."""
        return self

    def __jax_array__(self) -> jax.Array:
        return self.fetch()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.fetch(), dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return self.fetch()[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> jax.Array:
        return self.fetch()

    def __len__(self) -> int:
        return len(self.fetch())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetch())

    def __bool__(self) -> bool:
        return bool(self.fetch())

    def __eq__(self, other: object) -> Any:
        return self.fetch() == fetched(other)

    def __ne__(self, other: object) -> Any:
        return self.fetch() != fetched(other)

    __hash__ = object.__hash__  # of the handle: it may be a key while its value changes

    def __float__(self) -> float:
        return float(self.fetch())

    def __int__(self) -> int:
        return int(self.fetch())

    def __repr__(self) -> str:
        return f"RemoteArray({self.path}: {self.aval.str_short()})"


def _by_value(name: str) -> Callable[..., Any]:
    def run(self: RemoteArray, *others: Any) -> Any:
        return getattr(self.fetch(), name)(*map(fetched, others))

    return run


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(RemoteArray, f"__{_name}__", _by_value(f"__{_name}__"))
    setattr(RemoteArray, f"__r{_name}__", _by_value(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "neg", "abs"):
    setattr(RemoteArray, f"__{_name}__", _by_value(f"__{_name}__"))


def fetched(leaf: Any) -> Any:
    """Returns a leaf, or the value of one that a server holds."""
    return leaf.fetch() if isinstance(leaf, RemoteArray) else leaf


def all_fetched(leaves: Sequence[Any]) -> list[Any]:
    """Returns leaves, with the values of those that servers hold; in "sync" those that one step has returned are of one version."""
    origins = [leaf.origin for leaf in leaves if isinstance(leaf, RemoteArray) and leaf.origin is not None]
    owners = {id(origin.owner): origin.owner for origin in origins}
    found = {key: owner.read(sorted({origin.number for origin in origins if origin.owner is owner})) for key, owner in owners.items()}

    def value(leaf: Any) -> Any:
        origin = leaf.origin if isinstance(leaf, RemoteArray) else None
        return fetched(leaf) if origin is None else found[id(origin.owner)][origin.number]

    return [value(leaf) for leaf in leaves]

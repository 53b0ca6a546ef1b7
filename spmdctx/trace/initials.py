"""Initial values that modules of linen make while a mesh is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flax import linen
from flax.core import meta
from jax.extend import source_info_util

# The source line of a constraint is the user's, not that of what stands between the user's call and Flax.
source_info_util.register_exclusion(__file__)


@contextmanager
def unconstrained_initials() -> Iterator[None]:
    """Lets modules of linen make the initial values of named kernels without constraints, in the calls inside.

    `DenseGeneral`, and so attention, makes a matrix first and reshapes it: while a mesh is set, Flax would split the matrix by the names of
    the kernel's dimensions, of which there are more.
    """
    with linen.intercept_methods(_without_constraints):
        yield


def _without_constraints(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if not isinstance(module, linen.DenseGeneral):
        return call(*args, **kwargs)
    own = {name: getattr(module, name) for name in ("kernel_init", "bias_init")}
    for name, init in own.items():
        object.__setattr__(module, name, partial(_made_flat, init))
    try:
        return call(*args, **kwargs)
    finally:
        for name, init in own.items():
            object.__setattr__(module, name, init)


def _made_flat(init: Any, *args: Any, **kwargs: Any) -> Any:
    made = init(*args, **kwargs)
    return _Flat(made) if isinstance(made, meta.Partitioned) else made


class _Flat(meta.AxisMetadata[Any]):
    """A box whose value has another rank than its names, until it is replaced."""

    def __init__(self, box: meta.Partitioned[Any]) -> None:
        self.box = box

    def unbox(self) -> Any:
        return self.box.unbox(apply_constraint=False)

    def replace_boxed(self, val: Any) -> Any:
        return self.box.replace_boxed(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        return _Flat(self.box.add_axis(index, params))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        return _Flat(self.box.remove_axis(index, params))

"""One worker's copy of what stays with workers, which it renews by what servers have summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.server.program.capture import Local
from spmdctx.server.program.spec import raw, typed


class LocalState:
    """Arrays of one version, on this worker's devices. All workers have the same, since they run one program on the same values.

    Args:
        local: what stays with workers.
        shardings: of parameters on this worker's devices, by the number of the input; other arrays are split like the parameter to which
            they belong.
        whole: the sharding of all others; None for one device.

    Attributes:
        version: of the arrays; -1 while there are none.
        values: by the number of the input.
        results: of the steps that were done, by step and by the number of the result.
    """

    def __init__(self, local: Local, shardings: Mapping[int, Any] | None = None, whole: Any = None) -> None:
        self._local = local
        self._shardings = [self._sharding(place, shardings or {}, whole) for place in range(len(local.jaxpr.in_avals))]
        own = tuple(self._shardings[: len(local.held)])
        outputs = [*own, *[whole] * len(local.results)]
        self._run = jax.jit(jexc.jaxpr_as_fun(local.jaxpr), in_shardings=tuple(self._shardings), out_shardings=outputs)
        self.version = -1
        self.values: dict[int, jax.Array] = {}
        self.results: dict[int, dict[int, Any]] = {}

    def _sharding(self, place: int, shardings: Mapping[int, Any], whole: Any) -> Any:
        number = self._local.like.get(place)
        return whole if number is None else shardings.get(number, whole)

    def load(self, version: int, values: Mapping[int, Any]) -> None:
        """Takes over the arrays of a version, by the number of the input."""
        self.version = -1
        self.assign(values)
        self.version = version

    def assign(self, values: Mapping[int, Any]) -> None:
        """Takes over arrays in place of those of the present version."""
        for place, number in enumerate(self._local.held):
            if number in values:
                aval = self._local.jaxpr.in_avals[place]
                self.values[number] = jax.device_put(typed(values[number], aval), self._shardings[place])

    def advance(self, taken: Sequence[Any], given: Mapping[int, Any]) -> None:
        """Does one step.

        Args:
            taken: what servers have made in it, in the order of `Local.taken`.
            given: the inputs of the step that are no state, by number.
        """
        local = self._local
        avals = local.jaxpr.in_avals[len(local.held) + len(local.given) :]
        read = [self.values[number] for number in local.held] + [given[number] for number in local.given]
        read += [typed(value, aval) for value, aval in zip(taken, avals, strict=True)]
        made = self._run(*read)
        self.values = dict(zip(local.held, made, strict=False))
        found = made[len(local.held) :]
        if found:
            self.results[self.version] = {number: np.asarray(raw(value)) for number, value in zip(local.results, found, strict=True)}
        self.version += 1

    def forget(self, version: int) -> None:
        """Drops the results of the steps before a version."""
        self.results = {step: own for step, own in self.results.items() if step >= version}

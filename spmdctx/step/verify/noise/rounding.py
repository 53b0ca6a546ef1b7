"""Moves the values of an array by their rounding error, in random directions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_PLACES = 1 << 16
"""Places of the table of directions at which an equation's own directions may begin."""

_STRIDE, _NEXT = 40503, 25339
"""Odd numbers that scatter the places of equations, and those of a body's iterations."""


class Noise(NamedTuple):
    """One sample of rounding errors.

    Attributes:
        directions: 1 or -1 at random, int8; 2**16 more than the largest array has elements.
        amplitude: how many spacings values move, a float32; 1 for a rounding error of the values' type.
        place: where the directions of a body begin, a number or a traced uint32.
    """

    directions: Any
    amplitude: Any
    place: Any = 0

    @classmethod
    def sample(cls, number: int, largest: int, amplitude: float) -> Noise:
        """Draws sample `number` for arrays of up to `largest` elements."""
        bits = np.random.default_rng(number).integers(0, 2, largest + _PLACES, np.int8)
        return cls(2 * bits - 1, np.float32(amplitude))

    def at(self, number: Any) -> Noise:
        """Returns the noise of a body's iteration, or of a body."""
        return self._replace(place=jnp.uint32(self.place + jnp.uint32(number) * np.uint32(_NEXT)))

    def moved(self, values: Any, site: int, times: float = 1.0) -> Any:
        """Returns floating values, moved by `times` the amplitude; `site` is the number of the equation in its body."""
        if not values.size:
            return values
        place = (self.place + np.uint32(site * _STRIDE % _PLACES)) % np.uint32(_PLACES)
        return _moved(values, self.directions, place, self.amplitude * np.float32(times))


@jax.jit
def _moved(values: Any, directions: Any, place: Any, amplitude: Any) -> Any:
    """Moves values by `amplitude` times the spacing of their type.

    Whole numbers stay: they are counts, positions or scales, and sums of them are exact. Zeros, infinities and NaN stay too.
    Below the normal numbers of a narrow type the spacing no longer shrinks, and a value may round to zero. A compiler that keeps it
    wider does not round so.
    """
    kind = jnp.finfo(values.dtype)  # type: ignore[no-untyped-call]  # JAX gives it no types
    wide = jnp.float64 if kind.dtype == jnp.float64 else jnp.float32
    step = jax.lax.dynamic_slice(directions, (place,), (values.size,)).reshape(values.shape).astype(wide)
    step = step * (amplitude.astype(wide) * wide(kind.eps))
    if jnp.iscomplexobj(values):
        return values + values * step
    exact = values.astype(wide)
    stays = exact == jnp.round(exact)
    if kind.dtype.itemsize < 4:  # types with few digits have whole numbers only from 128 or 1024 on
        size = jnp.abs(exact)
        stays = (stays & (size < 2.0 ** (kind.nmant - 1))) | (size > wide(kind.max) / 4)
        moved = exact + jnp.sign(exact) * step * jnp.maximum(size, wide(kind.tiny))
        return jnp.where(stays, exact, jnp.where(exact * moved < 0, 0, moved)).astype(values.dtype)
    return jnp.where(stays, exact, exact + exact * step).astype(values.dtype)

"""Arithmetic whose last bit is the same on every processor.

Plans follow from it, and all hosts of a job must find the same plan. BLAS, `np.exp` and `np.power` have kernels per kind of processor,
which round differently. Sums of NumPy arrays, products and square roots do not.
"""

from __future__ import annotations

import numpy as np

from spmdctx.ir.arrays import FloatArray

_EXP_SQUARINGS = 6


def dot(first: FloatArray, second: FloatArray) -> float:
    """Returns the sum of the products of two vectors' elements."""
    return float((first * second).sum())


def length(vector: FloatArray) -> float:
    """Returns the Euclidean length."""
    return float(np.sqrt(dot(vector, vector)))


def power(base: FloatArray, num_squarings: int) -> FloatArray:
    """Returns `base ** (2 ** num_squarings)`."""
    for _ in range(num_squarings):
        base = base * base
    return base


def weight(exponent: FloatArray) -> FloatArray:
    """Returns about `exp(exponent)` for exponents from -8 to 0: `(1 + exponent / 64) ** 64`."""
    return power(1.0 + exponent / 2**_EXP_SQUARINGS, _EXP_SQUARINGS)

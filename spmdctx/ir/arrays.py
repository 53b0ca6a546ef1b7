"""Names of the types of arrays that modules hand to each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
WordArray = NDArray[np.uint64]
"""The type of hashes: arithmetic on them wraps around."""

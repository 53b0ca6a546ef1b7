"""What the solver finds has the same last bit whatever kernels the processor has."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmdctx.search.solver.problem.reproducible import dot, length, power, weight

PROGRAM = """
import numpy as np
from spmdctx.search.solver.problem.reproducible import dot, length, weight

rng = np.random.default_rng(0)
for size in (3, 17, 400, 1688):
    first, second = rng.normal(size=size), rng.normal(size=size)
    print(dot(first, second).hex(), length(first).hex(), weight(-8.0 * rng.random(size)).sum().hex())
"""


def printed(**environment: str) -> list[str]:
    root = str(Path(__file__).parents[4])
    env = {**os.environ, "PYTHONPATH": root, **environment}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True, timeout=120).stdout.split()


def test_processors_with_other_kernels_add_up_the_same():
    assert printed(OPENBLAS_CORETYPE="Prescott") == printed(OPENBLAS_CORETYPE="Haswell")


@pytest.mark.parametrize("exponent", [0.0, -0.01, -0.5, -2.0, -8.0])
def test_weights_fall_as_the_exponential_does(exponent):
    found = float(weight(np.array([exponent]))[0])
    assert math.exp(exponent) * 0.55 <= found <= math.exp(exponent) * (1 + 1e-12)


def test_products_lengths_and_powers_are_what_they_say():
    assert dot(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 11.0
    assert length(np.array([3.0, 4.0])) == 5.0
    assert power(np.array([2.0, -1.0]), 4).tolist() == [65536.0, 1.0]

"""The models of the zoo train on one device; what they are compared with must itself be sound."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.zoo import CASES, UNSPLIT, Case


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.name}-{one.flavor}")
def test_a_step_of_every_model_trains_in_float64(one: Case) -> None:
    with jax.enable_x64(True):
        step, args = one.make(UNSPLIT, np.float64)
        run = one.jit(step)
        losses = []
        for _ in range(3):
            result = run(*args)
            loss = result if one.flavor == "nnx" else result[1]
            args = args if one.flavor == "nnx" else (result[0], *args[1:])
            losses.append(float(loss))
    assert loss.dtype == np.float64
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]

"""The program that measures noise exists for whatever a step may hold, with the types of the step's results."""

import random

import jax
import pytest

from benchmarks.harness_cases import WRAPS, NotApplicable, all_harnesses, case_of
from spmdctx.step.verify.noise.callbacks import Answers
from spmdctx.step.verify.noise.interpreter import largest_array, noisy_program
from spmdctx.step.verify.noise.rounding import Noise

COUNT = 60


def traced(name, wrap):
    """The program of one of JAX's harnesses, or None if JAX does not trace it in this form."""
    try:
        function, args = case_of(name, wrap)
        return jax.make_jaxpr(function)(*args), args
    except (NotApplicable, TypeError, ValueError, NotImplementedError, AssertionError):
        return None


@pytest.mark.parametrize("wrap", WRAPS)
def test_jax_s_own_harnesses_have_a_noisy_program(wrap):
    names = random.Random(wrap).sample(sorted(all_harnesses()), COUNT)
    programs = [found for name in names if (found := traced(name, wrap)) is not None]
    assert len(programs) > COUNT // 5
    for jaxpr, args in programs:
        noise = Noise.sample(0, largest_array(jaxpr.jaxpr), 1.0)
        results = jax.eval_shape(noisy_program(jaxpr, Answers()), noise, *args)
        assert [(result.shape, result.dtype) for result in results] == [(aval.shape, aval.dtype) for aval in jaxpr.out_avals]

"""The noise floor of a result, element by element, and where rounding decides all of it."""

import numpy as np
import pytest

from spmdctx.step.verify.noise.floor import Floor

SIZE = 64


def floor_of(reference, moved, num_samples=24):
    """A floor whose samples move each element by up to `moved`, in random directions."""
    draw = np.random.default_rng(0)
    floor = Floor(reference, 1e-7)
    for _ in range(num_samples):
        floor.add(reference + moved * draw.uniform(-1, 1, reference.shape))
    return floor


@pytest.mark.parametrize(("times", "ok"), [(2.0, True), (20.0, False)])
def test_an_element_is_judged_by_its_own_noise(times, ok):
    reference, moved = np.ones(SIZE), np.full(SIZE, 1e-5)
    moved[0] = 1e-2
    difference = np.zeros(SIZE)
    difference[1] = times * moved[1]
    assert floor_of(reference, moved).excess(difference).ok == ok


@pytest.mark.parametrize(("times", "ok"), [(2.0, True), (4.0, True), (20.0, False)])
def test_where_rounding_moves_elements_by_the_whole_result_any_may_be_moved_so(times, ok):
    reference, moved = np.full(SIZE, 1e-3), np.full(SIZE, 1e-6)
    moved[:4] = 3e-3
    difference = np.zeros(SIZE)
    difference[10] = times * moved[0]
    assert floor_of(reference, moved).excess(difference).ok == ok


def test_an_infinite_sample_says_little_of_other_elements():
    floor = floor_of(np.ones(SIZE), np.full(SIZE, 1e-5))
    spoiled = np.ones(SIZE)
    spoiled[0] = np.inf
    floor.add(spoiled)
    difference = np.zeros(SIZE)
    difference[1:11] = 0.5
    assert not floor.excess(difference).ok

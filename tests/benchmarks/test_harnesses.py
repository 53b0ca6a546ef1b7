"""A sample of JAX's own harnesses, plain and under transformations: planned in five ways, and some of them run."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness_cases import WRAPS, all_harnesses, difference, lowest_precision, run_case, shape_of

PLANNED, RUN_EVERY, GROUPS = 300, 13, 12


def sample():
    """The same harnesses in every run: of each shape one, in an order that mixes primitives, with a wrapping each."""
    names = sorted(all_harnesses())
    random.Random(24).shuffle(names)
    distinct = list({shape_of(name): name for name in names}.values())[:PLANNED]
    return [(name, list(WRAPS)[index % len(WRAPS)]) for index, name in enumerate(distinct)]


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_harness_runs_in_every_way_and_gives_what_one_device_gives(group):
    cases = sample()[group::GROUPS]
    rows = [run_case(name, wrap, run=index % RUN_EVERY == 0) for index, (name, wrap) in enumerate(cases)]
    faults = {
        (row["name"], row["wrap"], way): one
        for row in rows
        for way, one in row.get("ways", {}).items()
        if one["outcome"] in ("crashed", "wrong")
    }
    assert not faults
    assert sum("ways" in row for row in rows) > len(rows) // 2
    assert any(one.get("split") for row in rows for one in row.get("ways", {}).values())


def test_harnesses_that_differ_by_type_or_compiler_have_one_shape():
    assert shape_of("abs_shape_float32_20_20_") == shape_of("abs_shape_bfloat16_20_20_") != shape_of("abs_shape_int8_20_2_")
    assert shape_of("pad_enable_xla_True") == shape_of("pad_enable_xla_False")


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (np.float32([1, np.nan, 3]), "NaN"),
        (np.float32([1, 2, np.inf]), "infinite"),
        (np.float32([1, 2.1, 3]), "differs by"),
        (np.float64([1, 2, 3]), "float64"),
        (np.float32([1, 2, 3 + 1e-6]), ""),
    ],
)
def test_a_difference_is_found_and_rounding_is_none(got, said):
    found = difference([got], [np.float32([1, 2, 3])], lowest_precision([np.float32(0)]))
    assert said in found
    assert bool(found) == bool(said)


def test_integers_and_keys_must_be_equal():
    assert difference(np.arange(3), np.arange(3), 0.0) == ""
    assert "1 of 3" in difference(np.array([0, 1, 3]), np.arange(3), 0.0)
    assert difference(jax.random.key(0), jax.random.key(1), 0.0)
    assert difference(jnp.zeros((2, 0)), jnp.zeros((2, 0)), 0.0) == ""

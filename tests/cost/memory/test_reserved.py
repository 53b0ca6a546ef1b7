"""Memory that is reserved for results: beside small temporaries it holds nothing, beside large ones it comes on top."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.audit import peak_bytes
from spmdctx.cost.memory.lives import Copy
from spmdctx.cost.memory.loops import ValueLife
from spmdctx.cost.memory.reserved import reserved_bytes
from spmdctx.machine.presets import PRESETS
from tests.audit.compile_only import need_tpu


def test_a_result_is_reserved_until_it_is_made():
    assert reserved_bytes([ValueLife(0, 2, 3)], [], [100], 4).tolist() == [100, 100, 0, 0]


@pytest.mark.parametrize(("size", "expected"), [(100, [0, 0, 0]), (60, [40, 40, 0]), (101, [100, 100, 0])])
def test_a_temporary_value_lies_in_the_place_of_a_result_that_is_no_smaller(size, expected):
    results, others = [ValueLife(0, 2, 3)], [Copy(0, 1, size)]
    assert reserved_bytes(results, others, [100], 4)[:3].tolist() == expected


def test_one_place_holds_one_value_at_a_time():
    results, others = [ValueLife(0, 4, 4)], [Copy(0, 2, 30), Copy(1, 3, 50)]
    assert reserved_bytes(results, others, [100], 5).tolist() == [70, 50, 50, 50, 0]


def test_values_of_many_sizes_never_take_more_than_there_is():
    random = np.random.default_rng(0)
    results = [ValueLife(number, 50, 60) for number in range(20)]
    others = [Copy(*sorted(random.integers(0, 50, 2).tolist()), int(random.integers(1, 1000))) for _ in range(200)]
    sizes = random.integers(1, 1000, 20).tolist()
    found = reserved_bytes(results, others, sizes, 61)
    assert (found >= 0).all()
    assert found[0] <= sum(sizes)
    assert not found[50:].any()


def _step(weights, x):
    def loss(weights):
        return sum(jnp.mean(jnp.tanh(x @ weight) ** 2) for weight in weights)

    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights))


X = jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
WEIGHTS = [jax.ShapeDtypeStruct((1024, 8192), jnp.float32)] * 4


def _plan(donated, machine="tpu-v5p"):
    return spmdctx.parallel(_step, parallel_mode="stand_alone", topology=machine, donate_argnums=donated).plan(WEIGHTS, X)


STATE_BYTES = sum(weight.size * 4 for weight in WEIGHTS)


def test_the_peak_counts_the_new_state_beside_the_old_one_from_the_start():
    kept, donated = _plan(()), _plan(0)
    assert kept.cost.memory_bytes - donated.cost.memory_bytes > 0.6 * STATE_BYTES
    assert kept.memory_profile[0] >= 1.9 * STATE_BYTES > donated.memory_profile[0]


@pytest.mark.parametrize(("donated", "is_told"), [((), True), (0, False)])
def test_a_note_tells_what_donated_state_would_save_where_a_peak_may_not_fit(donated, is_told):
    small = replace(PRESETS["tpu-v5p"], memory_bytes=_plan(donated).safe_memory_bytes - 2**20)
    found = _plan(donated, small)
    assert any("donate_argnums for the state saves them" in note for note in found.notes) == is_told
    assert any("memory" in note or "peak" in note for note in found.notes)


def test_the_compiled_program_holds_them_from_the_start():
    devices, peaks = need_tpu("v5p:2x2x1")[:1], []
    for donated in ((), (0,)):
        run = spmdctx.parallel(_step, parallel_mode="stand_alone", devices=devices, donate_argnums=donated)
        peaks.append(peak_bytes(run.lower(WEIGHTS, X).compile()))
    assert peaks[0] - peaks[1] > 0.6 * STATE_BYTES


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
def test_a_search_within_memory_counts_them(mode):
    def step(state, x):
        def loss(weights):
            y = x
            for up, down in weights:
                y = y + jnp.tanh(y @ up) @ down
            return jnp.mean(y**2)

        weights, momentum = state
        momentum = jax.tree.map(lambda own, slope: 0.9 * own + slope, momentum, jax.grad(loss)(weights))
        return jax.tree.map(lambda own, change: own - 0.1 * change, weights, momentum), momentum

    weights = [(jax.ShapeDtypeStruct((1024, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32))] * 2
    arguments = (weights, weights), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    options = {"parallel_mode": "auto_parallel", "search_mode": mode, "device_num": 8, "topology": "tpu-v5e"}
    free = spmdctx.plan(step, *arguments, **options)
    budget = int(0.9 * free.safe_memory_bytes)
    assert spmdctx.plan(step, *arguments, **options, memory_bytes=budget).safe_memory_bytes <= budget

"""A predicted peak is an interval: arguments are certain, and the rest may be larger by what was measured."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.xla.memory.spread import Spread, safe_bytes, spread_on

MIB = 2**20


def step(weights, x):
    return jnp.tanh(x @ weights) @ weights


SHAPES = jax.ShapeDtypeStruct((1024, 1024), "float32"), jax.ShapeDtypeStruct((2**16, 1024), "float32")


def test_small_programs_are_allowed_a_larger_share():
    spread = Spread(0.1, 0.2, 64 * MIB)
    assert [round(spread.of(size * MIB) / MIB) for size in (0, 100, 1000)] == [0, 30, 164]
    shares = [spread.least_share(size * MIB) for size in (100, 1000, 10000)]
    assert shares == sorted(shares, reverse=True)
    assert all(share * size * MIB <= spread.of(size * MIB) for share, size in zip(shares, (100, 1000, 10000), strict=True))


@pytest.mark.parametrize(
    ("device", "is_known"), [("tpu-v5e", True), ("tpu-v6e-measured", True), ("a100", True), ("cpu", False), ("my machine", False)]
)
def test_nothing_is_allowed_for_where_nothing_was_measured(device, is_known):
    assert bool(spread_on(device).of(MIB)) == is_known
    assert safe_bytes(10 * MIB, 10 * MIB, device) == 10 * MIB


@pytest.mark.parametrize("topology", ["tpu-v5p", "h100", "cpu"])
def test_a_plan_has_both_ends_of_its_peak(topology):
    plan = spmdctx.plan(step, *SHAPES, parallel_mode="data_parallel", device_num=8, topology=topology)
    arguments = sum(leaf.local_bytes(plan.logical_mesh) for leaf in plan.inputs)
    beside = plan.cost.memory_bytes - arguments
    assert plan.safe_memory_bytes == pytest.approx(plan.cost.memory_bytes + spread_on(topology).of(beside), abs=1)
    assert plan.to_dict()["safe_memory_bytes"] == plan.safe_memory_bytes
    assert ("(safe)" in str(plan)) == (topology != "cpu")


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
def test_a_budget_is_kept_by_the_safe_end(mode):
    options = {"parallel_mode": "auto_parallel", "search_mode": mode, "device_num": 8, "topology": "h100"}
    free = spmdctx.plan(step, *SHAPES, **options)
    assert spmdctx.plan(step, *SHAPES, **options, memory_bytes=free.safe_memory_bytes).assignment == free.assignment
    assert free.cost.memory_bytes < free.safe_memory_bytes - 1
    with pytest.raises(spmdctx.InfeasibleError, match=rf"memory_bytes(=| >= ){free.safe_memory_bytes}\b"):
        spmdctx.plan(step, *SHAPES, **options, memory_bytes=free.safe_memory_bytes - 1)


def test_a_plan_that_may_be_over_its_budget_says_so():
    options = {"parallel_mode": "data_parallel", "device_num": 8, "topology": "h100"}
    free = spmdctx.plan(step, *SHAPES, **options)
    budget = (free.cost.memory_bytes + free.safe_memory_bytes) // 2
    (note,) = [note for note in spmdctx.plan(step, *SHAPES, **options, memory_bytes=budget).notes if "may be up to" in note]
    assert f"over memory_bytes={budget}" in note

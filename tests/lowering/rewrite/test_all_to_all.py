"""enable_alltoall: no compiled program holds an all-to-all unless the user allows it; then the mixture of experts does."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from tests.audit.compile_only import need_gpu, need_tpu
from tests.zoo import case

TARGETS = {"cpu": (jax.devices, "cpu"), "tpu": (need_tpu, "tpu-v5e"), "gpu": (need_gpu, "h100")}


def all_to_alls(name, backend, allowed, **options):
    """How many all-to-alls are planned, and how many are in the compiled program."""
    one = case(name, "pytree")
    split = one.split("strategies" if options["parallel_mode"] == "semi_auto_parallel" else "none", 8)
    step, args = one.make(split, np.float32)
    if options["parallel_mode"] == "semi_auto_parallel":
        options["dataset_strategy"] = one.dataset_strategy(split, args)
    devices, topology = TARGETS[backend]
    parallel = spmdctx.parallel(step, devices=devices(), topology=topology, enable_alltoall=allowed, **options)
    # XLA for GPU 0.10.2 finds no tiles for products of these odd sizes.
    others = {"xla_gpu_enable_triton_gemm": False} if backend == "gpu" else None
    text = parallel.lower(*args).compile(compiler_options=others).as_text()
    planned = sum(row.kind == "all_to_all" for row in parallel.plan(*args).collectives)
    return planned, len(re.findall(r" (?:ragged-)?all-to-all(?:-start)?\(", text))


@pytest.mark.parametrize("backend", TARGETS)
def test_experts_are_dispatched_by_all_to_all_only_where_that_is_allowed(backend):
    planned, compiled = all_to_alls("moe", backend, True, parallel_mode="semi_auto_parallel")
    assert planned
    assert compiled
    assert all_to_alls("moe", backend, False, parallel_mode="semi_auto_parallel") == (0, 0)


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("name", ["moe", "gnn", "tied"])
def test_no_search_brings_one_in(name, backend):
    options = {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming"}
    assert all_to_alls(name, backend, False, **options) == (0, 0)


def moved(x):
    """A large tensor that is split by rows, then by columns."""
    return spmdctx.shard(jnp.cos, ((1, 8),))(spmdctx.shard(jnp.sin, ((8, 1),))(x) * 2)


def test_a_plan_without_says_what_it_would_save():
    options = {"parallel_mode": "semi_auto_parallel", "device_num": 8, "topology": "h100"}
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    without, allowed = (spmdctx.parallel(moved, enable_alltoall=own, **options).plan(x) for own in (False, True))
    (note,) = [note for note in without.notes if "enable_alltoall" in note]
    share = float(note.split("would make a step ")[1].split(" ")[0]) / 100
    assert share == pytest.approx(1 - allowed.cost.total_s / without.cost.total_s, rel=0.01)
    assert {row.kind for row in without.collectives} == {"all_gather"}
    assert {row.kind for row in allowed.collectives} == {"all_to_all"}
    assert not [note for note in allowed.notes if "enable_alltoall" in note]

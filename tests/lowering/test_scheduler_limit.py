"""The limit that the TPU compiler's scheduler is given, and what it makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx.lowering import compile as compile_module
from spmdctx.lowering import program_options, scheduler_limit
from spmdctx.lowering.scheduler_limit import scheduler_options
from spmdctx.machine.presets import GIB
from tests.audit.compile_only import need_gpu, need_tpu
from tests.own_process import numbers

LIMIT, RERUNS = "xla_tpu_scheduler_percent_shared_memory_limit", "xla_latency_hiding_scheduler_rerun"


def percent(peak_bytes, device_bytes, budget_bytes=None):
    return scheduler_options(need_tpu(), peak_bytes, device_bytes, budget_bytes).get(LIMIT)


def test_the_limit_is_a_little_above_the_planned_peak():
    assert percent(50 * GIB, 100 * GIB) == 54
    assert percent(10, 100 * GIB) == 1


def test_the_limit_is_within_the_budget_but_not_below_the_plan():
    assert percent(50 * GIB, 100 * GIB, budget_bytes=52 * GIB) == 52
    assert percent(50 * GIB, 100 * GIB, budget_bytes=90 * GIB) == 54
    assert percent(50 * GIB, 100 * GIB, budget_bytes=1) == 50


def test_a_plan_that_needs_all_of_the_device_has_no_limit_but_the_compilers():
    assert scheduler_options(need_tpu(), 95 * GIB, 100 * GIB) == {}


def test_one_device_and_other_backends_are_told_nothing():
    assert scheduler_options(need_tpu()[:1], GIB, 100 * GIB) == {}
    assert scheduler_options(need_gpu(), GIB, 100 * GIB) == {}
    assert scheduler_options(jax.devices(), GIB, 100 * GIB) == {}


def test_a_compiler_that_does_not_know_the_options_is_told_nothing(monkeypatch):
    monkeypatch.setattr(scheduler_limit, "LIMIT", "xla_tpu_option_of_another_version")
    assert scheduler_options(need_tpu(), GIB, 100 * GIB) == {}


def step(weights, x):
    return jax.tree.map(lambda weight: weight - 0.1 * jnp.mean(x), weights), jnp.mean(x @ weights["a"] @ weights["b"])


def arguments():
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(16, 32)), "b": rng.normal(size=(32, 16))}, rng.normal(size=(64, 16))


def entry_options(monkeypatch, **options):
    """The options of a step as its program gets them."""
    seen = []
    jit_program = compile_module.jit_program
    monkeypatch.setattr(compile_module, "jit_program", lambda *args: seen.append(args[-1]) or jit_program(*args))
    spmdctx.parallel(step, parallel_mode="data_parallel", **options).lower(*arguments())
    return seen[-1].compiler_options


def test_a_step_for_tpu_devices_gives_the_limit_of_its_own_plan(monkeypatch):
    assert entry_options(monkeypatch, devices=need_tpu()) == {LIMIT: 1, RERUNS: 10}


def test_a_step_for_devices_of_unknown_memory_gives_none(monkeypatch):
    monkeypatch.setattr("spmdctx.machine.devices._PRESET_OF_WORD", ())
    assert entry_options(monkeypatch, devices=need_tpu()) == {}


def test_a_step_with_a_limit_alone_runs_inside_another_jit_without_it(monkeypatch):
    told = []
    # An option that the CPU compiler accepts too.
    monkeypatch.setattr(
        program_options, "scheduler_options", lambda *_: told.append(True) or {"xla_gpu_all_reduce_combine_threshold_bytes": 1}
    )
    parallel = spmdctx.parallel(step, parallel_mode="data_parallel")
    expected = step(*arguments())[1]
    for _ in range(3):
        np.testing.assert_allclose(parallel(*arguments())[1], expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(parallel)(*arguments())[1], expected, rtol=1e-5)
    assert told


PEAKS = """
from benchmarks import fidelity_plans
from spmdctx.audit import peak_bytes
from spmdctx.lowering import scheduler_limit

job = next(job for job in fidelity_plans.jobs("v5e:2x4") if fidelity_plans.name_of(job) == "mlp sharding_propagation 4x2 none seed 0")
for slack in (0.9, 10.0):
    scheduler_limit._SLACK = slack
    built = fidelity_plans.build(job)
    print(peak_bytes(built.lowered.compile()))
"""


def test_the_compiled_program_takes_less_for_a_lower_limit():
    need_tpu()
    (limited,), (free,) = numbers(PEAKS)
    assert limited < 0.95 * free

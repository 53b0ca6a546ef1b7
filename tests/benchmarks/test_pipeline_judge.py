"""The judge of pipelines: alike programs are judged once, judged seconds drive the schedule, and reductions can be counted once."""

from dataclasses import replace

import numpy as np
import pytest

import spmdctx
from benchmarks.judge import Judgement, judge_text
from benchmarks.judge_links import H100_HOSTS, HOP_S, collective_s
from benchmarks.pipeline_judge import (
    Judged,
    Machine,
    judged,
    judged_seconds,
    peak_bytes,
    planned_seconds,
    programs_of,
    reduced_once,
    step_s,
)
from spmdctx.machine.presets import topology
from spmdctx.models import DecoderConfig, abstract_program
from spmdctx.models.training import train_step
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.stages.memory import memory_of
from tests.audit.compile_only import need_tpu

V5P = topology("tpu-v5p")
TINY = DecoderConfig(
    vocab_size=64, width=64, num_layers=6, num_heads=4, num_kv_heads=4, hidden=128, max_seq=32, dtype="bfloat16", remat=True
)


@pytest.fixture(scope="module")
def pipeline():
    """Three stages of 8 devices, whose plans are for a v5p."""
    _, arguments = abstract_program(TINY, 32, 32)
    step = spmdctx.parallel(
        train_step, parallel_mode="auto_parallel", device_num=24, topology="tpu-v5p", pipeline_stages=3, grad_accumulation_step=4
    )
    return step._entry_of(arguments, {}).pipeline


def test_planned_seconds_give_the_planned_step(pipeline):
    assert step_s(pipeline, planned_seconds(pipeline), V5P) == pytest.approx(pipeline.total_s)


def test_slower_programs_and_more_micro_batches_make_a_step_longer(pipeline):
    seconds = planned_seconds(pipeline)
    twice = step_s(pipeline, {name: 2 * own for name, own in seconds.items()}, V5P)
    assert pipeline.total_s < twice <= 2 * pipeline.total_s
    long = step_s(pipeline, seconds, V5P, Scheduler("1f1b").schedule(3, 8, []))
    assert long - pipeline.total_s >= 4 * (seconds["forward1"] + seconds["backward1"])


def rows_of(pipeline, exposed_s=0.0):
    """Every program as judged at its planned seconds, with a reduction over groups of two in backward passes."""
    found = []
    for name, one in programs_of(pipeline).items():
        cost = one.plan.cost
        traffic = ({"kind": "all_reduce", "group_size": 2, "exposed_s": exposed_s},)
        made = Judgement(0.0, cost.total_s + exposed_s, 0.0, 0.0, 0.0, 0.0, cost.memory_bytes, 0.0, traffic, 0)
        found.append(Judged(name, (name,), cost.total_s, cost.memory_bytes, made))
    return found


def test_reductions_that_are_done_once_leave_the_micro_batches(pipeline):
    rows = rows_of(pipeline, 1e-3)
    each, once = judged_seconds(rows, "roofline_s"), reduced_once(rows, 2, "roofline_s")
    assert each["backward1"] - once["backward1"] == pytest.approx(1e-3)
    assert once["after0_1"] - each["after0_1"] == pytest.approx(1e-3)
    assert each["forward1"] == once["forward1"]
    assert reduced_once(rows, 4, "roofline_s") == each


def test_programs_as_planned_have_the_planned_peak(pipeline):
    rows = rows_of(pipeline)
    planned = max(own.peak_bytes for own in memory_of(pipeline))
    assert peak_bytes(pipeline, rows) == planned
    larger = [row._replace(judgement=replace(row.judgement, peak_bytes=row.judgement.peak_bytes + 1000)) for row in rows]
    assert peak_bytes(pipeline, larger) == planned + 1000


def test_a_compiled_stage_is_judged_near_its_plan(pipeline, tmp_path):
    need_tpu()
    machine = Machine.of("tpu-v5p", 8)
    made = judged(programs_of(pipeline)["forward1"].lower, machine, tmp_path / "kept", tmp_path)
    assert made.cycles_s > 0
    assert made.peak_bytes > 0
    # What was compiled is kept.
    assert judged(programs_of(pipeline)["forward1"].lower, machine, tmp_path / "kept", tmp_path / "nowhere") == made


DOT = """HloModule jit_f, is_scheduled=true

%gemm (a: bf16[512,1024], b: bf16[1024,2048]) -> bf16[512,2048] {
  %a = bf16[512,1024]{1,0} parameter(0)
  %b = bf16[1024,2048]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p0: bf16[512,1024], p1: bf16[1024,2048]) -> bf16[512,2048] {
  %p0 = bf16[512,1024]{1,0} parameter(0)
  %p1 = bf16[1024,2048]{1,0} parameter(1)
  ROOT %f = bf16[512,2048]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%gemm
}
"""


def test_products_of_gpu_programs_are_counted():
    made = judge_text(DOT, H100_HOSTS)
    assert made.flops == 2 * 512 * 1024 * 2048
    assert made.cycles_s == 0.0
    machine, moved = topology("h100"), 2 * (512 * 1024 + 1024 * 2048 + 512 * 2048)
    longest = max(made.flops / machine.peak_flops_per_s, moved / machine.memory_bytes_per_s)
    assert made.roofline_s == pytest.approx(longest + 2.5 * machine.kernel_s)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all_reduce", np.arange(8).reshape(1, 8), 14 * HOP_S + 2 * 7 / 8 * 1e9 / 450e9),
        ("all_gather", np.array([[0, 8], [1, 9]]), HOP_S + 0.5 * 1e9 / 50e9),
        ("reduce_scatter", np.arange(16).reshape(1, 16), 8 * HOP_S + 7 / 8 * 1e9 / 450e9 + 1 / 8 / 2 * 1e9 / 50e9),
        ("collective_permute", np.array([[0, 1]]), HOP_S + 1e9 / 450e9),
    ],
)
def test_collectives_of_gpus_take_nvlink_inside_and_the_network_between_hosts(kind, groups, seconds):
    assert collective_s(kind, 1e9, groups, replace(H100_HOSTS, num_devices=16)) == pytest.approx(seconds)


def test_the_judge_compiles_the_programs_that_run():
    """With the layouts that the forward pass chooses, and with the options of programs of steps."""
    devices = need_tpu("v5p:2x2x1")
    _, arguments = abstract_program(replace(TINY, num_layers=2), 16, 32)
    step = spmdctx.parallel(
        train_step, parallel_mode="auto_parallel", devices=devices, topology="tpu-v5p", pipeline_stages=2, grad_accumulation_step=4
    )
    run = step.lower(*arguments)
    for name, one in programs_of(step._entry_of(arguments, {}).pipeline).items():
        own = one.lower(devices[:2])
        assert own.as_text() == run[name].as_text(), name
        assert own._lowering._compiler_options_kvs == run[name]._lowering._compiler_options_kvs, name

"""The judge reads compiled TPU programs: matrix FLOPs, HBM bytes, cycles, loops, what of the collectives compute hides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.judge import Judgement, judge_text, roofline_of
from benchmarks.judge_compile import compile_program, key_of, read_peak
from benchmarks.judge_links import HOP_S, Slice, collective_s, slice_of
from benchmarks.judge_work import work_of
from spmdctx.audit.hlo import read_module
from spmdctx.machine.presets import topology
from tests.audit.compile_only import need_tpu

MIB = 2**20
GRID = Slice("v5e", np.array([(x, y, 0) for y in range(4) for x in range(2)]))
CUBE = Slice("v5p", np.array([(x, y, z) for z in range(4) for y in range(4) for x in range(4)]))
ALL = np.arange(8).reshape(1, 8)
LINK = 45e9

PROGRAM = """HloModule jit_step, is_scheduled=true

%dot_body (a: bf16[1024,2048], b: bf16[2048,4096]) -> bf16[1024,4096] {
  %a = bf16[1024,2048]{1,0:T(8,128)} parameter(0)
  %b = bf16[2048,4096]{1,0:T(8,128)} parameter(1)
  ROOT %convolution.1 = bf16[1024,4096]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

%start_body (w: bf16[256,4096]) -> (bf16[256,4096], bf16[2048,4096]) {
  %w = bf16[256,4096]{1,0} parameter(0)
  %all-gather.1 = bf16[2048,4096]{1,0} all-gather(%w), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, SPREAD
  ROOT %start = (bf16[256,4096]{1,0}, bf16[2048,4096]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done_body (w.1: bf16[256,4096]) -> bf16[2048,4096] {
  %w.1 = bf16[256,4096]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[2048,4096]{1,0} all-gather(%w.1), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, SPREAD
}

%all-reduce-scatter.body (g: bf16[2048,4096]) -> bf16[256,4096] {
  %g = bf16[2048,4096]{1,0} parameter(0)
  ROOT %all-reduce.9 = bf16[2048,4096]{1,0} all-reduce(%g), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%condition (state: (s32[], bf16[1024,4096])) -> pred[] {
  %state = (s32[], bf16[1024,4096]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

%body (state.1: (s32[], bf16[1024,4096])) -> (s32[], bf16[1024,4096]) {
  %state.1 = (s32[], bf16[1024,4096]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one)
  %x = bf16[1024,4096]{1,0} get-tuple-element(%state.1), index=1
  %sum = bf16[1024,4096]{1,0} all-reduce(%x), channel_id=4, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %near = bf16[1024,4096]{1,0:T(8,128)S(1)} negate(%sum), backend_config={"window_config":{"estimated_cycles":"30000"}}
  ROOT %pair = (s32[], bf16[1024,4096]) tuple(%next, %near)
}

ENTRY %main (x.0: bf16[1024,2048], w.0: bf16[256,4096], g.0: bf16[2048,4096]) -> bf16[1024,4096] {
  %x.0 = bf16[1024,2048]{1,0} parameter(0)
  %w.0 = bf16[256,4096]{1,0} parameter(1)
  %g.0 = bf16[2048,4096]{1,0} parameter(2)
  %begin = (bf16[256,4096]{1,0}, bf16[2048,4096]{1,0}) fusion(%w.0), kind=kCustom, calls=%start_body
  %dot = bf16[1024,4096]{1,0} fusion(%x.0, %g.0), kind=kOutput, calls=%dot_body, \
backend_config={"window_config":{"estimated_cycles":"150000"}}
  %whole = bf16[2048,4096]{1,0} fusion(%begin), kind=kCustom, calls=%done_body
  %scattered = bf16[256,4096]{1,0} fusion(%g.0), kind=kCustom, calls=%all-reduce-scatter.body
  %zero = s32[] constant(0)
  %first = (s32[], bf16[1024,4096]) tuple(%zero, %dot)
  %loop = (s32[], bf16[1024,4096]) while(%first), condition=%condition, body=%body
  ROOT %out = bf16[1024,4096]{1,0} get-tuple-element(%loop), index=1
}
""".replace("SPREAD", 'backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}')

GATHERED = 2048 * 4096 * 2
DOT_S = 2 * 1024 * 2048 * 4096 / 197e12
NEGATE_S = 1024 * 4096 * 2 / 819e9
RING_S = 7 * HOP_S + GATHERED * 7 / 8 / (2 * LINK)
REDUCE_S = 2 * 4 * HOP_S + 2 * (1024 * 4096 * 2) * 7 / 8 / (2 * LINK)


@pytest.fixture(scope="module")
def judgement():
    return judge_text(PROGRAM, GRID, peak_bytes=7)


def row(judgement, kind, is_async=False):
    (found,) = [one for one in judgement.traffic if one["kind"] == kind and one["is_async"] is is_async]
    return found


def test_loops_count_as_often_as_they_run(judgement):
    assert row(judgement, "all_reduce")["count"] == 3
    assert judgement.cycles_compute_s == pytest.approx((150000 + 3 * 30000) / 1.5e9)


def test_matrix_products_count_two_flops_per_multiplication(judgement):
    assert judgement.flops == 2 * 1024 * 2048 * 4096


def test_the_roofline_counts_flops_or_the_bytes_that_are_in_hbm(judgement):
    # The negation reads HBM and writes on-chip memory; the loop's counter moves a few bytes.
    assert judgement.roofline_compute_s == pytest.approx(DOT_S + 3 * NEGATE_S, rel=1e-4)


def test_an_asynchronous_gather_is_exposed_by_what_no_compute_covers(judgement):
    found = row(judgement, "all_gather", is_async=True)
    assert (found["count"], found["payload_bytes"]) == (1, GATHERED)
    assert found["seconds"] == pytest.approx(RING_S)
    assert found["exposed_s"] == pytest.approx(RING_S - DOT_S)


def test_a_gather_that_is_spread_over_a_loop_counts_once(judgement):
    step = """  %w.2 = bf16[256,4096]{1,0} parameter(1)
  %between = bf16[2048,4096]{1,0} fusion(%w.2), kind=kCustom, calls=%done_body
  %near ="""
    again = judge_text(PROGRAM.replace("  %near =", step, 1), GRID)
    assert row(again, "all_gather", is_async=True)["count"] == row(judgement, "all_gather", is_async=True)["count"] == 1


def test_synchronous_collectives_are_exposed_whole(judgement):
    assert row(judgement, "reduce_scatter")["exposed_s"] == pytest.approx(RING_S)
    assert row(judgement, "all_reduce")["exposed_s"] == pytest.approx(3 * REDUCE_S)
    assert judgement.roofline_s == pytest.approx(judgement.roofline_compute_s + judgement.roofline_exposed_s)


def test_a_judgement_survives_json(judgement):
    assert Judgement.from_dict(judgement.to_dict()) == judgement
    assert judgement.peak_bytes == 7


def test_batched_products_written_as_dilated_convolutions_count_once_per_batch():
    text = """HloModule m

ENTRY %main (q: bf16[32,2048,128], k: bf16[32,2048,128]) -> bf16[32,2048,2048] {
  %q = bf16[32,2048,128]{2,1,0} parameter(0)
  %k = bf16[32,2048,128]{2,1,0} parameter(1)
  ROOT %c = bf16[32,2048,2048]{2,1,0} convolution(%q, %k), window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf
}
"""
    module = read_module(text)
    entry = module.computations[module.entry]
    assert work_of(entry.instructions["c"], entry, module).flops == 2 * 32 * 2048 * 2048 * 128


FORWARD = """  %x = bf16[32,14,14,96]{3,0,2,1} parameter(0)
  %w = bf16[7,7,1,96]{3,2,1,0} parameter(1)
  ROOT %c = bf16[32,14,14,96]{3,0,2,1} convolution(%x, %w), window={size=7x7 pad=3_3x3_3}, dim_labels=b01f_01io->b01f, GROUPS
"""
BACKWARD = """  %x = bf16[32,14,14,96]{3,0,2,1} parameter(0)
  %w = bf16[32,14,14,96]{3,0,2,1} parameter(1)
  ROOT %c = bf16[7,7,1,96]{3,2,1,0} convolution(%x, %w), window={size=14x14 pad=3_3x3_3}, dim_labels=f01b_i01o->01bf, GROUPS
"""


@pytest.mark.parametrize(("body", "groups", "share"), [(FORWARD, "feature_group_count=96", 0.24), (BACKWARD, "batch_group_count=96", 0.85)])
def test_convolutions_of_single_channels_occupy_the_vector_unit(body, groups, share):
    module = read_module(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body.replace('GROUPS', groups)}}}\n")
    entry = module.computations[module.entry]
    work = work_of(entry.instructions["c"], entry, module)
    assert work.flops == 0.0
    assert work.lane_flops == pytest.approx(2 * 32 * 14 * 14 * 49 * 128 / share)  # 96 channels fill one set of lanes
    v5e = topology("tpu-v5e")
    assert roofline_of(v5e)(work) == pytest.approx(work.lane_flops / v5e.vector_flops_per_s)


def test_convolutions_of_groups_are_products():
    body = FORWARD.replace("bf16[7,7,1,96]", "bf16[7,7,4,96]").replace("GROUPS", "feature_group_count=24")
    module = read_module(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}}}\n")
    entry = module.computations[module.entry]
    work = work_of(entry.instructions["c"], entry, module)
    assert work.flops > 0.0
    assert work.lane_flops == 0.0


@pytest.mark.parametrize(("name", "times"), [("conv_general_dilated", 2), ("bqd,bkd->bqk/dot_general", 1)])
def test_convolutions_that_put_elements_apart_multiply_some_zeros(name, times):
    text = """HloModule m

ENTRY %main (g: bf16[16,32,32,128], w: bf16[1,1,128,256]) -> bf16[16,63,63,256] {
  %g = bf16[16,32,32,128]{3,2,1,0} parameter(0)
  %w = bf16[1,1,128,256]{3,2,1,0} parameter(1)
  ROOT %c = bf16[16,63,63,256]{3,2,1,0} convolution(%g, %w), window={size=1x1 lhs_dilate=2x2}, METADATA
}
"""
    about = f'dim_labels=b01f_01io->b01f, metadata={{op_name="{name}"}}'
    module = read_module(text.replace("METADATA", about))
    entry = module.computations[module.entry]
    assert work_of(entry.instructions["c"], entry, module).flops == times * 2 * 16 * 32 * 32 * 128 * 256


def test_the_kernel_of_a_ragged_product_multiplies_each_row_once():
    text = """HloModule m

ENTRY %main (sizes: s32[8], x: bf16[4096,1024], w: bf16[8,1024,512]) -> bf16[4096,512] {
  %sizes = s32[8]{0} parameter(0)
  %x = bf16[4096,1024]{1,0} parameter(1)
  %w = bf16[8,1024,512]{2,1,0} parameter(2)
  %ragged-dot-metadata = s32[9]{0} custom-call(%sizes), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none.1 = bf16[4096,512]{1,0} custom-call(%ragged-dot-metadata, %x, %w), custom_call_target="tpu_custom_call"
}
"""
    module = read_module(text)
    entry = module.computations[module.entry]
    work = work_of(entry.instructions["ragged-dot-none.1"], entry, module)
    assert work.flops == 2 * 4096 * 1024 * 512
    assert work.hbm_bytes == 4 * 9 + 2 * (4096 * 1024 + 8 * 1024 * 512 + 4096 * 512)
    assert work_of(entry.instructions["ragged-dot-metadata"], entry, module)[:3] == (0, 0, 0)


def test_a_fusion_that_slices_an_operand_reads_the_slice():
    text = """HloModule m

%body (stack: f32[8,1024,1024], i: s32[]) -> f32[1,1024,1024] {
  %stack = f32[8,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,1024,1024]{2,1,0} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={1,1024,1024}
}

ENTRY %main (p: f32[8,1024,1024], j: s32[]) -> f32[1,1024,1024] {
  %p = f32[8,1024,1024]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %f = f32[1,1024,1024]{2,1,0} fusion(%p, %j), kind=kLoop, calls=%body
}
"""
    module = read_module(text)
    entry = module.computations[module.entry]
    assert work_of(entry.instructions["f"], entry, module).hbm_bytes == pytest.approx(8 * MIB, rel=1e-5)


def test_a_fusion_whose_inner_fusion_slices_an_operand_reads_the_slice():
    module = read_module("""HloModule sliced, is_scheduled=true

%pick (big: f32[32,256,512], i: s32[]) -> bf16[4,256,512] {
  %big = f32[32,256,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[4,256,512]{2,1,0} dynamic-slice(%big, %i, %i, %i), dynamic_slice_sizes={4,256,512}
  ROOT %c = bf16[4,256,512]{2,1,0} convert(%s)
}

%twice (big.1: f32[32,256,512], i.1: s32[]) -> bf16[4,256,512] {
  %big.1 = f32[32,256,512]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %inner = bf16[4,256,512]{2,1,0} fusion(%big.1, %i.1), kind=kLoop, calls=%pick
  ROOT %n = bf16[4,256,512]{2,1,0} negate(%inner)
}

ENTRY %main (big.2: f32[32,256,512], i.2: s32[]) -> bf16[4,256,512] {
  %big.2 = f32[32,256,512]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  ROOT %out = bf16[4,256,512]{2,1,0} fusion(%big.2, %i.2), kind=kLoop, calls=%twice
}
""")
    entry = module.computations["main"]
    picked = 4 * 256 * 512
    assert work_of(entry.instructions["out"], entry, module).hbm_bytes == picked * 4 + 4 + picked * 2


@pytest.mark.parametrize(
    ("kind", "groups", "chips", "seconds"),
    [
        pytest.param("all_reduce", ALL, GRID, 2 * 4 * HOP_S + 2 * MIB * 7 / 8 / (2 * LINK), id="both open directions"),
        pytest.param("all_gather", ALL, GRID, 7 * HOP_S + MIB * 7 / 8 / (2 * LINK), id="one ring through the grid"),
        pytest.param("all_gather", ALL.reshape(4, 2), GRID, HOP_S + MIB / 2 / LINK, id="a pair has one link"),
        pytest.param("collective_permute", ALL.reshape(4, 2), GRID, HOP_S + MIB / LINK, id="permute"),
        pytest.param("all_reduce", np.arange(64).reshape(1, 64), CUBE, 18 * HOP_S + 2 * MIB * 63 / 64 / (6 * 90e9), id="closed cube"),
        pytest.param("all_to_all", np.arange(64).reshape(16, 4), CUBE, 4 * HOP_S + MIB * 4 / 4 / 2 / 90e9, id="closed ring"),
        pytest.param("all_gather", np.arange(8).reshape(8, 1), GRID, 0.0, id="alone"),
    ],
)
def test_collectives_take_the_links_of_their_group(kind, groups, chips, seconds):
    assert collective_s(kind, MIB, groups, chips) == pytest.approx(seconds)


def test_the_peak_is_what_the_compiler_assigned_in_hbm():
    report = "Memory Space: vmem (color=1)\nTotal bytes: 7 (7B)\n\nMemory Space: default (color=0)\nTotal bytes: 93424224 (89.10MiB)\n"
    assert read_peak(report) == 93424224


def test_outcomes_are_kept_by_job_and_kind_of_compilation():
    job = {"topology": "v5e:2x4", "model": "mlp"}
    assert key_of(job, "m", False) == key_of(dict(reversed(job.items())), "m", False)
    assert len({key_of(job, "m", False), key_of(job, "m", True), key_of({**job, "model": "moe"}, "m", False)}) == 3


def test_a_program_is_judged_alike_before_and_after_its_code_is_generated(tmp_path):
    devices = need_tpu()
    rows = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    lowered = jax.jit(lambda x, y: x.T @ y, in_shardings=(rows, rows), out_shardings=rows).lower(x, x)
    chips = slice_of("v5e:2x4", devices)
    programs = [compile_program(lowered, tmp_path / str(codegen), codegen=codegen) for codegen in (False, True)]
    early, late = (judge_text(text, chips, peak) for text, peak in programs)
    assert early.traffic == late.traffic
    assert early.traffic[0]["kind"] == "reduce_scatter"
    assert early.flops == late.flops == 2 * 1024 // 8 * 512 * 512
    assert early.roofline_s == pytest.approx(late.roofline_s)
    assert early.cycles_s == 0 < late.cycles_s
    assert early.peak_bytes == late.peak_bytes >= 2 * 128 * 512 * 2

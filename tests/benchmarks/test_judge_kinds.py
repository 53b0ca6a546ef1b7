"""The judge reads programs for GPUs: calls of libraries, products of Triton, what is written in place; and tells kinds of ops apart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from benchmarks.judge import judge_text, roofline_of
from benchmarks.judge_kinds import judged_by_kind, judged_instructions, planned_by_kind, planned_kind
from benchmarks.judge_links import H100_HOSTS
from spmdctx.audit.hlo import read_module
from spmdctx.machine.presets import topology

GEMM = """  %a = bf16[64,512]{1,0} parameter(0)
  %b = bf16[512,256]{1,0} parameter(1)
  ROOT %call = (bf16[64,256]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
"""
GEMM_WORK = 2 * 64 * 512 * 256, 2 * (64 * 512 + 512 * 256 + 64 * 256)
CONV_FLOPS = 2 * 4 * 8 * 8 * 32 * 16 * 9 * (22 / 24) ** 2
CONV_BYTES = 2 * (4 * 8 * 8 * 16 + 4 * 8 * 8 * 32 + 32 * 9 * 16)
PICTURES, KERNEL, MADE = "bf16[4,8,8,16]{3,2,1,0}", "bf16[32,3,3,16]{3,2,1,0}", "bf16[4,8,8,32]{3,2,1,0}"


def program(body, *computations):
    return read_module("HloModule m, is_scheduled=true\n\n" + "\n".join(computations) + f"\nENTRY %main () -> f32[] {{\n{body}}}\n")


def convolution(name, first, second, result):
    return f"""  %x = {first} parameter(0)
  %y = {second} parameter(1)
  ROOT %conv = ({result}, u8[4096]{{0}}) custom-call(%x, %y), window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{name}"
"""


def only(module):
    (found,) = [one for one in judged_instructions(module) if one.work.hbm_bytes]
    return found


@pytest.mark.parametrize(
    ("body", "kind", "work"),
    [
        pytest.param(GEMM, "product", GEMM_WORK, id="product"),
        pytest.param(convolution("Forward", PICTURES, KERNEL, MADE), "convolution", (CONV_FLOPS, CONV_BYTES), id="convolution"),
        pytest.param(convolution("BackwardInput", MADE, KERNEL, PICTURES), "convolution", (CONV_FLOPS, CONV_BYTES), id="input's gradient"),
        pytest.param(
            convolution("BackwardFilter", PICTURES, MADE, KERNEL), "convolution", (CONV_FLOPS, CONV_BYTES), id="kernel's gradient"
        ),
    ],
)
def test_calls_of_libraries_count_without_their_workspace(body, kind, work):
    found = only(program(body))
    assert found.kind == kind
    assert (found.work.flops, found.work.hbm_bytes) == pytest.approx(work)


def test_products_of_wide_numbers_take_the_rate_of_wide_numbers():
    h100 = replace(topology("h100"), kernel_s=0.0)
    narrow, wide = (only(program(GEMM.replace("bf16", dtype))).work for dtype in ("bf16", "f32"))
    assert (narrow.wide_flops, wide.wide_flops) == (0.0, wide.flops)
    seconds = roofline_of(h100)
    large = narrow._replace(flops=1e12), wide._replace(flops=1e12, wide_flops=1e12)
    assert seconds(large[1]) / seconds(large[0]) == pytest.approx(h100.peak_flops_per_s / h100.float32_flops_per_s)


TRITON = """%product (p: bf16[64,512], q: bf16[512,256]) -> bf16[64,256] {
  %p = bf16[64,512]{1,0} parameter(0)
  %q = bf16[512,256]{1,0} parameter(1)
  ROOT %dot = bf16[64,256]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
ADDING = """%adding (old: f32[1000,8], at: s32[40,1], new: f32[40,8]) -> f32[1000,8] {
  %old = f32[1000,8]{1,0} parameter(0)
  %at = s32[40,1]{1,0} parameter(1)
  %new = f32[40,8]{1,0} parameter(2)
  ROOT %add = f32[1000,8]{1,0} scatter(%old, %at, %new), update_window_dims={1}, inserted_window_dims={0}, to_apply=%sum
}
"""
WRITING = """%writing (one: f32[100,8], two: f32[100,8], row: f32[1,8], i: s32[]) -> (f32[100,8], f32[800]) {
  %one = f32[100,8]{1,0} parameter(0)
  %two = f32[100,8]{1,0} parameter(1)
  %row = f32[1,8]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %first = f32[100,8]{1,0} dynamic-update-slice(%one, %row, %i, %i)
  %second = f32[100,8]{1,0} dynamic-update-slice(%two, %row, %i, %i)
  %flat = f32[800]{0} bitcast(%second)
  ROOT %both = (f32[100,8]{1,0}, f32[800]{0}) tuple(%first, %flat)
}
"""
FUSION = "  ROOT %f = {shape} fusion({operands}), kind=kCustom, calls=%{name}\n"


def parameters(*shapes):
    return "".join(f"  %p{place} = {shape} parameter({place})\n" for place, shape in enumerate(shapes))


@pytest.mark.parametrize(
    ("computation", "shapes", "result", "kind", "work"),
    [
        pytest.param(TRITON, ("bf16[64,512]{1,0}", "bf16[512,256]{1,0}"), "bf16[64,256]{1,0}", "product", GEMM_WORK, id="Triton's product"),
        pytest.param(
            ADDING,
            ("f32[1000,8]{1,0}", "s32[40,1]{1,0}", "f32[40,8]{1,0}"),
            "f32[1000,8]{1,0}",
            "gather",
            (0.0, 40 * 4 + 3 * 40 * 8 * 4),
            id="a scatter meets its rows only",
        ),
        pytest.param(
            WRITING,
            ("f32[100,8]{1,0}", "f32[100,8]{1,0}", "f32[1,8]{1,0}", "s32[]"),
            "(f32[100,8]{1,0}, f32[800]{0})",
            "fusion",
            (0.0, 2 * 2 * 8 * 4),
            id="two updates in place",
        ),
    ],
)
def test_fusions_of_gpus_count_what_they_compute_and_move(computation, shapes, result, kind, work):
    name = computation.partition(" ")[0].removeprefix("%")
    operands = ", ".join(f"%p{place}" for place in range(len(shapes)))
    found = only(program(parameters(*shapes) + FUSION.format(shape=result, operands=operands, name=name), computation))
    assert found.kind == kind
    assert (found.work.flops, found.work.hbm_bytes) == pytest.approx(work)


KINDS = """HloModule kinds, is_scheduled=true

%turn (t: f32[128,256]) -> f32[256,128] {
  %t = f32[128,256]{1,0} parameter(0)
  ROOT %turned = f32[256,128]{1,0} transpose(%t), dimensions={1,0}
}

%body (state: (s32[], f32[128,256])) -> (s32[], f32[128,256]) {
  %state = (s32[], f32[128,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[128,256]{1,0} get-tuple-element(%state), index=1
  %minus = f32[128,256]{1,0} negate(%x)
  ROOT %next = (s32[], f32[128,256]{1,0}) tuple(%i, %minus)
}

%condition (state.1: (s32[], f32[128,256])) -> pred[] {
  %state.1 = (s32[], f32[128,256]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: f32[128,256], zero: f32[], first: (s32[], f32[128,256])) -> f32[256,128] {
  %p = f32[128,256]{1,0} parameter(0)
  %zero = f32[] parameter(1)
  %first = (s32[], f32[128,256]{1,0}) parameter(2)
  %loop = (s32[], f32[128,256]{1,0}) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %sums = f32[128]{0} reduce(%p, %zero), dimensions={1}, to_apply=%add
  %order = f32[128,256]{1,0} sort(%p), dimensions={1}, to_apply=%less
  %all = f32[128,256]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %t.1 = f32[256,128]{1,0} fusion(%all), kind=kInput, calls=%turn
}
"""


def test_seconds_add_up_by_kind_with_loops_and_without_collectives():
    h100, size = topology("h100"), 128 * 256 * 4
    seconds = judged_by_kind(read_module(KINDS), roofline_of(h100))
    moved = {"fusion": 5 * 2 * size, "reduction": (size + 4 + 128 * 4) / h100.gathered_share, "sort": 2 * size, "transpose": 2 * size}
    kernels = {kind: (5 if kind == "fusion" else 1) * h100.kernel_s for kind in moved}
    assert seconds == pytest.approx({kind: one / h100.memory_bytes_per_s + kernels[kind] for kind, one in moved.items()})
    assert sum(seconds.values()) == pytest.approx(judge_text(KINDS, H100_HOSTS).roofline_compute_s)


def test_copies_beside_the_computation_are_of_no_kind():
    body = """  %p = f32[128,256]{1,0} parameter(0)
  %start = (f32[128,256]{1,0}, f32[128,256]{1,0:S(1)}, u32[]) copy-start(%p)
  %near = f32[128,256]{1,0:S(1)} copy-done(%start)
  ROOT %n = f32[128,256]{1,0} negate(%near)
"""
    v5e = topology("tpu-v5e")
    assert judged_by_kind(program(body), roofline_of(v5e)) == {"fusion": pytest.approx(128 * 256 * 4 / v5e.memory_bytes_per_s)}


def test_planned_seconds_by_kind_are_those_of_the_plan():
    def step(x, table, rows):
        return jnp.sort(jnp.sum(x @ x.T, 0)), table.at[rows].add(x)

    one = spmdctx.parallel(step, parallel_mode="auto_parallel", topology="h100", devices=jax.devices()[:1])
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((512, 64), "float32"), ((1000, 64), "float32"), ((512,), "int32"))]
    entry = one._entry_of(shapes, {})
    kinds = planned_by_kind((entry.planned, entry.environment.settings.topology))
    assert sum(kinds.values()) == pytest.approx(one.plan(*shapes).cost.total_s)
    assert {kind for kind, seconds in kinds.items() if seconds} >= {"product", "reduction", "gather", "sort"}


def test_a_fusion_beside_others_counts_where_it_starts():
    text = program(
        parameters("f32[1000,8]{1,0}", "s32[40,1]{1,0}", "f32[40,8]{1,0}")
        + """  %start = ((f32[1000,8]{1,0}, s32[40,1]{1,0}, \
f32[40,8]{1,0}), f32[1000,8]{1,0}, u32[]) fusion-start(%p0, %p1, %p2), kind=kLoop, calls=%adding
  ROOT %end = f32[1000,8]{1,0} fusion-done(%start)
""",
        ADDING,
    )
    assert only(text).work.hbm_bytes == 40 * 4 + 3 * 40 * 8 * 4


@pytest.mark.parametrize(
    ("primitive", "kind"),
    [
        ("dot_general", "product"),
        ("conv_general_dilated", "convolution"),
        ("cumsum", "reduction"),
        ("exp", "fusion"),
        ("copy", "transpose"),
    ],
)
def test_ops_of_a_plan_have_kinds(primitive, kind):
    assert planned_kind(primitive) == kind

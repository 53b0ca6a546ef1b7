from collections import Counter

import jax
import pytest

from spmdctx.audit import parse_collectives
from spmdctx.ir.mesh import LogicalMesh
from tests.audit import programs
from tests.audit.programs import DATA, DATA_MODEL

ATTRIBUTES = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"


def entry(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n{before}\nENTRY %main (a: f32[32,256], b: f32[8]) -> f32[] {{\n{body}\n}}\n"


def facts(text, mesh=DATA):
    return [(one.kind, one.axes, one.payload_bytes, one.dtype, one.repeats) for one in parse_collectives(text, mesh)]


def counted(text, mesh):
    return Counter((one.kind, one.axes, one.payload_bytes, one.repeats) for one in parse_collectives(text, mesh))


PARAMETERS = ("%a = f32[32,256]{1,0} parameter(0)", "%b = f32[8]{0} parameter(1)")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%r = f32[32,256]{{1,0}} all-reduce(%a), {ATTRIBUTES}, to_apply=%add", ("all_reduce", 32768)),
        (f"%r = f32[256,256]{{1,0}} all-gather(%a), {ATTRIBUTES}, dimensions={{0}}", ("all_gather", 262144)),
        (f"%r = f32[4,256]{{1,0}} reduce-scatter(%a), {ATTRIBUTES}, dimensions={{0}}, to_apply=%add", ("reduce_scatter", 32768)),
        (f"%r = f32[32,256]{{1,0}} all-to-all(%a), {ATTRIBUTES}, dimensions={{0}}", ("all_to_all", 32768)),
        (
            "%r = f32[32,256]{1,0} collective-permute(%a), channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
            ("collective_permute", 32768),
        ),
    ],
)
def test_the_payload_is_the_operand_or_the_result_of_a_gather(line, expected):
    assert facts(entry(*PARAMETERS, line)) == [(expected[0], ("data",), expected[1], "float32", 1)]


def test_each_tensor_of_a_combined_collective_is_its_own():
    line = f"%r = (f32[32,256]{{1,0}}, f32[8]{{0}}) all-reduce(%a, %b), {ATTRIBUTES}, to_apply=%add"
    assert [one[2] for one in facts(entry(*PARAMETERS, line))] == [32768, 32]


@pytest.mark.parametrize(
    ("start", "done", "payload"),
    [
        ("f32[32,256] all-reduce-start(%a)", "f32[32,256] all-reduce-done(%s)", 32768),
        ("(f32[32,256], f32[256,256]) all-gather-start(%a)", "f32[256,256] all-gather-done(%s)", 262144),
        ("((f32[32,256]), f32[4,256]) reduce-scatter-start(%a)", "f32[4,256] reduce-scatter-done(%s)", 32768),
        ("((f32[32,256]), f32[32,256]) all-to-all-start(%a)", "f32[32,256] all-to-all-done(%s)", 32768),
    ],
)
def test_a_started_and_awaited_collective_counts_once(start, done, payload):
    found = facts(entry(*PARAMETERS, f"%s = {start}, {ATTRIBUTES}", f"%d = {done}"))
    assert [one[2] for one in found] == [payload]


def test_a_wrapped_async_collective_counts_once():
    wrapped = "%wrapped (p: f32[32,256]) -> f32[32,256] {\n  %p = f32[32,256]{1,0} parameter(0)\n"
    wrapped += f"  ROOT %r = f32[32,256]{{1,0}} all-reduce(%p), {ATTRIBUTES}, to_apply=%add\n}}\n"
    start = "%s = ((f32[32,256]), f32[32,256], s32[]) async-start(%a), calls=%wrapped"
    done = "%d = f32[32,256] async-done(%s), calls=%wrapped"
    assert len(facts(entry(*PARAMETERS, start, done, before=wrapped))) == 1


def test_the_copies_in_async_fusions_count_once():
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'
    fused = "".join(
        f"%fused.{index} (p.{index}: f32[32,256]) -> f32[256,256] {{\n  %p.{index} = f32[32,256]{{1,0}} parameter(0)\n"
        f"  ROOT %g.{index} = f32[256,256]{{1,0}} all-gather(%p.{index}), {ATTRIBUTES}, dimensions={{0}}, {config}\n}}\n"
        for index in range(3)
    )
    calls = [f"%f.{index} = f32[256,256] fusion(%a), kind=kCustom, calls=%fused.{index}" for index in range(3)]
    assert facts(entry(*PARAMETERS, *calls, before=fused)) == [("all_gather", ("data",), 262144, "float32", 1)]


def test_an_all_reduce_scatter_fusion_is_a_reduce_scatter_per_operand():
    fused = "%all-reduce-scatter.2 (input_0: f32[32,256], input_1: f32[8]) -> (f32[4,256], f32[1]) {\n"
    fused += "  %input_0 = f32[32,256]{1,0} parameter(0)\n  %input_1 = f32[8]{0} parameter(1)\n"
    fused += f"  %r = (f32[32,256]{{1,0}}, f32[8]{{0}}) all-reduce(%input_0, %input_1), {ATTRIBUTES}, to_apply=%add\n}}\n"
    call = "%f = (f32[4,256], f32[1]) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.2"
    found = facts(entry(*PARAMETERS, call, before=fused))
    assert [one[::2] for one in found] == [("reduce_scatter", 32768, 1), ("reduce_scatter", 32, 1)]


def test_a_concatenation_made_to_reduce_at_once_is_taken_apart():
    fused = "%joined (p.0: f32[8192], p.1: f32[8]) -> f32[8200] {\n  %p.0 = f32[8192]{0} parameter(0)\n"
    fused += "  %p.1 = f32[8]{0} parameter(1)\n  ROOT %c = f32[8200]{0} concatenate(%p.0, %p.1), dimensions={0}\n}\n"
    flat = "%flat = f32[8192]{0} bitcast(%a)"
    call = "%f = f32[8200]{0} fusion(%flat, %b), kind=kLoop, calls=%joined"
    reduce = f"%r = f32[8200]{{0}} all-reduce(%f), {ATTRIBUTES}, to_apply=%add"
    assert [one[2] for one in facts(entry(*PARAMETERS, flat, call, reduce, before=fused))] == [32768, 32]


def test_a_concatenation_of_the_program_is_one_tensor():
    joined = '%c = f32[16]{0} concatenate(%b, %b), dimensions={0}, metadata={op_name="jit(step)/shard_map/concatenate"}'
    reduce = f"%r = f32[16]{{0}} all-reduce(%c), {ATTRIBUTES}, to_apply=%add"
    assert [one[2] for one in facts(entry(*PARAMETERS, joined, reduce))] == [64]


def test_the_pieces_of_an_all_to_all_are_one_tensor():
    line = f"%r = (f32[32,256], f32[32,256]) all-to-all(%a, %a), {ATTRIBUTES}"
    assert [one[2] for one in facts(entry(*PARAMETERS, line))] == [65536]


def test_a_collective_among_groups_of_one_is_none():
    line = "%r = f32[32,256]{1,0} all-reduce(%a), channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    assert facts(entry(*PARAMETERS, line)) == []


def test_groups_along_different_axes_of_one_permuted_mesh_are_told_apart():
    groups = "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0))"
    lines = [f"%r{axis} = f32[8]{{0}} all-reduce(%b), channel_id=1, {groups} {{'axis_{axis}'}}, to_apply=%add" for axis in (0, 2)]
    assert [axes for _, axes, *_ in facts(entry(*PARAMETERS, *lines), DATA_MODEL)] == [("model",), ("data",)]


def test_a_program_of_one_device_has_none():
    text = jax.jit(lambda x: x.sum()).lower(programs.shape(4)).compile().as_text()
    assert parse_collectives(text, LogicalMesh.of({"data": 1})) == ()


def test_terms_added_up_before_a_reduction_are_counted():
    sums = ("%x = f32[32,256] add(%a, %a)", "%y = f32[32,256] copy(%x)", "%z = f32[32,256] add(%y, %a)")
    line = f"%r = f32[32,256]{{1,0}} all-reduce(%z), {ATTRIBUTES}, to_apply=%add"
    assert [one.summands for one in parse_collectives(entry(*PARAMETERS, *sums, line), DATA)] == [3]


class TestCompiledForCpu:
    def test_data_parallel_gradients(self):
        text = programs.data_parallel(jax.devices())
        assert counted(text, DATA) == {("all_reduce", ("data",), 4, 1): 1, ("all_reduce", ("data",), 131072, 1): 2}

    def test_bfloat16_gradients_are_reduced_in_float32(self):
        found = parse_collectives(programs.data_parallel(jax.devices(), "bfloat16"), DATA)
        assert Counter((one.payload_bytes, one.dtype) for one in found) == {(4, "float32"): 1, (131072, "float32"): 2}

    def test_a_megatron_pair(self):
        assert counted(programs.megatron(jax.devices()), DATA_MODEL) == {
            ("all_reduce", ("model",), 32768, 1): 2,
            ("all_reduce", ("data",), 262144, 1): 2,
            ("all_reduce", ("data",), 4, 1): 1,
        }

    def test_sharded_weights(self):
        assert counted(programs.sharded_weights(jax.devices()), DATA) == {
            ("all_gather", ("data",), 262144, 1): 2,
            ("all_reduce", ("data",), 262144, 1): 2,
        }

    def test_loops_multiply(self):
        assert counted(programs.nested_scans(jax.devices()), DATA_MODEL) == {("all_reduce", ("model",), 32768, 15): 1}

    def test_a_gradient_is_reduced_in_each_iteration(self):
        assert counted(programs.accumulated(jax.devices()), DATA) == {("all_reduce", ("data",), 262144, 4): 1}

    def test_branches_and_loops_of_unknown_length_are_noted(self):
        found = parse_collectives(programs.branch_and_while(jax.devices()), DATA_MODEL)
        assert sorted((one.note, one.payload_bytes, one.repeats) for one in found) == [
            ("in a branch", 32768, 1),
            ("in a loop of unknown length", 32768, 1),
        ]

    def test_a_dimension_change_is_an_all_to_all(self):
        assert counted(programs.moved_dimension(jax.devices()), DATA) == {("all_to_all", ("data",), 4096, 1): 1}

    def test_each_row_has_its_source_line(self):
        found = parse_collectives(programs.megatron(jax.devices()), DATA_MODEL)
        assert all(one.source.startswith("programs.py:") for one in found)
        assert len({one.source for one in found}) > 1

from pathlib import Path

import pytest

import spmdctx
from spmdctx.audit.hlo import Leaf, read_instruction, read_leaves, read_module

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/home/me/train.py"
2 "/home/me/venv/lib/python3.11/site-packages/flax/nnx/linear.py"

FunctionNames
1 "step"
2 "Linear.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=340 end_line=340 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="neg" stack_frame_id=2}
  ROOT %z = f32[8]{0} add(%x, %y), metadata={op_name="add" stack_frame_id=1}
}
"""


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("f32[4,8]{1,0}", (Leaf("float32", (4, 8)),)),
        ("bf16[16,16]{1,0:T(8,128)(2,1)S(1)}", (Leaf("bfloat16", (16, 16)),)),
        ("(f32[]{:T(128)}, /*index=1*/s32[2]{0:S(4)}, u32[]{:S(2)})", (Leaf("float32", ()), Leaf("int32", (2,)), Leaf("uint32", ()))),
        ("(token[], pred[3]{0})", (Leaf("bool", (3,)),)),
        ("f8e4m3fn[2]{0}", (Leaf("float8_e4m3fn", (2,)),)),
    ],
)
def test_a_shape_is_read_with_its_layout_left_out(text, leaves):
    assert read_leaves(text) == leaves


def test_the_bytes_of_an_array_follow_from_its_dtype():
    assert [Leaf(dtype, (3, 2)).num_bytes for dtype in ("bool", "bfloat16", "float32", "complex128")] == [6, 12, 24, 96]


def test_an_instruction_keeps_operands_and_attributes_apart():
    line = "  ROOT %all-reduce.1 = (f32[4]{0:T(8)}, s32[]) all-reduce(%dot.1, /*index=1*/%b), channel_id=1, to_apply=%add.clone"
    found = read_instruction(line)
    assert (found.name, found.opcode, found.operands, found.is_root) == ("all-reduce.1", "all-reduce", ("dot.1", "b"), True)
    assert found.leaves == (Leaf("float32", (4,)), Leaf("int32", ()))
    assert found.callees("to_apply") == ("add.clone",)


@pytest.mark.parametrize("line", ["", "}", "  some words", "  %x = f32[2]{0}"])
def test_a_line_without_an_instruction_gives_none(line):
    assert read_instruction(line) is None


def test_branches_are_read_from_a_braced_list():
    found = read_instruction("  %c = f32[4]{0} conditional(%p, %a, %b), branch_computations={%no.1, %yes.2}")
    assert found.callees("branch_computations") == ("no.1", "yes.2")


def test_a_module_has_its_computations_and_its_entry():
    module = read_module(MODULE)
    assert module.entry == "main"
    assert set(module.computations) == {"main", "fused"}
    assert module.computations["fused"].parameters == ("p",)
    assert module.computations["main"].root.name == "z"


def test_the_source_line_is_the_innermost_outside_installed_packages():
    module = read_module(MODULE)
    main = module.computations["main"].instructions
    assert [module.source(main[name]) for name in "xyz"] == ["", "train.py:12", "train.py:12"]


@pytest.mark.parametrize(("file", "line"), [("step/entry.py", ""), ("models/decoder.py", "decoder.py:12")])
def test_lines_of_the_machinery_are_none_of_a_user(file, line):
    module = read_module(MODULE.replace("/home/me/train.py", str(Path(spmdctx.__file__).parent / file)))
    add = module.computations["main"].instructions["z"]
    assert module.source(add, of_users=True) == line
    assert module.source(add) == f"{Path(file).name}:12"


def test_a_source_line_written_out_is_read_too():
    module = read_module(MODULE)
    line = '  %y = f32[8]{0} negate(%x), metadata={op_name="neg" source_file="/a/b/net.py" source_line=7}'
    assert module.source(read_instruction(line)) == "net.py:7"


WRAPPED = MODULE.replace(
    '%y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="neg" stack_frame_id=2}',
    '%y = f32[8]{0} custom-call(%x), frontend_attributes={own={\n"block": "{\\"q\\": {"\n}\n}}, metadata={stack_frame_id=2}',
)


def test_an_instruction_of_several_lines_ends_no_computation():
    module = read_module(WRAPPED)
    assert list(module.computations["main"].instructions) == ["x", "y", "z"]
    own = module.computations["main"].instructions["y"]
    assert own.operands == ("x",)
    assert module.source(own) == read_module(MODULE).source(read_module(MODULE).computations["main"].instructions["y"])
    assert module.computations["fused"] == read_module(MODULE).computations["fused"]


def test_a_computation_of_another_thread_ends():
    module = read_module(MODULE.replace("negate(%p)\n}", 'negate(%p)\n}, execution_thread="sparse"'))
    assert list(module.computations["main"].instructions) == ["x", "y", "z"]

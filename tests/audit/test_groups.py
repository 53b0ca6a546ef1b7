import pytest

from spmdctx.audit.groups import in_mesh_order, read_groups, read_span
from spmdctx.ir.mesh import LogicalMesh

MESH = LogicalMesh.of({"a": 2, "b": 2, "c": 2})


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("c",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("{{0,1,2,3},{4,5,6,7}}", ("b", "c")),
        ("{{0,1,4,5},{2,3,6,7}}", ("a", "c")),
        ("{{0,1,2,3,4,5,6,7}}", ("a", "b", "c")),
        ("{}", ("a", "b", "c")),
        ("[4,2]<=[8]", ("c",)),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("[4,2]<=[2,2,2]T(2,1,0)", ("a",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("[1,8]<=[8]", ("a", "b", "c")),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", ("a", "b", "c")),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0','axis_1'}", ("a", "b", "c")),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", ("a",)),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}", ("a",)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", ("a", "c")),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0'}", ("a", "c")),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("a",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("a",)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("b",)),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("c",)),
    ],
)
def test_each_syntax_of_replica_groups_names_the_mesh_axes(groups, axes):
    span = read_span(f", channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add", MESH)
    assert span.axes == axes
    assert (span.group_size, span.note) == (MESH.num_slices(axes), "")


@pytest.mark.parametrize("groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['axis_0'=8,'axis_1'=1] {'axis_1'}"])
def test_groups_of_one_have_no_axes(groups):
    assert read_span(f"replica_groups={groups}, x=1", MESH) == ((), 1, "")


def test_a_part_of_an_axis_is_said():
    span = read_span("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x=1", LogicalMesh.of({"data": 8}))
    assert span == (("data",), 2, "groups of 2 within data")


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("c",)),
        ("{{0,0},{1,1},{2,4},{3,5},{4,2},{5,3},{6,6},{7,7}}", ("a", "b")),
        ("{{0,0},{1,1}}", ()),
        ("{}", ()),
    ],
)
def test_source_target_pairs_name_the_axes_they_cross(pairs, axes):
    assert read_span(f", channel_id=3, source_target_pairs={pairs}, metadata={{}}", MESH).axes == axes


def test_groups_are_rows_of_devices():
    assert read_groups("replica_groups=[2,4]<=[4,2]T(1,0)", 8).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert read_groups("replica_groups={{0,1},{2,3}}, x=1", 4).tolist() == [[0, 1], [2, 3]]


def test_axes_of_size_one_and_their_order_do_not_count():
    assert in_mesh_order(("model", "pipe", "data"), LogicalMesh.of({"data": 2, "pipe": 1, "model": 4})) == ("data", "model")

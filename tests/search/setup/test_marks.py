"""Marks on hand-built graphs become a mesh and pins."""

import pytest

from spmdctx.errors import StrategyError
from spmdctx.ir.graph import Graph, Mark, Op, Origin, Role, Value
from spmdctx.ir.layout import Layout
from spmdctx.ir.mesh import LogicalMesh, format_sharding
from spmdctx.rules import rule_for
from spmdctx.search.setup.marks import resolve_marks


class Builder:
    """Builds a graph with `shard()` marks, as the trace does."""

    def __init__(self):
        self.values, self.ops, self.origins, self.marks, self.ties = [], [], [], [], []
        self.region, self.label = 0, "f"

    def value(self, *shape):
        self.values.append(Value(len(self.values), shape, "float32", Role.INTERMEDIATE, ""))
        return len(self.values) - 1

    def op(self, primitive, operands, shape, **params):
        result = self.value(*shape)
        rule = rule_for(primitive, tuple(self.values[v].shape for v in operands), (shape,), params)
        self.ops.append(Op(len(self.ops), primitive, tuple(operands), (result,), rule, 0, 1))
        self.origins.append(Origin(f"shard{self.region}:{self.label}", "model.py:41"))
        return result

    def matmul(self, a, b):
        (*batch, _), (_, n) = self.values[a].shape, self.values[b].shape
        dims = (((len(batch),), (0,)), ((), ()))
        return self.op("dot_general", (a, b), (*batch, n), dimension_numbers=dims)

    def mark(self, side, index, strategy, value, label=None):
        result = self.op("neg", (value,), self.values[value].shape)
        self.marks.append(Mark(len(self.ops) - 1, result, self.region, side, index, strategy, label or self.label))
        return result

    def region_matmul(self, strategies, shapes=((8, 16), (16, 32)), out=None):
        self.region += 1
        a, b = (self.mark("in", index, s, self.value(*shape)) for index, (s, shape) in enumerate(zip(strategies, shapes, strict=True)))
        return a, b, self.mark("out", 0, out, self.matmul(a, b))

    def mlp(self, x=(2, 1), up=(1, 4), down=(4, 1), out=None):
        self.region, self.label = self.region + 1, "MLP"
        x = self.mark("in", 0, x, self.value(8, 16))
        up = self.mark("parameter", 0, up, self.value(16, 64), "MLP/up/kernel")
        down = self.mark("parameter", 1, down, self.value(64, 16), "MLP/down/kernel")
        hidden = self.op("tanh", (self.matmul(x, up),), (8, 64))
        return x, up, down, self.mark("out", 0, out, self.matmul(hidden, down))

    def resolve(self, num_devices=8, mesh=None):
        graph = Graph(tuple(self.values), tuple(self.ops), (), (), tuple(self.ties), self.origins, "")
        return resolve_marks(graph, self.marks, num_devices, mesh)


def shown(resolved, *values):
    """Pins as text, None for values without one."""
    return [format_sharding(resolved.pins[value]) if value in resolved.pins else None for value in values]


def test_a_matmul_gets_one_axis_per_shared_dimension():
    b = Builder()
    values = b.region_matmul(((2, 4), (4, 1)))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 2, "model": 4}
    assert shown(resolved, *values) == ["[data, model]", "[model, -]", None]


def test_devices_left_over_repeat_the_calculation_on_neighbouring_ranks():
    b = Builder()
    values = b.region_matmul(((2, 1), (1, 1)))
    resolved = b.resolve()
    assert resolved.mesh.axes == (("data", 2), ("model", 4))
    assert shown(resolved, *values) == ["[data, -]", "[-, -]", None]


@pytest.mark.parametrize(
    ("out", "expected"),
    [((2, 1), "[data, -]"), ((8, 1), "[data+model, -]"), ((2, 4), "[data, model]"), ((1, 1), "[-, -]")],
)
def test_a_result_split_further_takes_the_axes_of_the_contracted_dimension(out, expected):
    b = Builder()
    values = b.region_matmul(((2, 4), (4, 1)), out=out)
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 2, "model": 4}
    assert shown(resolved, values[2]) == [expected]


def test_megatron_is_one_region_with_the_hidden_dimension_on_one_axis():
    b = Builder()
    values = b.mlp()
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 2, "model": 4}
    assert shown(resolved, *values) == ["[data, -]", "[-, model]", "[model, -]", None]


def test_sequence_parallelism_shares_the_axis_of_the_hidden_dimension():
    b = Builder()
    b.region = 1
    x = b.mark("in", 0, (2, 4, 1), b.value(4, 8, 16))
    up = b.mark("parameter", 0, (1, 4), b.value(16, 64), "f/up")
    down = b.mark("parameter", 1, (4, 1), b.value(64, 16), "f/down")
    out = b.mark("out", 0, (2, 4, 1), b.matmul(b.matmul(x, up), down))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 2, "model": 4}
    assert shown(resolved, x, up, down, out) == ["[data, model, -]", "[-, model]", "[model, -]", "[data, model, -]"]


def test_a_parameter_without_an_axis_of_the_batch_is_split_over_the_same_devices():
    b = Builder()
    x, up, down, _ = b.mlp(x=(8, 1), up=(8, 1), down=None)
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 8}
    assert shown(resolved, x, up, down) == ["[data, -]", "[data, -]", None]


def test_mixed_device_matrices_share_one_refined_mesh():
    b = Builder()
    first = b.region_matmul(((8, 1), (1, 1)))
    second = b.region_matmul(((2, 4), (4, 1)))
    third = b.region_matmul(((4, 2), (2, 1)))
    resolved = b.resolve()
    assert resolved.mesh.axes == (("data", 2), ("model", 2), ("axis2", 2))
    assert shown(resolved, *first[:2]) == ["[data+model+axis2, -]", "[-, -]"]
    assert shown(resolved, *second[:2]) == ["[data, model+axis2]", "[model+axis2, -]"]
    assert shown(resolved, *third[:2]) == ["[data+model, axis2]", "[axis2, -]"]


def test_a_repeated_calculation_takes_a_whole_axis_that_others_have_made():
    b = Builder()
    weight_only = b.region_matmul((None, (1, 2)))
    whole = b.region_matmul(((4, 1), (1, 2)))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 4, "model": 2}
    assert shown(resolved, weight_only[1], whole[0], whole[1]) == ["[-, model]", "[data, -]", "[-, model]"]


def test_matrices_that_share_no_refinement_take_axes_out_of_order():
    b = Builder()
    first = b.region_matmul(((2, 3), (3, 1)), ((6, 6), (6, 6)))
    second = b.region_matmul(((3, 2), (2, 1)), ((6, 6), (6, 6)))
    resolved = b.resolve(6)
    assert resolved.mesh.sizes == {"data": 2, "model": 3}
    assert shown(resolved, *first[:2]) == ["[data, model]", "[model, -]"]
    assert shown(resolved, *second[:2]) == ["[model, data]", "[data, -]"]
    assert "out of order" in resolved.notes[0]


def test_axes_are_cut_into_primes_when_nothing_coarser_holds_every_matrix():
    b = Builder()
    shapes = ((12, 12), (12, 12))
    first = b.region_matmul(((4, 3), (3, 1)), shapes)
    second = b.region_matmul(((6, 2), (2, 1)), shapes)
    resolved = b.resolve(12)
    assert resolved.mesh.shape == (2, 2, 3)
    assert shown(resolved, *first[:2]) == ["[data+model, axis2]", "[axis2, -]"]
    assert [resolved.mesh.num_slices(dim) for dim in resolved.pins[second[0]]] == [6, 2]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 7, 13, 4093, 4096])
def test_any_number_of_devices_is_split_whole(num_devices):
    b = Builder()
    values = b.region_matmul(((num_devices, 1), (1, 1)), ((num_devices, 4), (4, 4)))
    resolved = b.resolve(num_devices)
    assert resolved.mesh.axes == (("data", num_devices),)
    assert shown(resolved, values[0]) == ["[data, -]" if num_devices > 1 else "[-, -]"]


def test_without_strategies_there_is_one_axis_and_no_pin():
    b = Builder()
    b.region_matmul((None, None))
    resolved = b.resolve()
    assert (resolved.mesh.axes, resolved.pins, resolved.notes) == ((("data", 8),), {}, ())


def test_cotangents_recomputation_and_vmap_get_the_sharding_of_the_primal():
    b = Builder()
    a, w, _ = b.region_matmul(((2, 4), (4, 1)))
    grad = b.mark("in_grad", 1, (4, 1), b.value(16, 32))
    again = b.mark("in", 0, (2, 4), b.value(8, 16))
    mapped = b.mark("in", 0, (2, 0, 4), b.value(8, 5, 16))
    resolved = b.resolve()
    assert shown(resolved, a, w, grad, again) == ["[data, model]", "[model, -]", "[model, -]", "[data, model]"]
    assert resolved.pins[mapped] == (("data",), None, ("model",))


def test_a_square_weight_inside_a_residual_loop_is_split_on_the_named_dimension_only():
    b = Builder()
    b.region = 1
    x = b.mark("in", 0, (2, 1), b.value(8, 16))
    w = b.mark("parameter", 0, (2, 4), b.value(16, 16), "f/w")
    y = b.op("add", (b.matmul(x, w), x), (8, 16))
    out = b.mark("out", 0, (2, 4), y)
    resolved = b.resolve(16)
    sharding = resolved.pins[w]
    assert [resolved.mesh.num_slices(dim) for dim in sharding] == [2, 4]
    assert not set(sharding[0]) & set(sharding[1])
    assert [resolved.mesh.num_slices(dim) for dim in resolved.pins[out]] == [2, 4]


def test_tied_values_carry_the_class_of_a_dimension_round_a_loop():
    b = Builder()
    b.region = 1
    x = b.mark("in", 0, (2, 4), b.value(8, 16))
    carry = b.value(8, 16)
    b.ties.append((x, carry))
    out = b.mark("out", 0, (2, 4), b.op("tanh", (carry,), (8, 16)))
    assert shown(b.resolve(), x, out) == ["[data, model]", "[data, model]"]


def test_nested_regions_are_seen_through():
    b = Builder()
    b.region = 1
    x = b.mark("in", 0, (2, 1), b.value(8, 16))
    w = b.mark("parameter", 0, (1, 4), b.value(16, 64), "outer/w")
    b.region = 2
    inner = b.mark("in", 0, (2, 4), b.matmul(x, w))
    inner = b.mark("out", 0, None, b.op("tanh", (inner,), (8, 64)))
    b.region = 1
    out = b.mark("out", 0, (2, 4), inner)
    resolved = b.resolve()
    assert shown(resolved, x, w, out) == ["[data, -]", "[-, model]", "[data, model]"]


LAYOUT = Layout((2, 4), ("dp", "mp"))


def test_a_layout_names_the_axes_and_leads_tuples_beside_it():
    b = Builder()
    values = b.region_matmul((LAYOUT("dp", "mp"), (4, 1)), out=(2, 1))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"dp": 2, "mp": 4}
    assert shown(resolved, *values) == ["[dp, mp]", "[mp, -]", "[dp, -]"]


def test_a_layout_axis_that_another_region_cuts_is_numbered():
    b = Builder()
    values = b.region_matmul((LAYOUT("dp", "mp"), LAYOUT("mp", "None")))
    b.region_matmul(((4, 2), (2, 1)))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"dp": 2, "mp_1": 2, "mp_2": 2}
    assert shown(resolved, values[0]) == ["[dp, mp_1+mp_2]"]


def test_a_layout_splits_one_dimension_over_several_axes_in_the_order_it_lists_them():
    b = Builder()
    values = b.region_matmul((LAYOUT(("mp", "dp"), "None"), None))
    assert shown(b.resolve(), values[0]) == ["[mp+dp, -]"]


def test_the_users_mesh_is_kept_and_layouts_find_their_axes_by_name():
    mesh = LogicalMesh.of({"mp": 4, "dp": 2})
    b = Builder()
    values = b.region_matmul((LAYOUT("dp", "mp"), LAYOUT("mp", "None")))
    others = b.region_matmul(((8, 1), (1, 1)))
    resolved = b.resolve(mesh=mesh)
    assert resolved.mesh is mesh
    assert shown(resolved, values[0], others[0]) == ["[dp, mp]", "[mp+dp, -]"]


def test_slices_take_the_axis_of_the_users_mesh_that_has_their_size():
    b = Builder()
    values = b.region_matmul(((1, 4), (4, 1)))
    assert shown(b.resolve(mesh=LogicalMesh.of({"data": 2, "model": 4})), values[0]) == ["[-, model]"]


def test_slices_that_are_no_whole_axis_of_the_users_mesh_are_refused():
    b = Builder()
    b.region_matmul(((2, 1), (1, 1)))
    with pytest.raises(StrategyError, match=r"do not fit the axes of the mesh") as error:
        b.resolve(mesh=LogicalMesh.of({"data": 8}))
    assert "{'data': 8}" in str(error.value)


def test_a_dimension_that_does_not_divide_names_op_operand_dimension_and_what_fits():
    b = Builder()
    b.region_matmul(((2, 3), (3, 1)), ((8, 10), (10, 64)))
    with pytest.raises(StrategyError) as error:
        b.resolve(6)
    assert str(error.value).splitlines() == [
        "in_strategy of operand 0 splits dimension 1 into 3 slices, but its size 10 is not divisible by 3.",
        "  where: dot_general 'f' (model.py:41)",
        "  got:   in_strategy ((2, 3), (3, 1)), shapes (8, 10) and (10, 64)",
        "  fix:   use in_strategy ((2, 1), (1, 1))",
    ]


@pytest.mark.parametrize(
    ("strategies", "num_devices", "fault", "fix"),
    [
        (
            ((2, 4), (2, 1)),
            8,
            "splits dimension 0 into 2 slices, but it belongs to dimension 1 of operand 0, which has 4",
            "((2, 4), (4, 1))",
        ),
        (((2, 4), (4, 2)), 8, "needs 16 devices as device matrix [2, 4, 2]", "((2, 2), (2, 2))"),
        (((8, 4), (4, 1)), 8, "in_strategy of operand 0 needs 32 devices", "((2, 4), (4, 1))"),
        (((4, 1), (1, 1)), 6, "in_strategy of operand 0 needs 4 devices, which 6 devices are no multiple of", "((2, 1), (1, 1))"),
        (((2, 4, 1), (4, 1)), 8, "has 3 entries, but the tensor has 2 dimensions", None),
    ],
)
def test_strategies_that_do_not_fit_are_refused_with_one_that_does(strategies, num_devices, fault, fix):
    b = Builder()
    b.region_matmul(strategies)
    with pytest.raises(StrategyError) as error:
        b.resolve(num_devices)
    assert fault in str(error.value)
    assert "dot_general 'f' (model.py:41)" in str(error.value)
    assert (f"fix:   use in_strategy {fix}" if fix else "fix:") in str(error.value) or fix is None


def test_a_parameter_that_does_not_divide_is_named_by_its_path():
    b = Builder()
    b.mlp(up=(1, 3))
    with pytest.raises(StrategyError) as error:
        b.resolve(6)
    assert error.value.summary == "parameter_plan of 'up/kernel' splits dimension 1 into 3 slices, but its size 64 is not divisible by 3."
    assert "use (1, 2)" in str(error.value)


def test_a_layout_for_more_devices_than_there_are_is_refused():
    b = Builder()
    b.region_matmul((LAYOUT("dp", "None"), None))
    with pytest.raises(StrategyError, match="needs 8 devices"):
        b.resolve(4)


def test_a_dataset_strategy_takes_part_in_finding_the_mesh():
    b = Builder()
    batch = b.value(16, 16)
    b.marks.append(Mark(-1, batch, -1, "in", 0, (8, 1), "dataset_strategy"))
    b.region_matmul(((2, 4), (4, 1)))
    resolved = b.resolve()
    assert resolved.mesh.sizes == {"data": 2, "model": 4}
    assert shown(resolved, batch) == ["[data+model, -]"]


def test_the_result_does_not_depend_on_region_numbers():
    first, second = Builder(), Builder()
    second.region = 41
    for b in (first, second):
        b.mlp()
        b.region_matmul(((4, 2), (2, 1)))
    assert first.resolve() == second.resolve()

"""What each parallel mode fixes before the search."""

import pytest

from spmdctx.errors import StrategyError, UnsupportedError
from spmdctx.ir.analysis.batch import batch_dims, dividing_axes
from spmdctx.ir.graph import Mark, Role
from spmdctx.ir.layout import FREE
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.rules import rule_for
from spmdctx.rules.builder import RuleBuilder, identity
from spmdctx.search.setup.modes import prepare
from spmdctx.search.setup.request import ManualSpecs, Request, ValuePin
from tests.search.graphs import GraphMaker

D, M = ("data",), ("model",)
AXES = (("data", 4), ("model", 2))
MESH = LogicalMesh(AXES)


def request(mode, **options):
    defaults = {
        "num_devices": 8,
        "mesh": None,
        "dataset": "data_parallel",
        "marks": (),
        "region_ops": frozenset(),
        "value_pins": (),
        "manual": (),
        "layerwise": frozenset(),
    }
    return Request(parallel_mode=mode, **{**defaults, **options})


def layer(batch=16):
    """Graph of tanh(x @ w); values are w, x, x @ w and the result."""
    make = GraphMaker()
    weight = make.input(64, 32, role=Role.PARAMETER, path="state/w")
    batch_leaf = make.input(batch, 64, role=Role.BATCH, path="batch/x")
    rule = rule_for("dot_general", ((batch, 64), (64, 32)), ((batch, 32),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    dot = make.op("dot_general", rule, batch_leaf, weight, shape=(batch, 32))
    return make.graph(make.op("tanh", identity((batch, 32)), dot, shape=(batch, 32)))


WEIGHT, BATCH, DOT, RESULT = range(4)


@pytest.mark.parametrize(("mode", "devices"), [("stand_alone", 8), ("auto_parallel", 1), ("semi_auto_parallel", 1), ("data_parallel", 1)])
def test_one_device_fixes_nothing(mode, devices):
    setup = prepare(layer(), request(mode, num_devices=devices))
    assert setup.mesh.num_devices == 1
    assert (setup.pins, setup.seeds, setup.forced) == ({}, {}, {})


def test_stand_alone_says_that_constraints_have_no_effect():
    setup = prepare(layer(), request("stand_alone", value_pins=(ValuePin(DOT, AXES, (D, ()), "a sharding constraint"),)))
    assert [note for note in setup.notes if "no effect" in note]


@pytest.mark.parametrize(
    ("mode", "devices", "fix"), [("stand_alone", 8, "use another parallel_mode"), ("hybrid_parallel", 1, "use device_num=8")]
)
def test_one_device_refuses_a_shard_map_over_several_devices(mode, devices, fix):
    with pytest.raises(UnsupportedError, match="several devices") as error:
        prepare(layer(), request(mode, num_devices=devices, manual=(ManualSpecs(0, AXES, ((D, ()),), ((D, ()),)),)))
    assert [words for words in (fix, "function of jax.pmap", str(dict(AXES))) if words not in str(error.value)] == []


def test_data_parallel_splits_the_batch_and_keeps_the_rest_whole():
    setup = prepare(layer(), request("data_parallel"))
    assert setup.mesh.axes == (("data", 8),)
    assert setup.pins == {WEIGHT: ((), ()), BATCH: (D, ())}


def test_data_parallel_uses_all_axes_of_the_users_mesh():
    assert prepare(layer(), request("data_parallel", mesh=MESH)).pins[BATCH] == (("data", "model"), ())


def test_data_parallel_leaves_layerwise_parameters_free():
    assert WEIGHT not in prepare(layer(), request("data_parallel", layerwise=frozenset({WEIGHT}))).pins


def test_data_parallel_refuses_a_batch_that_does_not_divide():
    with pytest.raises(StrategyError, match="size 12 is not divisible by 8") as error:
        prepare(layer(12), request("data_parallel"))
    assert "batch/x" in str(error.value)


def test_hybrid_parallel_without_a_shard_map_is_data_parallel():
    assert prepare(layer(), request("hybrid_parallel")).pins == prepare(layer(), request("data_parallel")).pins


def manual(axes=AXES):
    make = GraphMaker()
    value = make.input(16, 32, role=Role.BATCH)
    builder = RuleBuilder()
    own, other = builder.factors((16, 32)), builder.factors((16, 32))
    result = make.op("shard_map", builder.build([own], [other]), value, shape=(16, 32))
    return make.graph(result), ManualSpecs(0, axes, ((D, M),), ((D, ()),))


@pytest.mark.parametrize("mode", ["hybrid_parallel", "auto_parallel", "semi_auto_parallel"])
def test_a_shard_map_decides_the_mesh_and_its_own_axes(mode):
    graph, specs = manual()
    setup = prepare(graph, request(mode, manual=(specs,)))
    assert setup.mesh == MESH
    assert setup.forced == {0: (D, M, D, ())}


def test_a_shard_map_on_another_mesh_is_refused():
    graph, specs = manual((("rows", 2), ("columns", 2)))
    with pytest.raises(UnsupportedError, match="another mesh") as error:
        prepare(graph, request("hybrid_parallel", manual=(specs,)))
    assert "get_mesh" in str(error.value)
    assert "jax.pmap" in str(error.value)


def test_semi_auto_parallel_splits_every_op_that_has_the_batch():
    setup = prepare(layer(), request("semi_auto_parallel"))
    assert setup.pins == {BATCH: (D, ()), DOT: (D, ()), RESULT: (D, ())}


def test_semi_auto_parallel_leaves_the_ops_of_regions_alone():
    setup = prepare(layer(), request("semi_auto_parallel", region_ops=frozenset({0})))
    assert DOT not in setup.pins
    assert RESULT in setup.pins


def test_semi_auto_parallel_splits_a_batch_that_does_not_divide_as_far_as_it_does():
    setup = prepare(layer(12), request("semi_auto_parallel", mesh=MESH))
    assert (setup.pins[BATCH], setup.pins[DOT]) == ((D, ()), (D, ()))
    assert [note for note in setup.notes if "batch/x" in note and "split over data only" in note]


def test_semi_auto_parallel_notes_a_batch_that_every_device_holds_whole():
    setup = prepare(layer(9), request("semi_auto_parallel"))
    assert setup.pins == {BATCH: ((), ())}
    assert [note for note in setup.notes if "every device holds it whole" in note]


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_full_batch_keeps_the_batch_whole(mode):
    assert prepare(layer(), request(mode, dataset="full_batch")).pins[BATCH] == ((), ())


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_a_dataset_strategy_makes_the_mesh_and_a_pin(mode):
    setup = prepare(layer(), request(mode, dataset=((4, 2),)))
    assert setup.mesh.axes == AXES
    assert setup.pins[BATCH] == (D, M)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (((4, 2), (2, 1)), "2 entries, but the step has 1 batch leaves"),
        (((4,),), "1 dimensions for 'batch/x', which has 2"),
        (((3, 1),), "size 16 is not divisible by 3"),
        (((16, 1),), "16 blocks, which does not divide 8 devices"),
    ],
)
def test_a_dataset_strategy_that_does_not_fit_is_refused(dataset, words):
    with pytest.raises(StrategyError) as error:
        prepare(layer(), request("auto_parallel", dataset=dataset))
    assert words in str(error.value)


def test_auto_parallel_only_starts_from_a_split_batch():
    setup = prepare(layer(), request("auto_parallel", dataset=None))
    assert (setup.pins, setup.seeds) == ({}, {BATCH: (D, ())})


def test_auto_parallel_gives_the_batch_the_axes_that_no_pin_uses():
    pin = ValuePin(WEIGHT, AXES, ((), M), "a sharding constraint")
    setup = prepare(layer(), request("auto_parallel", dataset=None, value_pins=(pin,)))
    assert (setup.mesh, setup.pins, setup.seeds) == (MESH, {WEIGHT: ((), M)}, {BATCH: (D, ())})


def test_auto_parallel_notes_a_batch_that_does_not_divide():
    setup = prepare(layer(9), request("auto_parallel", dataset=None))
    assert setup.seeds[BATCH] == ((), ())
    assert [note for note in setup.guesses if "(9, 64) does not divide" in note]


def test_a_pinned_tensor_without_elements_is_whole_and_a_note_names_it():
    setup = prepare(layer(0), request("data_parallel"))
    assert setup.pins[BATCH] == ((), ())
    assert BATCH not in setup.reasons
    assert [note for note in setup.notes if "[0, 64] of 'batch/x' (asked for: [data, -])" in note]
    assert not prepare(layer(), request("data_parallel")).notes


def test_a_dimension_that_a_constraint_leaves_free_is_free():
    pin = ValuePin(DOT, AXES, (None, M), "a sharding constraint")
    setup = prepare(layer(), request("auto_parallel", dataset=None, value_pins=(pin,)))
    assert DOT not in setup.pins
    assert setup.seeds[DOT] == ((), M)


def test_a_strategy_that_leaves_a_dimension_free_is_where_the_search_starts():
    make = GraphMaker()
    start = make.input(3, 16, 32)
    marked = make.op("spmdctx_shard", identity((3, 16, 32)), start, shape=(3, 16, 32))
    result = make.op("tanh", identity((3, 16, 32)), marked, shape=(3, 16, 32))
    # vmap added the leading dimension, of which the strategy does not speak.
    mark = Mark(0, marked, 0, "in", 0, (FREE, 4, 2), "block")
    setup = prepare(make.graph(result), request("semi_auto_parallel", marks=(mark,)))
    assert (setup.pins, setup.seeds) == ({}, {marked: ((), D, M)})


def test_a_constraint_on_an_unknown_axis_is_refused_and_metadata_ignored():
    other = ValuePin(WEIGHT, (("rows", 8),), (("rows",), ()), "a sharding constraint")
    with pytest.raises(StrategyError, match="rows"):
        prepare(layer(), request("auto_parallel", mesh=MESH, value_pins=(other,)))
    setup = prepare(layer(), request("auto_parallel", mesh=MESH, value_pins=(other._replace(mesh_axes=()),)))
    assert WEIGHT not in setup.pins
    assert [note for note in setup.notes if "rows" in note]


def test_a_constraint_that_does_not_divide_is_ignored_and_noted():
    pin = ValuePin(WEIGHT, (), (("axis3",), ()), "partitioning metadata")
    mesh = LogicalMesh.of({"axis3": 3})
    setup = prepare(layer(), request("auto_parallel", num_devices=3, mesh=mesh, value_pins=(pin,)))
    assert WEIGHT not in setup.pins
    assert [note for note in setup.notes if "does not divide shape (64, 32)" in note]


def test_an_ignored_constraint_on_a_nameless_value_is_found_by_its_line():
    pin = ValuePin(DOT, (), (("axis3",), ()), "a sharding constraint")
    setup = prepare(layer(), request("auto_parallel", num_devices=3, mesh=LogicalMesh.of({"axis3": 3}), value_pins=(pin,)))
    assert [note for note in setup.notes if "at made.py:0: ignored" in note]


@pytest.mark.parametrize(("mode", "kept"), [("data_parallel", ((), ())), ("auto_parallel", (M, ()))])
def test_state_comes_out_as_it_goes_in_whatever_a_constraint_says(mode, kept):
    make = GraphMaker()
    state = make.input(16, 16, role=Role.PARAMETER, path="state/w")
    after = make.op("tanh", identity((16, 16)), state, shape=(16, 16))
    pins = [ValuePin(after, AXES, (D, ()), "a sharding constraint")]
    if mode == "auto_parallel":
        pins.append(ValuePin(state, (), (M, ()), "partitioning metadata"))
    setup = prepare(make.graph(after, ties=[(state, after)]), request(mode, mesh=MESH, value_pins=tuple(pins)))
    assert setup.pins == {state: kept}
    assert [note for note in setup.notes if "'state/w' goes in as" in note]


def test_the_batch_is_followed_through_dots_transposes_and_ties():
    make = GraphMaker()
    weight, batch = make.input(8, 8), make.input(4, 8, role=Role.BATCH)
    rule = rule_for("dot_general", ((8, 8), (4, 8)), ((8, 4),), {"dimension_numbers": (((1,), (1,)), ((), ()))})
    turned = make.op("dot_general", rule, weight, batch, shape=(8, 4))
    back = make.op("transpose", rule_for("transpose", ((8, 4),), ((4, 8),), {"permutation": (1, 0)}), turned, shape=(4, 8))
    summed = make.op("reduce_sum", rule_for("reduce_sum", ((4, 8),), ((8,),), {"axes": (0,)}), back, shape=(8,))
    carry = make.input(4, 8)
    assert batch_dims(make.graph(summed, ties=[(carry, back)]), [batch], MESH).found == {batch: 0, turned: 1, back: 0, carry: 0}


@pytest.mark.parametrize(("size", "axes"), [(16, ("data", "model")), (12, D), (9, ()), (8, ("data", "model"))])
def test_the_axes_that_divide_are_a_leading_part(size, axes):
    assert dividing_axes(size, MESH.names, MESH) == axes


CONSTRAINT_ALONG_BATCH = ValuePin(DOT, AXES, (D, M), "a sharding constraint")


@pytest.mark.parametrize(
    ("pins", "axes", "options", "kind"),
    [
        ((CONSTRAINT_ALONG_BATCH,), D, {}, "seeds"),
        ((ValuePin(WEIGHT, AXES, ((), M), "in_shardings"),), D, {}, "seeds"),
        ((ValuePin(WEIGHT, AXES, (D, M), "in_shardings"),), ("data", "model"), {}, "seeds"),
        ((ValuePin(BATCH, AXES, (M, ()), "in_shardings"), CONSTRAINT_ALONG_BATCH), M, {}, "pins"),
        ((ValuePin(WEIGHT, AXES, ((), M), "partitioning metadata"),), M, {"batch_axes": M}, "pins"),
        ((CONSTRAINT_ALONG_BATCH,), ("data", "model"), {"batch_is_asked": True}, "pins"),
    ],
)
def test_where_jax_shardings_split_something_all_else_follows_from_them(pins, axes, options, kind):
    setup = prepare(layer(), request("semi_auto_parallel", mesh=MESH, value_pins=pins, **{"batch_is_asked": False, **options}))
    assert getattr(setup, kind)[BATCH] == (axes, ())
    assert RESULT not in setup.pins


def test_pins_without_a_split_leave_the_batch_over_all_devices():
    pin = ValuePin(WEIGHT, AXES, ((), ()), "a sharding constraint")
    setup = prepare(layer(), request("semi_auto_parallel", mesh=MESH, value_pins=(pin,), batch_is_asked=False))
    assert setup.pins[BATCH] == setup.pins[RESULT] == (("data", "model"), ())


def test_shardings_of_jit_for_another_mesh_are_ignored_and_noted_in_one_note():
    pins = [ValuePin(value, (("rows", 8),), (("rows",), ()), "in_shardings") for value in (WEIGHT, BATCH)]
    setup = prepare(layer(), request("auto_parallel", mesh=MESH, value_pins=tuple(pins)))
    (note,) = [note for note in setup.notes if "in_shardings" in note]
    assert all(text in note for text in ("'rows': 8", "'data': 4", "'state/w', 'batch/x'"))
    assert WEIGHT not in setup.pins
    assert setup.reasons[BATCH].startswith("dataset_strategy")


@pytest.mark.parametrize(
    ("axis", "text"), [("other", "names other, which the mesh (data 4, model 2) does not have"), ("axis3", "kept as [data, -]")]
)
def test_a_dimension_that_cannot_be_split_leaves_the_others_pinned(axis, text):
    mesh = MESH if axis == "other" else LogicalMesh.of({"data": 4, "axis3": 3})
    pin = ValuePin(WEIGHT, (), (D, (axis,)), "partitioning metadata")
    setup = prepare(layer(), request("auto_parallel", num_devices=mesh.num_devices, mesh=mesh, value_pins=(pin,)))
    assert setup.pins[WEIGHT] == (D, ())
    assert [note for note in setup.notes if text in note]

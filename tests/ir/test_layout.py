"""Device matrices, tensor maps and layouts, against MindSpore's."""

import json

import pytest

from spmdctx.errors import StrategyError, UnsupportedError
from spmdctx.ir.layout import Layout, fitting_strategy, nearest_fit


@pytest.mark.parametrize(
    ("size", "wanted", "num_devices", "best"), [(10, 3, 6, 2), (64, 8, 8, 8), (7, 4, 8, 1), (12, 6, 8, 4), (2, 4, 4, 2)]
)
def test_the_nearest_number_of_slices_divides_dimension_and_devices(size, wanted, num_devices, best):
    assert nearest_fit(size, wanted, num_devices) == best


@pytest.mark.parametrize(
    ("sizes", "wanted", "num_devices", "best"),
    [((8, 10), (2, 3), 6, (2, 1)), ((8, 8), (4, 4), 8, (2, 4)), ((8, 8), (1, 1), 8, (1, 1)), ((5, 5), (5, 5), 5, (1, 5))],
)
def test_a_fitting_strategy_keeps_what_fits(sizes, wanted, num_devices, best):
    assert fitting_strategy(sizes, wanted, num_devices) == best


LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


def test_a_layout_maps_dimensions_to_axes_counted_from_the_right():
    layout = LAYOUT("dp", ("sp", "mp"), "None")
    assert layout.tensor_map == (2, (1, 0), -1)
    assert layout.strategy == (2, 4, 1)
    assert layout.to_dict() == {
        "device_matrix": (2, 2, 2),
        "tensor_map": (2, (1, 0), -1),
        "interleaved_parallel": False,
        "alias_name": ("dp", "sp", "mp"),
        "rank_list": tuple(range(8)),
    }


def test_equal_layouts_are_one_key():
    assert {LAYOUT("dp", "mp"), LAYOUT("dp", "mp"), LAYOUT("mp", "dp")} == {LAYOUT("dp", "mp"), LAYOUT("mp", "dp")}


def test_a_free_dimension_is_no_part_of_the_strategy():
    assert LAYOUT("dp", "mp").with_free_dim(1).strategy == (2, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([2, 2], ("a", "b")), TypeError, "device_matrix must be a tuple"),
        (((2, 2), ["a", "b"]), TypeError, "alias_name must be a tuple"),
        (((2, True), ("a", "b")), TypeError, "device_matrix holds ints"),
        (((2, 2), ("a", 1)), TypeError, "alias_name holds strings"),
        (((2, 0), ("a", "b")), ValueError, "has size 0"),
        (((2, 2), ("a",)), ValueError, "2 axes, alias_name 1"),
        (((2, 2), ("a", "a")), ValueError, "used twice"),
        (((2, 2), ("a", "None")), ValueError, "cannot be called 'None'"),
        (((2, 2), ("a", "")), ValueError, "cannot be called ''"),
        (((2, 2), ("interleaved_parallel", "a")), ValueError, "must be the last"),
        (((2, 2), ("a", "b"), (0, 2, 1, 3)), ValueError, "natural order"),
    ],
)
def test_a_layout_checks_its_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        Layout(*arguments)


def test_interleaving_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="interleaved_parallel"):
        Layout((2, 2), ("a", "interleaved_parallel"))


@pytest.mark.parametrize(
    ("tensor_map", "error", "text"),
    [
        (("dp", "xx"), ValueError, "no axis 'xx'"),
        (("dp", "dp"), ValueError, "more than one dimension"),
        (("dp", ("sp", "dp")), ValueError, "more than one dimension"),
        (("dp", 1), TypeError, "axis names"),
        (("dp", None), TypeError, "axis names"),
    ],
)
def test_a_tensor_map_is_checked(tensor_map, error, text):
    with pytest.raises(error, match=text):
        LAYOUT(*tensor_map)


def test_a_layout_that_was_not_called_has_no_strategy():
    with pytest.raises(StrategyError, match="names no tensor dimensions"):
        _ = LAYOUT.strategy


@pytest.mark.parametrize("dims", [("dp", "None", "None"), (("mp", "dp"), "sp"), ("None",)])
def test_a_layout_goes_through_a_dictionary(dims):
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))(*dims)
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_map": [3]}, "counts axes of the device matrix"),
        ({"tensor_map": ["dp"]}, "counts axes of the device matrix"),
        ({"tensor_map": 0}, "lacks 'tensor_map'"),
        ({"rank_list": [1, 0, 2, 3, 4, 5, 6, 7]}, "natural order"),
    ],
)
def test_a_dictionary_that_is_no_layout_is_refused(change, words):
    with pytest.raises(StrategyError, match=words):
        Layout.from_dict({**Layout((2, 2, 2), ("dp", "sp", "mp"))("dp").to_dict(), **change})

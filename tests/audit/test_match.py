import pytest

from spmdctx.audit.collectives import CompiledCollective
from spmdctx.audit.match import (
    AT_ONCE,
    HALVES,
    HOISTED,
    HOISTED_SLICE,
    JOINED,
    PER_AXIS,
    STACKED,
    compare,
)
from spmdctx.ir.collective import AS_PLANNED, Cause, Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.xla.collectives.ways import NARROWED, SLICED, WAYS, WIDENED

MESH = LogicalMesh.of({"data": 2, "model": 4, "pipe": 1})


def plan(kind, axes, payload, repeats=1, source="net.py:1"):
    return Collective(kind, tuple(axes.split()), payload, 0.0, repeats, Cause.sum("dot_general"), source)


def real(kind, axes, payload, repeats=1, dtype="float32", summands=1, source="net.py:1"):
    return CompiledCollective(kind, tuple(axes.split()), payload, dtype, repeats, source, "op", summands=summands)


def summary(planned, compiled):
    found = compare(planned, compiled, MESH, WAYS)
    matches = [(one.planned.payload_bytes, one.count, one.realised_bytes, one.way) for one in found.matches]
    return matches, [one.repeats for one in found.missing], [one.repeats for one in found.unplanned]


@pytest.mark.parametrize("payload", [910, 1000, 1100])
def test_a_payload_within_a_tenth_is_found(payload):
    assert summary([plan("all_reduce", "data", 1000)], [real("all_reduce", "data", payload)]) == ([(1000, 1, payload, AS_PLANNED)], [], [])


@pytest.mark.parametrize(
    "compiled",
    [
        real("all_reduce", "data", 1101),
        real("all_reduce", "data", 899),
        real("all_reduce", "model", 1000),
        real("all_to_all", "data", 1000),
        real("all_gather", "data", 1000),
    ],
)
def test_another_payload_kind_or_axis_is_missing_and_unplanned(compiled):
    assert summary([plan("all_reduce", "data", 1000)], [compiled]) == ([], [1], [1])


def test_each_execution_is_used_once():
    planned = [plan("all_gather", "model", 64, repeats=3), plan("all_gather", "model", 64)]
    assert summary(planned, [real("all_gather", "model", 64, repeats=5)]) == ([(64, 3, 192, AS_PLANNED), (64, 1, 64, AS_PLANNED)], [], [1])


def test_the_nearest_payload_is_taken_first():
    planned = [plan("all_reduce", "data", 1050), plan("all_reduce", "data", 1000)]
    matches, missing, unplanned = summary(planned, [real("all_reduce", "data", 1000), real("all_reduce", "data", 1050)])
    assert matches == [(1050, 1, 1050, AS_PLANNED), (1000, 1, 1000, AS_PLANNED)]
    assert (missing, unplanned) == ([], [])


def test_the_order_of_axes_and_axes_of_size_one_do_not_matter():
    assert summary([plan("all_reduce", "pipe model data", 8)], [real("all_reduce", "data model", 8)])[1:] == ([], [])
    assert summary([plan("all_reduce", "pipe", 8)], []) == ([], [], [])


@pytest.mark.parametrize(
    ("planned", "compiled", "way"),
    [
        (plan("reduce_scatter", "data", 512), real("all_reduce", "data", 512), SLICED),
        (plan("reduce_scatter", "data", 512), real("all_reduce", "data", 1024), f"{SLICED}, {WIDENED}"),
        (plan("reduce_scatter", "data", 512), real("reduce_scatter", "data", 576), "reduce_scatter of longer pieces"),
        (plan("all_reduce", "data", 512), real("all_reduce", "data", 1024), WIDENED),
        (plan("all_gather", "data", 512), real("all_gather", "data", 256, dtype="bfloat16"), NARROWED),
        (plan("all_gather", "data", 512), real("all_reduce", "data", 512), "all_reduce of padded shards"),
    ],
)
def test_a_known_way_to_write_it_is_named(planned, compiled, way):
    assert summary([planned], [compiled]) == ([(512, 1, compiled.payload_bytes, way)], [], [])


def test_half_or_twice_the_bytes_in_the_same_dtype_is_no_known_way():
    assert summary([plan("all_gather", "data", 512)], [real("all_gather", "data", 256)]) == ([], [1], [1])
    assert summary([plan("all_gather", "data", 512)], [real("all_gather", "data", 1024, dtype="bfloat16")]) == ([], [1], [1])


@pytest.mark.parametrize(("kind", "second"), [("all_gather", 256), ("reduce_scatter", 256), ("all_reduce", 1024)])
def test_one_over_two_axes_is_found_as_one_per_axis_and_the_other_way_round(kind, second):
    both, split = (kind, "data model", 1024), [(kind, "model", 1024), (kind, "data", second)]
    assert summary([plan(*both)], [real(*one) for one in split]) == ([(1024, 1, 1024 + second, PER_AXIS)], [], [])
    matches, missing, unplanned = summary([plan(*one) for one in split], [real(*both)])
    assert sorted(matches) == sorted([(1024, 1, 1024, AT_ONCE), (second, 1, 0, AT_ONCE)])
    assert (missing, unplanned) == ([], [])


def test_a_reduce_scatter_over_two_axes_is_found_as_an_all_reduce_per_axis():
    planned = [plan("reduce_scatter", "data model", 1024)]
    each = [real("all_reduce", "model", 1024), real("all_reduce", "data", 1024)]
    assert summary(planned, each) == ([(1024, 1, 2048, PER_AXIS)], [], [])
    assert summary(planned, each[:1]) == ([], [1], [1])
    assert summary(planned, [each[0], real("reduce_scatter", "data", 1024)])[1:] == ([1], [1, 1])


TYPES = [(2, "float32"), (0.5, "bfloat16")]


def moved(kind, axes, payload, dtype):
    return real(kind, axes, int(payload), dtype=dtype)


@pytest.mark.parametrize(("ratio", "dtype"), TYPES)
@pytest.mark.parametrize(("kind", "second"), [("all_gather", 256), ("reduce_scatter", 256), ("all_reduce", 1024)])
def test_the_steps_over_one_axis_each_may_be_moved_in_another_type(kind, second, ratio, dtype):
    both, split = (kind, "data model", 1024), [(kind, "model", 1024), (kind, "data", second)]
    steps = [moved(*axes, payload * ratio, dtype) for *axes, payload in split]
    assert summary([plan(*both)], steps) == ([(1024, 1, (1024 + second) * ratio, PER_AXIS)], [], [])
    assert summary([plan(*one) for one in split], [moved(*both[:2], 1024 * ratio, dtype)])[1:] == ([], [])


def test_both_steps_are_moved_in_one_type():
    planned = [plan("all_reduce", "data model", 512)]
    steps = [real("all_reduce", "data", 1024), real("all_reduce", "model", 512)]
    assert summary(planned, steps) == ([], [1], [1, 1])
    wider = [real("all_reduce", axes, 1024, dtype="bfloat16") for axes in ("data", "model")]
    assert summary(planned, wider) == ([], [1], [1, 1])


THREE = LogicalMesh.of({"data": 2, "model": 2, "pipe": 2})


@pytest.mark.parametrize(
    ("kind", "payloads"), [("all_gather", (512, 256, 128)), ("reduce_scatter", (512, 256, 128)), ("all_reduce", (512,) * 3)]
)
@pytest.mark.parametrize("order", ["data model pipe", "pipe data model", "model pipe data"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_one_over_three_axes_is_found_in_three_steps_or_two(kind, payloads, order, ratio):
    planned = [plan(kind, "data model pipe", 512, repeats=2)]
    steps = [real(kind, axis, payload * ratio, repeats=2) for axis, payload in zip(order.split(), payloads, strict=True)]
    found = compare(planned, steps, THREE, WAYS)
    assert ([one.way for one in found.matches], found.missing, found.unplanned) == ([PER_AXIS], (), ())
    assert compare(planned, steps[:2], THREE, WAYS).missing
    first, second = order.split()[0], " ".join(sorted(order.split()[1:]))
    two = [real(kind, first, 512 * ratio, repeats=2), real(kind, second, payloads[1] * ratio, repeats=2)]
    assert not compare(planned, two, THREE, WAYS).missing


def test_a_sum_per_axis_in_float32_is_found_beside_a_gather_of_its_size():
    planned = [plan("all_reduce", "data model", 2), plan("all_gather", "data", 4)]
    compiled = [real("all_gather", "data", 8), real("all_reduce", "data", 4), real("all_reduce", "model", 4)]
    assert summary(planned, compiled)[1:] == ([], [])


@pytest.mark.parametrize(("ratio", "dtype"), TYPES)
def test_what_leaves_a_loop_may_be_moved_in_another_type(ratio, dtype):
    planned = [plan("all_reduce", "data", 64, repeats=6)]
    matches, missing, unplanned = summary(planned, [moved("all_reduce", "data", 384 * ratio, dtype)])
    assert (matches[0][3], missing, unplanned) == (STACKED, [], [])
    scattered = moved("reduce_scatter", "data", 64 * ratio, dtype)
    assert summary(planned, [scattered]) == ([(64, 6, 64 * ratio, HOISTED_SLICE)], [], [])


def test_a_gather_over_part_of_the_axes_is_not_enough():
    assert summary([plan("all_gather", "data model", 1024)], [real("all_gather", "model", 1024)]) == ([], [1], [1])


def test_results_of_all_iterations_reduced_at_once_are_found():
    assert summary([plan("all_reduce", "data", 64, repeats=6)], [real("all_reduce", "data", 384)]) == ([(64, 6, 384, STACKED)], [], [])


def test_a_sum_over_iterations_reduced_after_the_loop_is_found_with_its_real_bytes():
    planned = [plan("all_reduce", "data", 64, repeats=4), plan("all_reduce", "data", 64, repeats=4)]
    compiled = [real("all_reduce", "data", 64), real("all_reduce", "data", 64)]
    matches, missing, unplanned = summary(planned, compiled)
    assert (missing, unplanned) == ([], [])
    assert sum(one[2] for one in matches) == 128
    assert {one[3] for one in matches} == {AS_PLANNED, HOISTED}


def test_a_reduction_that_leaves_its_loop_may_be_scattered():
    planned = [plan("all_reduce", "data", 64, repeats=4)]
    matches, missing, unplanned = summary(planned, [real("reduce_scatter", "data", 64)])
    assert (matches, missing, unplanned) == ([(64, 4, 64, HOISTED_SLICE)], [], [])
    assert summary([plan("all_reduce", "data", 64)], [real("reduce_scatter", "data", 64)])[1] == [1]
    assert summary(planned, [real("reduce_scatter", "model", 64)])[1] == [4]


def test_one_reduction_is_not_taken_for_two_loops():
    planned = [plan("all_reduce", "data", 64, repeats=4), plan("all_reduce", "data", 64, repeats=4)]
    assert sum(summary(planned, [real("all_reduce", "data", 64)])[1]) == 7


def test_reductions_joined_by_an_addition_are_found_only_if_the_program_adds():
    planned = [plan("all_reduce", "model", 64, source=f"net.py:{line}") for line in range(3)]
    matches, missing, unplanned = summary(planned, [real("all_reduce", "model", 64, summands=3)])
    assert matches == [(64, 1, 64, AS_PLANNED), (64, 1, 0, JOINED), (64, 1, 0, JOINED)]
    assert (missing, unplanned) == ([], [])
    assert summary(planned, [real("all_reduce", "model", 64, summands=2)])[1] == [1]
    assert summary(planned, [real("all_reduce", "model", 64)])[1] == [1, 1]


@pytest.mark.parametrize(("kind", "compiled"), [("all_gather", "all_gather"), ("reduce_scatter", "all_reduce")])
def test_complex_numbers_are_found_as_two_real_collectives_from_the_same_line(kind, compiled):
    halves = [real(compiled, "model", 512, repeats=3), real(compiled, "model", 512, repeats=3)]
    assert summary([plan(kind, "model", 1024, repeats=3)], halves) == ([(1024, 3, 3072, HALVES)], [], [])
    assert summary([plan(kind, "model", 1024, repeats=3)], halves[:1]) == ([], [3], [3])
    named = plan(kind, "model", 1024, repeats=3, source="net.py:1 (loss)")
    assert summary([named], halves)[1:] == ([], [])
    elsewhere = real(compiled, "model", 512, repeats=3, source="net.py:9")
    assert summary([plan(kind, "model", 1024, repeats=3)], [halves[0], elsewhere])[0] == []


def test_ways_are_chosen_so_that_most_is_found():
    """As planned, the gather of 64 bytes would take the place of the one of 32, which is compiled in float32."""
    planned = [plan("all_gather", "data", payload) for payload in (128, 64, 32, 16)]
    compiled = [real("all_gather", "data", payload) for payload in (256, 128, 64, 32)]
    assert summary(planned, compiled) == ([(payload, 1, 2 * payload, WIDENED) for payload in (128, 64, 32, 16)], [], [])


def test_pairing_anew_finds_no_more_than_is_there():
    planned = [plan("all_gather", "data", payload) for payload in (128, 64, 32)]
    matches, missing, unplanned = summary(planned, [real("all_gather", "data", 64), real("all_gather", "model", 32)])
    assert (len(matches), missing, unplanned) == (1, [1, 1], [1])


def test_what_runs_once_is_found_before_what_a_loop_repeats():
    planned = [plan("all_reduce", "data", 4, repeats=3), plan("all_reduce", "data", 2)]
    matches, missing, unplanned = summary(planned, [real("all_reduce", "data", 4), real("all_reduce", "data", 4)])
    assert (missing, unplanned) == ([], [])
    assert sorted(matches) == [(2, 1, 4, WIDENED), (4, 1, 4, AS_PLANNED), (4, 2, 0, HOISTED)]


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_over_some_axes_are_kept_for_what_runs_over_all(reverse):
    planned = [plan("all_reduce", "data model", 4), plan("all_reduce", "model", 4), plan("all_reduce", "pipe model", 4)]
    compiled = [real("all_reduce", axes, 4) for axes in ("model", "data", "model", "model")]
    matches, missing, unplanned = summary(planned, compiled[::-1] if reverse else compiled)
    assert (len(matches), missing, unplanned) == (3, [], [])


def test_a_sum_over_three_axes_in_two_steps_leaves_one_over_two_in_two_steps():
    mesh = LogicalMesh.of({"data": 2, "model": 2, "pipe": 2})
    planned = [plan("all_reduce", "data model", 8), plan("all_reduce", "data model pipe", 4), plan("all_reduce", "data model", 4)]
    steps = ("pipe", "data model", "data", "model")
    found = compare(planned, [real("all_reduce", "data model", 8), *(real("all_reduce", axes, 4) for axes in steps)], mesh, WAYS)
    assert (found.missing, found.unplanned) == ((), ())

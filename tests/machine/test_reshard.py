"""Resharding: the chains by themselves, and each step against what XLA's partitioner makes of it."""

from __future__ import annotations

import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdctx.audit.groups import read_span
from spmdctx.ir.mesh import LogicalMesh, axes_of, divides, local_shape, replicated
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.presets import topology
from spmdctx.machine.reshard import reshard_steps, reshard_time_s
from spmdctx.machine.topology import Preferences, as_asked

MESH_8 = LogicalMesh.of({"x": 8})
MESH_2X4 = LogicalMesh.of({"a": 2, "b": 4})
MESH_2X2X2 = LogicalMesh.of({"a": 2, "b": 2, "c": 2})
ITEM_BYTES = 4


def shardings(mesh: LogicalMesh, rank: int) -> list[TensorSharding]:
    """Every sharding of a tensor, in every order of axes."""

    def extend(dims: tuple, rest: tuple) -> list[TensorSharding]:
        if len(dims) == rank:
            return [dims]
        return [
            whole
            for count in range(len(rest) + 1)
            for axes in itertools.permutations(rest, count)
            for whole in extend((*dims, axes), tuple(name for name in rest if name not in axes))
        ]

    return extend((), mesh.names)


def moved_bytes(shape, before, step, mesh) -> int:
    """What leaves or enters one device in a step."""
    if step.kind == "slice":
        return 0
    if step.kind == "collective_permute":
        return step.payload_bytes
    slices = mesh.num_slices(step.axes)
    return step.payload_bytes * (slices - 1) // slices


def naive_bytes(shape, source, target, mesh) -> int:
    """Gathers every dimension that changes, then slices."""
    current, total = source, 0
    for dim in range(len(shape)):
        if current[dim] and current[dim] != target[dim]:
            slices = mesh.num_slices(current[dim])
            current = (*current[:dim], (), *current[dim + 1 :])
            total += math.prod(local_shape(shape, current, mesh)) * ITEM_BYTES * (slices - 1) // slices
    return total


@pytest.mark.parametrize(("mesh", "shape"), [(MESH_8, (16, 24, 8)), (MESH_2X4, (16, 8, 8)), (MESH_2X2X2, (8, 16)), (MESH_2X4, (6, 9))])
def test_every_chain_ends_in_its_target_and_moves_no_more_than_gathering_all(mesh, shape):
    every = shardings(mesh, len(shape))
    for source, target in itertools.product(every, every):
        steps = reshard_steps(shape, ITEM_BYTES, source, target, mesh)
        assert (steps[-1].sharding if steps else source) == target
        befores = [source, *(step.sharding for step in steps)]
        moved = sum(moved_bytes(shape, before, step, mesh) for before, step in zip(befores, steps, strict=False))
        if divides(shape, source, mesh) and divides(shape, target, mesh):
            assert moved <= naive_bytes(shape, source, target, mesh)
            assert all(divides(shape, step.sharding, mesh) for step in steps)


def test_no_axis_is_used_twice_on_the_way():
    every = shardings(MESH_2X2X2, 2)
    for source, target in itertools.product(every, every):
        for step in reshard_steps((8, 8), ITEM_BYTES, source, target, MESH_2X2X2):
            assert len(set(axes_of(step.sharding))) == len(axes_of(step.sharding))


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((("a",), ()), (("a",), ()), []),
        (((), ()), (("a",), ("b",)), ["slice"]),
        ((("a", "b"), ()), ((), ()), ["all_gather"]),
        ((("a", "b"), ()), (("a",), ()), ["all_gather"]),
        ((("a", "b"), ()), (("b",), ()), ["collective_permute", "all_gather"]),
        ((("a",), ()), ((), ("a",)), ["all_to_all"]),
        ((("a",), ()), ((), ("a", "b")), ["slice", "all_to_all"]),
        ((("a", "b"), ()), ((), ("a", "b")), ["all_to_all"]),
        ((("b",), ()), ((), ("a",)), ["slice", "all_gather"]),
        ((("a", "b"), ()), (("b", "a"), ()), ["collective_permute"]),
    ],
)
def test_the_chain_is_the_one_expected(source, target, kinds):
    assert [step.kind for step in reshard_steps((64, 64), ITEM_BYTES, source, target, MESH_2X4)] == kinds


def test_axes_of_equal_size_are_swapped_by_one_permute():
    steps = reshard_steps((64, 64), ITEM_BYTES, (("a",), ("b",)), (("b",), ("a",)), MESH_2X2X2)
    assert [(step.kind, step.axes, step.payload_bytes) for step in steps] == [("collective_permute", ("a", "b"), 32 * 32 * 4)]


def test_an_axis_that_keeps_its_place_takes_no_part_in_a_permute():
    (step,) = reshard_steps((64, 64), ITEM_BYTES, (("a", "c"), ("b",)), (("b", "c"), ("a",)), MESH_2X2X2)
    assert (step.kind, step.axes) == ("collective_permute", ("a", "b"))
    (step,) = reshard_steps((64, 64), ITEM_BYTES, (("a", "c"), ("b",)), (("c", "a"), ("b",)), MESH_2X2X2)
    assert (step.kind, step.axes) == ("collective_permute", ("a", "c"))


def test_slicing_comes_before_what_it_makes_smaller():
    steps = reshard_steps((64, 64), ITEM_BYTES, (("b",), ()), (("b",), ("a",)), MESH_2X4)
    assert [(step.kind, step.payload_bytes) for step in steps] == [("slice", 0)]
    steps = reshard_steps((64, 64), ITEM_BYTES, (("b",), ()), ((), ("a",)), MESH_2X4)
    assert [(step.kind, step.payload_bytes) for step in steps] == [("slice", 0), ("all_gather", 64 * 32 * 4)]


def test_a_gather_is_counted_by_its_result_and_the_others_by_their_operand():
    assert reshard_steps((64, 64), 2, (("x",), ()), ((), ()), MESH_8)[0].payload_bytes == 64 * 64 * 2
    assert reshard_steps((64, 64), 2, (("x",), ()), ((), ("x",)), MESH_8)[0].payload_bytes == 8 * 64 * 2


def test_axes_of_size_one_cost_nothing():
    mesh = LogicalMesh.of({"data": 8, "model": 1})
    steps = reshard_steps((64, 64), ITEM_BYTES, (("model",), ("data",)), ((), ("data", "model")), mesh)
    assert [(step.kind, step.payload_bytes, step.sharding) for step in steps] == [("slice", 0, ((), ("data", "model")))]
    gather = reshard_steps((64, 64), ITEM_BYTES, (("data",), ("model",)), replicated(2), mesh)
    assert [(step.kind, step.axes) for step in gather] == [("all_gather", ("data",))]


def test_twelve_axes_are_planned_at_once():
    mesh = LogicalMesh.of([2] * 12)
    steps = reshard_steps((4096, 4096), ITEM_BYTES, (mesh.names, ()), ((), mesh.names[::-1]), mesh)
    assert steps[-1].sharding == ((), mesh.names[::-1])


def test_time_is_the_sum_of_the_steps_and_zero_where_nothing_changes():
    machine = topology("h100")
    there = (("a", "b"), ()), (("b",), ())
    assert reshard_time_s((64, 64), ITEM_BYTES, there[0], there[0], MESH_2X4, machine) == 0.0
    assert reshard_time_s((64, 64), ITEM_BYTES, replicated(2), there[0], MESH_2X4, machine) == 0.0
    assert (
        reshard_time_s((4096, 4096), ITEM_BYTES, *there, MESH_2X4, machine)
        > reshard_time_s((64, 64), ITEM_BYTES, *there, MESH_2X4, machine)
        > 0
    )


def compiled_collectives(mesh: LogicalMesh, shape: tuple[int, ...], chain: list[TensorSharding]) -> list[tuple[str, int, frozenset[str]]]:
    """Kind, bytes and axes of every collective that XLA makes of the chain; a sum makes the output scalar."""
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    device_mesh = Mesh(devices, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))

    def program(x):
        x = jnp.sin(x)
        for sharding in chain:
            spec = PartitionSpec(*(axes or None for axes in sharding))
            x = jax.lax.with_sharding_constraint(x, NamedSharding(device_mesh, spec))
        return jnp.cos(x).sum()

    jitted = jax.jit(program, in_shardings=NamedSharding(device_mesh, PartitionSpec()))
    text = jitted.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
    found = re.findall(r"= (.*?) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\((.*)", text)
    return [
        (kind.replace("-", "_"), sum(map(array_bytes, re.findall(r"f32\[([\d,]*)\]", result))), frozenset(read_span(rest, mesh).axes))
        for result, kind, rest in found
    ]


def array_bytes(dims: str) -> int:
    return ITEM_BYTES * math.prod(int(size) for size in dims.split(",") if size)


def distinct_steps(mesh: LogicalMesh, shape: tuple[int, ...], limit: int) -> list[tuple]:
    """(before, step) of all chains; a fixed sample where there are more than `limit`."""
    found = {}
    every = shardings(mesh, len(shape))
    for source, target in itertools.product(every, every):
        before = source
        for step in reshard_steps(shape, ITEM_BYTES, source, target, mesh):
            found.setdefault((before, step), None)
            before = step.sharding
    return random.Random(0).sample(list(found), min(limit, len(found)))


@pytest.mark.parametrize(
    ("mesh", "shape", "limit"),
    [
        (MESH_8, (64, 16), 99),
        (MESH_8, (12, 64), 99),
        (MESH_8, (7, 12), 99),
        (MESH_2X4, (64, 64), 99),
        (MESH_2X4, (6, 64), 30),
        (MESH_2X4, (7, 12), 30),
        (MESH_2X2X2, (64, 64), 40),
        (MESH_2X2X2, (16, 8, 8), 30),
    ],
)
def test_xla_does_each_step_in_exactly_the_one_collective_predicted(mesh, shape, limit):
    for before, step in distinct_steps(mesh, shape, limit):
        expected = [] if step.kind == "slice" else [(step.kind, step.payload_bytes, frozenset(step.axes))]
        assert compiled_collectives(mesh, shape, [before, step.sharding]) == expected, (before, step)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((("a", "b"), ()), (("b",), ("a",))),
        ((("a",), ("b",)), (("b",), ())),
        ((("b",), ("a",)), ((), ("a", "b"))),
        ((("a",), ()), ((), ("b",))),
    ],
)
def test_a_whole_chain_compiles_to_its_steps(source, target):
    steps = reshard_steps((64, 64), ITEM_BYTES, source, target, MESH_2X4)
    expected = [(step.kind, step.payload_bytes, frozenset(step.axes)) for step in steps if step.kind != "slice"]
    assert compiled_collectives(MESH_2X4, (64, 64), [source, *(step.sharding for step in steps)]) == expected


def test_without_all_to_all_a_tensor_is_gathered_and_sliced():
    """A dimension is given up before another is split: more bytes, no all_to_all; on small meshes, large ones and with padding."""
    meshes = (MESH_2X4, MESH_2X2X2, LogicalMesh.of({"a": 2, "b": 2, "c": 2, "d": 2}))
    for mesh in meshes:
        for shape in ((64, 64), (6, 64)):
            own = [one for one in shardings(mesh, 2) if divides(shape, one, mesh)][::5]
            for source, target in itertools.product(own, own):
                steps = reshard_steps(shape, ITEM_BYTES, source, target, mesh, all_to_all=False)
                assert "all_to_all" not in {step.kind for step in steps}
                assert not steps or steps[-1].sharding == target
    steps = reshard_steps((64, 64), ITEM_BYTES, (("a",), ()), ((), ("a",)), MESH_2X4, all_to_all=False)
    assert [step.kind for step in steps] == ["all_gather", "slice"]


def test_the_machine_says_whether_a_reshard_is_priced_as_all_to_all():
    machine = topology("tpu-v5e")
    ends = (("a", "b"), ()), ((), ("a", "b"))
    machines = (machine, as_asked(machine, Preferences(allows_all_to_all=False)))
    times = [reshard_time_s((4096, 4096), ITEM_BYTES, *ends, MESH_2X4, one) for one in machines]
    assert times[0] * 2 < times[1]

"""Collectives against hand-written code of jax.lax, bit for bit, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from spmdctx import communication, ops
from spmdctx.errors import CommunicationError, UnsupportedError

MESHES = {"one axis": ((8,), ("data",)), "two axes": ((4, 2), ("data", "model"))}
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
CROSSED = [[0, 5, 2, 7], [4, 1, 6, 3]]
NEXT = [[(rank + 1) % 8] for rank in range(8)]
PREVIOUS = [[(rank - 1) % 8] for rank in range(8)]


@pytest.fixture(autouse=True)
def world():
    communication.init()
    communication.create_group("pairs", PAIRS)
    communication.create_group("crossed", CROSSED)
    communication.create_group("some", [1, 3, 6])
    yield
    communication.release()


def by_hand(name, axes, groups):
    """The collective as one writes it without the package."""
    words = {"axis_index_groups": groups}
    size = len(groups[0]) if groups else 8
    table = {
        "sum": lambda x: lax.psum(x, axes, **words),
        "max": lambda x: jnp.max(lax.all_gather(x, axes, **words), axis=0),
        "min": lambda x: jnp.min(lax.all_gather(x, axes, **words), axis=0),
        "prod": lambda x: jnp.prod(lax.all_gather(x, axes, **words), axis=0),
        "gather": lambda x: lax.all_gather(x, axes, **words, axis=0, tiled=True),
        "scatter": lambda x: lax.psum_scatter(x, axes, scatter_dimension=0, **words, tiled=True),
        "scatter max": lambda x: jnp.max(lax.all_to_all(x, axes, 0, 0, **words, tiled=True).reshape(size, -1, *x.shape[1:]), axis=0),
        "exchange": lambda x: lax.all_to_all(x, axes, 0, 1, **words, tiled=True),
    }
    return table[name]


def ours(name, group):
    size = {"world": 8, "pairs": 2, "crossed": 4}[group]
    return {
        "sum": ops.AllReduce(group=group),
        "max": ops.AllReduce(ops.ReduceOp.MAX, group),
        "min": ops.AllReduce("min", group),
        "prod": ops.AllReduce(ops.ReduceOp.PROD, group),
        "gather": ops.AllGather(group),
        "scatter": ops.ReduceScatter(group=group),
        "scatter max": ops.ReduceScatter("max", group),
        "exchange": ops.AlltoAll(size, 0, 1, group),
    }[name]


def results(fn, mesh, *, check_vma=False):
    """What each device gets, and the gradient of a weighted sum of it."""
    shape, names = MESHES[mesh]
    made = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32))

    def local(x):
        y = fn(x)
        return y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)

    mapped = jax.shard_map(local, mesh=made, in_specs=PartitionSpec(names), out_specs=PartitionSpec(names), check_vma=check_vma)
    value = jax.jit(mapped)(x)
    gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(x)
    return np.asarray(value), np.asarray(gradient)


NAMES = ("sum", "max", "min", "prod", "gather", "scatter", "scatter max", "exchange")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("group", ["world", "pairs", "crossed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_collective_is_that_of_jax(name, group, mesh):
    axes = MESHES[mesh][1]
    groups = {"world": None, "pairs": PAIRS, "crossed": CROSSED}[group]
    value, gradient = results(ours(name, group), mesh)
    expected, expected_gradient = results(by_hand(name, axes, groups), mesh)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.parametrize("name", ["sum", "max", "gather", "scatter", "exchange"])
@pytest.mark.parametrize("group", ["world", "pairs"])
def test_groups_along_axes_need_none_of_jax_and_work_where_it_checks_what_varies(name, group):
    fn = ours(name, group)
    axes = ("data", "model") if group == "world" else ("model",)
    expected = {
        "sum": lambda x: lax.psum(x, axes),
        "max": lambda x: lax.pmax(x, axes),
        "gather": lambda x: lax.all_gather(x, axes, axis=0, tiled=True),
        "scatter": lambda x: lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
        "exchange": lambda x: lax.all_to_all(x, axes, 0, 1, tiled=True),
    }[name]
    made = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = PartitionSpec(("data", "model"))
    x = jnp.arange(64 * 16, dtype=jnp.float32).reshape(64, 16)
    programs = [
        str(jax.make_jaxpr(jax.shard_map(lambda x, one=one: one(x) + 0 * x.sum(), mesh=made, in_specs=whole, out_specs=whole))(x))
        for one in (fn, expected)
    ]
    if name == "max":  # which has a derivative of its own
        programs = [text for text in programs if "axis_index_groups=None" in text or "pmax" in text]
        assert len(programs) == 2
    else:
        assert programs[0] == programs[1]


def test_a_sum_over_other_groups_says_where_jax_can_do_it():
    with pytest.raises(UnsupportedError, match="check_vma=False"):
        results(ops.AllReduce(group="crossed"), "two axes", check_vma=True)


def test_devices_that_a_group_leaves_out_keep_their_value():
    value, gradient = results(lambda x: ops.AllReduce(group="some")(x), "one axis")
    expected, expected_gradient = results(lambda x: lax.psum(x, "data", axis_index_groups=[[1, 3, 6], [0], [2], [4], [5], [7]]), "one axis")
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("group", "root", "sources"), [("world", 3, [3] * 8), ("pairs", 1, [1, 1, 3, 3, 5, 5, 7, 7]), ("some", 2, [0, 6, 2, 6, 4, 5, 6, 7])]
)
def test_a_broadcast_gives_the_values_of_its_root(group, root, sources):
    def ours(x):
        (value,) = ops.Broadcast(root, group)((x,))
        return value

    def by_hand(x):
        return lax.all_gather(x, "data")[jnp.array(sources)[lax.axis_index("data")]]

    value, gradient = results(ours, "one axis")
    expected, expected_gradient = results(by_hand, "one axis")
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


def test_a_broadcast_takes_every_dtype_and_tree():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tree = {"mask": jnp.arange(8) % 3 == 0, "count": jnp.arange(8)}
    spec = PartitionSpec("data")
    found = jax.jit(jax.shard_map(ops.Broadcast(3), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(tree)
    assert found["mask"].tolist() == [True] * 8
    assert found["count"].tolist() == [3] * 8


def test_an_exchange_between_neighbours_is_a_permutation():
    exchange = ops.NeighborExchange(NEXT, PREVIOUS, recv_shapes=[(8, 16)], send_shapes=[(8, 16)], recv_type=jnp.float32)
    value, gradient = results(lambda x: exchange((x,))[0], "two axes")
    by_hand = [(rank, (rank + 1) % 8) for rank in range(8)]
    expected, expected_gradient = results(lambda x: lax.ppermute(x, ("data", "model"), by_hand), "two axes")
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_an_exchange_with_both_neighbours_and_an_end():
    """A halo: to the next and to the previous one, and zeros beyond the ends."""
    send = [[rank + 1 if rank < 7 else -1, rank - 1] for rank in range(8)]
    receive = [[rank - 1, rank + 1 if rank < 7 else -1] for rank in range(8)]
    exchange = ops.NeighborExchange(send, receive)

    def local(x):
        left, right = exchange((x, 10 * x))
        return jnp.stack([left, right])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(None, "data"), check_vma=False)
    found = jax.jit(mapped)(jnp.arange(1.0, 9.0))
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [20, 30, 40, 50, 60, 70, 80, 0]]


def test_an_exchange_in_pairs_goes_by_ranks_of_the_group():
    exchange = ops.NeighborExchange([[1], [0]], [[1], [0]], group="pairs")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: exchange([x])[0], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert jax.jit(mapped)(jnp.arange(8)).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize("group", ["world", "crossed"])
@pytest.mark.parametrize(
    "make",
    [
        ops.AllReduce,
        ops.ReduceScatter,
        lambda **words: ops.AllGather(words["group"], fusion=words["fusion"]),
        lambda **words: ops.Broadcast(1, **words),
    ],
    ids=["AllReduce", "ReduceScatter", "AllGather", "Broadcast"],
)
def test_a_fusion_number_changes_no_result(make, group):
    expected = results(make(group=group, fusion=0), "one axis")
    for number in (1, 3):
        for found, same in zip(results(make(group=group, fusion=number), "one axis"), expected, strict=True):
            np.testing.assert_allclose(found, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [ops.AllReduce, ops.ReduceScatter, ops.AllGather])
def test_fusion_numbers_keep_collectives_together_and_apart(make):
    """XLA's combiners join collectives over equal lists of devices: which those are shows in the traced program."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def lists(numbers):
        def local(x):
            return [make(fusion=number)(x * (index + 1)) for index, number in enumerate(numbers)]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        jaxpr = jax.make_jaxpr(mapped)(jnp.arange(64.0)).jaxpr.eqns[0].params["jaxpr"]
        return [str(eqn.params["axis_index_groups"]) for eqn in jaxpr.eqns if "axis_index_groups" in eqn.params]

    first, second, third = lists((1, 2, 1))
    assert first == third != second
    assert lists((0,)) == ["None"]


def test_xla_joins_all_reduces_by_their_numbers():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def num_all_reduces(numbers):
        def local(x):
            return [ops.AllReduce(fusion=number)(x * (index + 1)) for index, number in enumerate(numbers)]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        text = jax.jit(mapped).lower(jnp.arange(64.0)).compile().as_text()
        return sum(" all-reduce(" in line for line in text.splitlines())

    assert [num_all_reduces(numbers) for numbers in ((1, 1, 1), (1, 2, 2), (1, 2, 3))] == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ops.AllGather("some")(x), "leaves out 5 of the 8 devices"),
        (lambda x: ops.ReduceScatter()(x[:3]), "cannot divide dimension 0"),
        (lambda x: ops.AlltoAll(4, 0, 1)(x), "has 8 devices"),
        (lambda x: ops.AlltoAll(8, 0, 2)(x), "join dimension 2"),
        (lambda x: ops.AllGather()(x[0, 0]), "a dimension to gather along"),
        (lambda x: ops.Broadcast(8)(x), "from rank 8"),
        (lambda x: ops.AllReduce(group="nobody")(x), "no group 'nobody'"),
        (lambda x: ops.NeighborExchange(NEXT, PREVIOUS)((x, x)), "2 values on each of 8 devices"),
        (lambda x: ops.NeighborExchange(NEXT, PREVIOUS, send_shapes=[(1,)])((x,)), "sends other shapes"),
        (lambda x: ops.AllReduce(fusion=2, group="pairs")(x), "fusion=2"),
    ],
)
def test_what_cannot_be_is_refused(call, text):
    with pytest.raises(CommunicationError, match=text):
        results(call, "one axis")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ops.AllReduce("mean"), CommunicationError, "no reduction 'mean'"),
        (lambda: ops.AllReduce(3), TypeError, "named by a string"),
        (lambda: ops.AllReduce(group=3), TypeError, "named by a string"),
        (lambda: ops.AllReduce(fusion=True), TypeError, "fusion must be an int"),
        (lambda: ops.Broadcast(-1), CommunicationError, "at least 0"),
        (lambda: ops.NeighborExchange([1], [0]), TypeError, "a list of ranks for each rank"),
        (lambda: ops.NeighborExchange([[1], [0]], [[1], [1]]), CommunicationError, "Rank 1 receives from rank 1"),
        (lambda: ops.NeighborExchange([[1], [0]], [[-1], [0]]), CommunicationError, "Rank 1 sends to rank 0"),
        (lambda: ops.NeighborExchange([[2], [0]], [[1], [0]]), CommunicationError, "ranks from -1 to 1"),
    ],
)
def test_a_bad_collective_is_refused_when_it_is_made(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_collective_needs_communication():
    communication.release()
    with pytest.raises(CommunicationError, match=r"spmdctx.ops.AllReduce is called before spmdctx.communication.init\(\)"):
        results(ops.AllReduce(), "one axis")
    communication.init()


def test_a_shard_map_over_a_part_of_the_mesh_is_refused():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data")
    mapped = jax.shard_map(ops.AllReduce(), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)
    with pytest.raises(CommunicationError, match="leaves the mesh axis model to the compiler"):
        jax.jit(mapped)(jnp.arange(8.0))

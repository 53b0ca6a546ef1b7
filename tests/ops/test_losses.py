"""Collectives in the loss of hybrid_parallel and data_parallel, against the same loss in a shard_map written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import spmdctx
from spmdctx import communication, ops
from spmdctx.errors import CommunicationError

AXES = ("data",)
MODES = ("data_parallel", "hybrid_parallel")


@pytest.fixture(autouse=True)
def world():
    communication.init()
    communication.create_group("crossed", [[0, 5, 2, 7], [4, 1, 6, 3]])
    yield
    communication.release()


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mesh():
    return jax.make_mesh((8,), AXES, axis_types=(AxisType.Auto,))


def compare(ours, by_hand, params, batch, specs=None):
    """A step around `spmdctx.value_and_grad(ours)` against gradients of `by_hand` that are summed in a shard_map."""

    def step(params, batch):
        return spmdctx.value_and_grad(ours)(params, batch)

    specs = specs or jax.tree.map(lambda _: PartitionSpec(), params)

    def local(params, batch):
        loss, gradients = jax.value_and_grad(by_hand)(params, batch)
        summed = jax.tree.map(lambda one, spec: one if spec != PartitionSpec() else lax.psum(one, AXES), gradients, specs)
        return lax.pmean(loss, AXES), summed

    hand = jax.shard_map(local, mesh=mesh(), in_specs=(specs, PartitionSpec("data")), out_specs=(PartitionSpec(), specs), check_vma=False)
    run = spmdctx.parallel(step, parallel_mode="hybrid_parallel", gradients_mean=False, layerwise_parallel=["own"], batch_argnums=1)
    found, expected = run(params, batch), jax.jit(hand)(params, batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return run


def test_statistics_over_the_global_batch():
    def loss(mean_of):
        def of(params, x):
            h = x @ params["w"]
            mean = mean_of(h.mean(axis=0))
            return jnp.mean(jnp.tanh(h - mean) ** 2)

        return of

    compare(loss(lambda x: ops.AllReduce()(x) / 8), loss(lambda x: lax.psum(x, "data") / 8), {"w": numbers(16, 8)}, numbers(64, 16, seed=1))


def test_features_of_all_devices_in_a_contrastive_loss():
    def loss(gather):
        def of(params, x):
            h = x @ params["w"]
            logits = h @ gather(h).T
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

        return of

    def by_hand(x):
        return lax.all_gather(x, "data", axis=0, tiled=True)

    compare(loss(ops.AllGather()), loss(by_hand), {"w": numbers(16, 8)}, numbers(64, 16, seed=1))


def test_a_layer_whose_rows_each_device_has_its_own_of():
    """A column-parallel layer by hand: each device has its rows of `own`, and the batch of all."""

    def loss(gather, scatter):
        def of(params, x):
            whole = gather(x)
            return jnp.mean(scatter(jnp.tanh(whole @ params["shared"]) @ gather(params["own"])) ** 2)

        return of

    params = {"own": numbers(16, 8), "shared": numbers(16, 16, seed=2)}
    compare(
        loss(ops.AllGather(), ops.ReduceScatter()),
        loss(
            lambda x: lax.all_gather(x, "data", axis=0, tiled=True), lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        ),
        params,
        numbers(64, 16, seed=1),
        {"own": PartitionSpec("data"), "shared": PartitionSpec()},
    )


def test_statistics_of_each_device_put_side_by_side():
    """The gathered dimension is none of the batch: every device has one row of statistics."""

    def loss(gather):
        def of(params, x):
            rows = gather((x @ params["w"]).mean(axis=0)[None])
            return jnp.mean(rows.reshape(8, -1).std(axis=0))

        return of

    compare(
        loss(ops.AllGather()), loss(lambda x: lax.all_gather(x, "data", axis=0, tiled=True)), {"w": numbers(16, 8)}, numbers(64, 16, seed=1)
    )


def test_groups_and_other_collectives():
    crossed = [[0, 5, 2, 7], [4, 1, 6, 3]]

    def loss(reduce, exchange, send):
        def of(params, x):
            h = reduce(x @ params["w"])
            return jnp.mean(exchange(h) ** 2) + jnp.mean(send(h))

        return of

    following = [(rank, (rank + 1) % 8) for rank in range(8)]
    neighbours = ops.NeighborExchange([[(rank + 1) % 8] for rank in range(8)], [[(rank - 1) % 8] for rank in range(8)])
    compare(
        loss(ops.AllReduce(group="crossed"), ops.AlltoAll(8, 0, 1), lambda x: neighbours((x,))[0]),
        loss(
            lambda x: lax.psum(x, "data", axis_index_groups=crossed),
            lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
            lambda x: lax.ppermute(x, "data", following),
        ),
        {"w": numbers(16, 8)},
        numbers(64, 16, seed=1),
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_all_devices_have_alike_comes_back_once(mode):
    def loss(w, x):
        mean = ops.AllReduce()(x.mean(axis=0)) / 8
        return jnp.mean((x @ w) ** 2), {"mean": mean, "all": ops.AllGather()(x)}

    @spmdctx.parallel(parallel_mode=mode, gradients_mean=False, batch_argnums=1)
    def step(w, x):
        (_, aux), _ = spmdctx.value_and_grad(loss, has_aux=True)(w, x)
        return aux

    x = numbers(64, 16)
    aux = step(numbers(16, 8, seed=1), x)
    np.testing.assert_allclose(aux["mean"], x.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(aux["all"], x)


def test_a_shard_map_in_the_step():
    def forward(w, x):
        spec = PartitionSpec("data")
        local = jax.shard_map(
            lambda w, x: ops.AllReduce()(x @ w), mesh=spmdctx.get_mesh(), in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec()
        )
        return local(w, x)

    step = spmdctx.parallel(forward, parallel_mode="hybrid_parallel")
    x, w = numbers(64, 16), numbers(16, 8, seed=1)
    np.testing.assert_allclose(step(w, x), (x @ w).reshape(8, 8, 8).sum(axis=0), rtol=1e-5)


def test_a_metric_is_the_same_from_the_loss_a_shard_map_and_the_whole_batch():
    def loss(w, x):
        scores = (x @ w)[:, 0]
        return jnp.mean(scores**2), (ops.AllReduce()(jnp.sum(scores > 0)), scores)

    def step(w, x):
        (_, (of_loss, scores)), gradient = spmdctx.value_and_grad(loss, has_aux=True)(w, x)
        count = jax.shard_map(
            lambda own: ops.AllReduce()(jnp.sum(own > 0)),
            mesh=spmdctx.get_mesh(),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
        return w - gradient, of_loss, count(scores), jnp.sum(scores > 0)

    x, w = numbers(64, 16), numbers(16, 8, seed=1)
    run = spmdctx.parallel(step, parallel_mode="hybrid_parallel", gradients_mean=False, batch_argnums=1)
    assert [int(one) for one in run(w, x)[1:]] == [int(jnp.sum((x @ w)[:, 0] > 0))] * 3
    assert run.audit(w, x).ok


@pytest.mark.parametrize("mode", ["hybrid_parallel", "data_parallel", "semi_auto_parallel", "auto_parallel"])
def test_outside_of_a_device_s_part_of_the_step_a_collective_says_where_it_belongs(mode):
    def step(x):
        return ops.AllReduce()(x)

    with pytest.raises(CommunicationError, match=rf"a step in {mode}(.|\n)*a metric of the whole batch needs none(.|\n)*has_aux=True"):
        spmdctx.parallel(step, parallel_mode=mode).plan(numbers(64, 16))


def test_outside_of_a_step_too():
    with pytest.raises(CommunicationError, match="no step"):
        ops.AllReduce()(numbers(4))


def test_a_world_of_one_device_changes_nothing():
    def loss(w, x):
        exchanged = ops.AlltoAll(1, 0, 1)(ops.ReduceScatter()(ops.AllGather()(ops.AllReduce()(x @ w))))
        return jnp.mean(ops.Broadcast(0)(exchanged) ** 2)

    def step(w, x):
        return spmdctx.grad(loss)(w, x)

    w, x = numbers(16, 8, seed=1), numbers(64, 16)
    expected = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))(w, x)
    for options in ({"parallel_mode": "hybrid_parallel", "device_num": 1}, {"parallel_mode": "stand_alone"}):
        np.testing.assert_array_equal(spmdctx.parallel(step, **options)(w, x), expected)


def test_a_loss_that_fits_together_in_neither_view_says_so():
    def loss(w, x):
        gathered = ops.AllGather()(x)
        rows = ops.AllGather()(x.mean(axis=0)[None])
        return jnp.mean(gathered.reshape(64, 16) @ w) + rows.reshape(8, 16).sum()

    step = spmdctx.parallel(lambda w, x: spmdctx.grad(loss)(w, x), parallel_mode="hybrid_parallel", batch_argnums=1)
    with pytest.raises(TypeError) as caught:
        step.plan(numbers(16, 8), numbers(64, 16))
    assert "jax.shard_map over spmdctx.get_mesh()" in caught.value.__notes__[0]


@pytest.mark.parametrize("group", ["world", "crossed", "rows", "some"])
def test_a_mesh_of_ones_own_and_every_kind_of_group_are_planned_audited_and_verified(group):
    communication.create_group("rows", [[0, 1], [2, 3], [4, 5], [6, 7]])
    communication.create_group("some", [1, 3, 6])

    def loss(w, x):
        return jnp.mean(ops.AllReduce(group=group)(x @ w) ** 2)

    def step(w, x):
        return spmdctx.value_and_grad(loss)(w, x)

    run = spmdctx.parallel(step, parallel_mode="hybrid_parallel", batch_argnums=1, mesh={"a": 4, "b": 2})
    args = numbers(16, 8), numbers(64, 16)
    axes = {"rows": ("b",)}.get(group, ("a", "b"))
    assert [row.axes for row in run.plan(*args).collectives] == [axes, axes, ("a", "b"), ("a", "b")]
    assert run.audit(*args).ok
    report = run.verify(*args)
    assert report.ok
    assert "the step holds collectives" in str(report)

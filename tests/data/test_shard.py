"""Batches as global arrays: split as planned, read ahead, padded or dropped as told."""

import gc
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import spmdctx
from spmdctx.errors import PlanError, StrategyError

ROWS = 16


def loss(params, batch):
    return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)


def masked(params, batch):
    error = jnp.mean((batch["x"] @ params - batch["y"]) ** 2, axis=1)
    return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])


PARAMS = np.ones((8, 4), np.float32)


def batch_of(rows=ROWS, seed=0):
    draw = np.random.default_rng(seed).normal(size=(rows, 12)).astype(np.float32)
    return {"x": draw[:, :8], "y": draw[:, 8:]}


def batches_of(*sizes):
    return [batch_of(size, seed) for seed, size in enumerate(sizes)]


def planned(fn=loss, **options):
    step = spmdctx.parallel(fn, **{"parallel_mode": "data_parallel", **options})
    batch = batch_of()
    step.plan(PARAMS, {**batch, "mask": np.ones(ROWS, bool)} if fn is masked else batch)
    return step


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "spmdctx-prefetch"]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("kind", ["step", "plan", "shardings"])
def test_batches_are_placed_as_planned(kind, prefetch):
    step, source = planned(), batches_of(ROWS, ROWS, ROWS)
    shardings = step.in_shardings(PARAMS, batch_of())[1]
    target = {"step": step, "plan": step.plan(PARAMS, batch_of()), "shardings": shardings}[kind]
    found = list(spmdctx.data.shard(source, target, prefetch=prefetch))
    assert_same(found, source)
    for batch in found:
        assert jax.tree.map(lambda array: array.sharding, batch) == shardings
        np.testing.assert_allclose(step(PARAMS, batch), loss(PARAMS, batch), rtol=1e-6)
    assert step.notes == ()
    assert threads() == []


@pytest.mark.parametrize("give", [tuple, list])
def test_several_batch_arguments_come_as_tuples(give):
    step = spmdctx.parallel(lambda params, x, y: loss(params, {"x": x, "y": y}), parallel_mode="data_parallel")
    step.plan(PARAMS, *batch_of().values())
    ((x, y),) = spmdctx.data.shard([give(batch_of().values())], step)
    assert_same({"x": x, "y": y}, batch_of())


def test_a_new_for_is_a_new_pass_and_leaving_one_keeps_the_place():
    source = batches_of(ROWS, ROWS, ROWS)
    batches = spmdctx.data.shard(source, planned())
    for batch in batches:
        assert_same(batch, source[0])
        break
    assert_same(list(batches), source[1:])
    assert list(zip(batches, range(9), strict=False))[-1][1] == 2


def test_memory_that_the_source_writes_to_again_is_not_shared():
    own = batch_of()

    def source():
        for number in range(4):
            own["x"][...] = number
            yield own

    means = [float(batch["x"].mean()) for batch in spmdctx.data.shard(source(), planned(), prefetch=3)]
    assert means == [0, 1, 2, 3]


def test_no_more_batches_are_read_ahead_than_told():
    read = []

    def source():
        for number in range(9):
            read.append(number)
            yield batch_of()

    with spmdctx.data.shard(source(), planned(), prefetch=2) as batches:
        next(batches)
        for _ in range(200):
            if len(read) == 3:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
        assert read == [0, 1, 2]
    assert threads() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_of_the_source_comes_in_its_turn(prefetch):
    def source():
        yield batch_of()
        raise KeyError("no such file")

    batches = spmdctx.data.shard(source(), planned(), prefetch=prefetch)
    next(batches)
    with pytest.raises(KeyError, match="no such file"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert threads() == []


def test_what_is_dropped_ends_its_thread_and_closes_what_it_opened():
    closed = []

    class Source:
        def __iter__(self):
            try:
                while True:
                    yield batch_of()
            finally:
                closed.append(True)

    batches = spmdctx.data.shard(Source(), planned())
    next(batches)
    del batches
    gc.collect()
    assert (threads(), closed) == ([], [True])


@pytest.mark.parametrize("rows", [11, 8, 1])
def test_a_short_batch_is_an_error_by_default(rows):
    batches = spmdctx.data.shard(batches_of(ROWS, rows), planned())
    next(batches)
    with pytest.raises(StrategyError, match=f"A batch has {rows} rows, and the plan 16"):
        next(batches)


def test_a_short_batch_is_dropped_where_told():
    source = batches_of(ROWS, 5, ROWS, 3)
    batches = spmdctx.data.shard(source, planned(), remainder="drop")
    assert_same(list(batches), [source[0], source[2]])
    assert (batches.dropped_rows, len(batches.notes), batches.rows) == (8, 2, ROWS)
    assert "Batch 1 has 5 rows" in batches.notes[0]


def test_dropping_every_batch_is_an_error():
    with pytest.raises(StrategyError, match="Every batch is dropped: the largest has 9 rows"):
        list(spmdctx.data.shard(batches_of(8, 9), planned(), remainder="drop"))


@pytest.mark.parametrize("rows", [11, 8, 1])
def test_a_short_batch_is_padded_with_its_last_row(rows):
    (batch,) = batches = spmdctx.data.shard(batches_of(rows), planned(), remainder="pad")
    want = batch_of(rows)
    assert_same(jax.tree.map(lambda array: array[:rows], batch), want)
    assert_same(batch["x"][rows:], np.repeat(want["x"][-1:], ROWS - rows, axis=0))
    assert (batches.rows, batches.padded_rows) == (rows, ROWS - rows)
    assert f"Batch 0 has {rows} of 16 rows" in batches.notes[0]


@pytest.mark.parametrize("dtype", [bool, np.float32, np.int32])
def test_the_mask_of_padding_is_part_of_every_batch(dtype):
    step = spmdctx.parallel(masked, parallel_mode="data_parallel")
    step.plan(PARAMS, {**batch_of(), "mask": np.ones(ROWS, dtype)})
    source = batches_of(ROWS, 11)
    batches = list(spmdctx.data.shard(source, step, remainder="pad", mask="mask"))
    assert [int(batch["mask"].sum()) for batch in batches] == [ROWS, 11]
    assert batches[0]["mask"].dtype == dtype
    for batch, own in zip(batches, source, strict=True):
        np.testing.assert_allclose(step(PARAMS, batch), loss(PARAMS, own), rtol=1e-5)


def test_a_mask_that_batches_bring_is_zero_for_padding():
    source = [{**batch_of(11), "mask": np.arange(11) % 2 == 0}]
    (batch,) = spmdctx.data.shard(source, planned(masked), remainder="pad", mask="mask")
    assert np.flatnonzero(batch["mask"]).tolist() == [0, 2, 4, 6, 8, 10]


def test_a_mask_may_be_named_by_its_position():
    step = spmdctx.parallel(lambda params, x, y, mask: masked(params, {"x": x, "y": y, "mask": mask}), parallel_mode="data_parallel")
    step.plan(PARAMS, *batch_of().values(), np.ones(ROWS, bool))
    ((*_, mask),) = spmdctx.data.shard([tuple(batch_of(3).values())], step, remainder="pad", mask=2)
    assert int(mask.sum()) == 3


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({**batch_of(), "y": batch_of(12)["y"]}, StrategyError, "has not the shape"),
        ({**batch_of(12), "y": batch_of()["y"]}, StrategyError, "as 'batch/x' has 12 of 16 rows"),
        (batch_of(24), StrategyError, "has not the shape"),
        ({**batch_of(), "x": batch_of()["x"].astype(np.float16)}, StrategyError, "another type than the plan"),
        (batch_of()["x"], PlanError, "no batch of this structure"),
        (batch_of(0), StrategyError, "A batch has 0 rows"),
    ],
    ids=["leaf", "rows", "larger", "type", "structure", "empty"],
)
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_a_batch_that_was_not_planned_is_refused(batch, error, words, remainder):
    with pytest.raises(error, match=words):
        next(spmdctx.data.shard([batch], planned(), remainder=remainder))


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        (lambda: spmdctx.parallel(loss), {}, PlanError, "nothing was planned yet"),
        (lambda: loss, {}, TypeError, "does not know where batches go"),
        (planned, {"mask": "mask"}, PlanError, "let the step take a batch with the mask 'mask'"),
        (planned, {"remainder": "keep"}, StrategyError, "no remainder 'keep'"),
        (planned, {"prefetch": -1}, StrategyError, "prefetch counts batches"),
        (planned, {"prefetch": True}, TypeError, "prefetch counts batches"),
        (planned, {"source": 3}, TypeError, r"reads from an iterable(.|\n)*data\.arrays"),
    ],
)
def test_bad_options_are_refused(target, options, error, words):
    with pytest.raises(error, match=words):
        next(spmdctx.data.shard(options.pop("source", [batch_of()]), target(), **options))


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", ["list", "generator", "arrays"])
def test_a_state_leads_back_to_the_batch_after_the_last_given_out(kind, prefetch):
    def source():
        if kind == "arrays":
            return spmdctx.data.arrays(batch_of(ROWS * 5), ROWS, shuffle=3, epochs=2)
        cut = batches_of(*[ROWS] * 5)
        return cut if kind == "list" else (batch for batch in cut)

    step = planned()
    want = list(spmdctx.data.shard(source(), step))
    first = spmdctx.data.shard(source(), step, prefetch=prefetch)
    next(first), next(first)
    state = json.loads(json.dumps(first.get_state()))
    again = spmdctx.data.shard(source(), step, prefetch=prefetch)
    again.set_state(state)
    assert again.get_state() == state
    assert_same(list(again), want[2:])


def test_a_second_pass_over_an_iterator_that_has_ended_is_an_error():
    batches = spmdctx.data.shard(iter(batches_of(ROWS, ROWS)), planned())
    assert len(list(batches)) == 2
    with pytest.raises(StrategyError, match="has ended: a second pass over it would be empty"):
        list(batches)
    of_a_list = spmdctx.data.shard(batches_of(ROWS, ROWS), planned())
    assert [len(list(of_a_list)), len(list(of_a_list))] == [2, 2]


def test_a_pass_that_goes_on_may_end_with_a_short_batch_that_is_dropped():
    step, source = planned(), batches_of(ROWS, 5)
    batches = spmdctx.data.shard(source, step, remainder="drop")
    batches.set_state({"batches": 1, "source": None})
    assert (list(batches), batches.dropped_rows) == ([], 5)


def test_states_that_lead_nowhere_are_refused():
    step = planned()
    batches = spmdctx.data.shard(batches_of(ROWS), step)
    with pytest.raises(StrategyError, match="no state of a data loader"):
        batches.set_state({"step": 3})
    batches.set_state({"batches": 3, "source": None})
    with pytest.raises(StrategyError, match="ends after 1 batches"):
        next(batches)
    batches = spmdctx.data.shard(iter(batches_of(ROWS, ROWS)), step)
    next(batches)
    batches.set_state({"batches": 1, "source": None})
    with pytest.raises(StrategyError, match="cannot go back"):
        next(batches)


def test_64_bit_types_of_the_place_of_use_hold_in_the_thread():
    with jax.enable_x64(True):
        step = spmdctx.parallel(loss, parallel_mode="data_parallel")
        wide = jax.tree.map(np.float64, batch_of())
        step.plan(PARAMS.astype(np.float64), wide)
        (batch,) = spmdctx.data.shard([wide], step)
        assert batch["x"].dtype == np.float64


def test_shardings_alone_take_the_shape_of_the_first_batch():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    batches = spmdctx.data.shard([np.ones((8, 4)), np.ones((6, 4))], NamedSharding(mesh, PartitionSpec("a", "b")), remainder="pad")
    assert [(batch.shape, batches.rows) for batch in batches] == [((8, 4), 8), ((8, 4), 6)]
    with pytest.raises(StrategyError, match="cannot be split"):
        next(spmdctx.data.shard([np.ones((8, 6))], NamedSharding(mesh, PartitionSpec("a", "b"))))


def test_a_step_of_nnx_objects_is_fed():
    def train(model, optimizer, batch):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = spmdctx.parallel(train, parallel_mode="auto_parallel", search_mode="recursive_programming")
    step.plan(model, optimizer, batch_of())
    losses = [float(step(model, optimizer, batch)) for batch in spmdctx.data.shard([batch_of()] * 3, step)]
    assert losses == sorted(losses, reverse=True)
    assert not any(note.startswith("batch") for note in step.notes)


def test_the_part_of_one_process_is_everything():
    shard = spmdctx.data.process_shard(planned())
    assert shard[:3] == (0, 1, ROWS)
    with pytest.raises(PlanError, match="no batch leaf with rows"):
        spmdctx.data.process_shard(planned().in_shardings(PARAMS, batch_of())[1])


def test_a_training_goes_on_with_the_next_batch_of_its_checkpoint(tmp_path):
    def train(params, batch):
        return params - 0.1 * jax.grad(loss)(params, batch)

    def run(num_steps, stop):
        step = spmdctx.parallel(train, parallel_mode="data_parallel")
        step.plan(PARAMS, batch_of())
        source = spmdctx.data.arrays(batch_of(ROWS * 3), ROWS, shuffle=1, epochs=None)
        with spmdctx.data.shard(source, step) as batches, spmdctx.CheckpointManager(tmp_path / str(stop)) as checkpoints:
            start, params, *_ = checkpoints.restore(PARAMS, data=batches)
            for number in range(start, num_steps):
                params = step(params, next(batches))
                checkpoints.save(number + 1, params, data=batches)
        return np.asarray(params)

    want = run(7, stop=None)
    run(4, stop=4)
    np.testing.assert_array_equal(run(7, stop=4), want)


@pytest.mark.parametrize("rows", [4, 0])
def test_a_mapped_file_that_became_shorter_is_an_error(tmp_path, rows):
    np.save(tmp_path / "x.npy", np.ones((4096, 8), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    batches = iter(spmdctx.data.arrays({"x": mapped[8:]}, 8))
    assert next(batches)["x"][slice(0, 8), slice(0, 8)].sum() == 64
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(128 + rows * 32)
    with pytest.raises(StrategyError, match=r"has become shorter(.|\n)*x\.npy"):
        next(batches)["x"][slice(0, 8), slice(0, 8)]

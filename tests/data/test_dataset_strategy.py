"""dataset_strategy by slices and by Layouts: in plans, step.shard_batch and data.shard; and what is read of images."""

import argparse
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import spmdctx
from spmdctx import Layout
from spmdctx.context.docs import add_context_arguments, options_from_arguments
from spmdctx.context.layers import current_context, get_auto_parallel_context, load_context, set_auto_parallel_context
from spmdctx.errors import ContextError, StrategyError

IMAGES, LABELS = (8, 16, 32), (8,)
LAYOUT = Layout((2, 4), ("h", "w"))


class Counted:
    """An array on a slow medium, which counts what is read of it."""

    def __init__(self, shape, dtype=np.float32):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        self.reads = []

    def __getitem__(self, index):
        block = self.array[index]
        self.reads.append(tuple((part.start, part.stop) for part in index))
        self.pixels = getattr(self, "pixels", 0) + block.size
        return block


def forward(scale, image, label):
    return jnp.mean((image * scale).sum(axis=(1, 2)) * label)


def planned(strategy, mode="semi_auto_parallel", **options):
    step = spmdctx.parallel(forward, parallel_mode=mode, dataset_strategy=strategy, **options)
    plan = step.plan(np.float32(2), jax.ShapeDtypeStruct(IMAGES, np.float32), jax.ShapeDtypeStruct(LABELS, np.float32))
    return step, plan


STRATEGIES = {
    "slices": ((1, 2, 4), (1,)),
    "layout": (LAYOUT("None", "h", "w"), LAYOUT("None")),
    "mixed": (LAYOUT("None", "h", "w"), (1,)),
    "one dimension by two axes": (LAYOUT("None", "None", ("w", "h")), (1,)),
    "rows and columns": ((2, 1, 4), (2,)),
}


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_batches_are_split_as_the_strategy_says(strategy, mode):
    step, plan = planned(strategy, mode)
    slices = tuple(entry.strategy if isinstance(entry, Layout) else entry for entry in strategy)
    image, label = np.random.default_rng(0).normal(size=IMAGES).astype(np.float32), np.ones(LABELS, np.float32)
    for found in (step.shard_batch((image, label)), *spmdctx.data.shard([(image, label)], plan)):
        for array, whole, own in zip(found, (image, label), slices, strict=True):
            np.testing.assert_array_equal(array, whole)
            assert array.sharding.shard_shape(array.shape) == tuple(size // number for size, number in zip(whole.shape, own, strict=True))
        np.testing.assert_allclose(step(np.float32(2), *found), forward(2, image, label), rtol=1e-5)
    assert step.notes == ()


def test_a_layout_names_the_axes_of_the_mesh():
    _, plan = planned(STRATEGIES["layout"])
    assert plan.mesh == {"h": 2, "w": 4}
    assert plan.inputs[1].reason == "dataset_strategy Layout(2, 4)(None, h, w)"
    assert [leaf.sharding for leaf in plan.inputs[1:]] == [((), ("h",), ("w",)), ((),)]
    _, plan = planned(STRATEGIES["one dimension by two axes"])
    assert plan.inputs[1].sharding == ((), (), ("w", "h"))


def test_plans_with_layouts_are_saved_and_loaded(tmp_path):
    step, plan = planned(STRATEGIES["layout"])
    plan.save(tmp_path / "plan.json")
    again = spmdctx.Plan.load(tmp_path / "plan.json")
    assert (again, again.options) == (plan, plan.options)
    loaded = step.with_options(strategy_ckpt_load_file=str(tmp_path / "plan.json"))
    assert loaded.plan(np.float32(2), np.ones(IMAGES, np.float32), np.ones(LABELS, np.float32)).inputs == plan.inputs


def test_layouts_go_through_get_and_through_files():
    set_auto_parallel_context(dataset_strategy=STRATEGIES["mixed"])
    found = get_auto_parallel_context("dataset_strategy")
    assert found[0]["device_matrix"] == [2, 4]
    assert found[0]["tensor_map"] == [-1, 1, 0]
    assert found[1] == [1]
    spmdctx.reset_auto_parallel_context()
    load_context(yaml.safe_load(yaml.safe_dump({"parallel_mode": "semi_auto_parallel", "dataset_strategy": found})))
    assert current_context().dataset_strategy == STRATEGIES["mixed"]
    assert get_auto_parallel_context("dataset_strategy") == found


def test_layouts_are_written_on_the_command_line():
    parser = argparse.ArgumentParser()
    add_context_arguments(parser, {})
    text = json.dumps([LAYOUT("None", "h", "w").to_dict(), [1]])
    assert options_from_arguments(parser.parse_args(["--dataset-strategy", text])) == {"dataset_strategy": STRATEGIES["mixed"]}


@pytest.mark.parametrize(
    ("strategy", "error", "words"),
    [
        ((LAYOUT,), ContextError, "a Layout that was called"),
        ((LAYOUT("None", "h"), (1,)), StrategyError, "gives 2 dimensions for 'image', which has 3"),
        ((Layout((3,), ("h",))("None", "h", "None"), (1,)), StrategyError, "does not divide 8 devices"),
        ((Layout((8, 1), ("h", "w"))("h", "None", "None"), (16,)), StrategyError, "does not divide 8 devices"),
        ((LAYOUT("None", "None", ("h", "w")),), StrategyError, "1 entries, but the step has 2 batch leaves"),
        ([LAYOUT("h")], TypeError, "one Layout"),
        ((LAYOUT("h"), "w"), TypeError, "one Layout"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(strategy, error, words):
    with pytest.raises(error, match=words):
        planned(strategy)


def test_a_layout_whose_slices_do_not_divide_the_batch_is_refused():
    layout = Layout((8,), ("d",))
    step = spmdctx.parallel(forward, parallel_mode="semi_auto_parallel", dataset_strategy=(layout("None", "d", "None"), (1,)))
    with pytest.raises(StrategyError, match="size 12 is not divisible by 8"):
        step.plan(np.float32(2), np.ones((8, 12, 4), np.float32), np.ones(8, np.float32))


def test_a_layout_and_full_batch_contradict_each_other():
    with pytest.raises(ContextError, match="contradict"):
        planned(STRATEGIES["layout"], full_batch=True)


@pytest.mark.parametrize("place", ["shard_batch", "data.shard"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_distinct_block_is_asked_for_once(strategy, place):
    step, _ = planned(strategy)
    image, label = Counted(IMAGES), Counted(LABELS)
    found = step.shard_batch((image, label)) if place == "shard_batch" else next(spmdctx.data.shard([(image, label)], step))
    for own, array, entry in zip((image, label), found, strategy, strict=True):
        np.testing.assert_array_equal(array, own.array)
        slices = entry.strategy if isinstance(entry, Layout) else entry
        assert (len(own.reads), len(set(own.reads)), own.pixels) == (math.prod(slices), math.prod(slices), own.array.size)


def test_padding_reads_real_rows_only():
    step, _ = planned(((4, 1, 2), (4,)))
    image, label = Counted((5, 16, 32)), Counted((5,))
    (found,) = batches = spmdctx.data.shard([(image, label)], step, remainder="pad")
    np.testing.assert_array_equal(found[0], np.concatenate([image.array, np.repeat(image.array[-1:], 3, axis=0)]))
    np.testing.assert_array_equal(found[1], [0, 1, 2, 3, 4, 4, 4, 4])
    # Five rows in halves of the columns, and the last row again for the two rows of the last block.
    assert image.pixels == (5 + 1) * 16 * 32
    assert batches.rows == 5


class TestArrays:
    """`spmdctx.data.arrays`: rows of arrays in files."""

    @pytest.fixture
    def files(self, tmp_path):
        rng = np.random.default_rng(0)
        np.save(tmp_path / "image.npy", rng.normal(size=(20, 16, 32)).astype(np.float32))
        np.save(tmp_path / "label.npy", np.arange(20, dtype=np.float32))
        return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("image", "label"))

    @pytest.mark.parametrize("shuffle", [None, 7])
    def test_epochs_give_every_row_once_in_batches(self, files, shuffle):
        step, _ = planned(((1, 2, 4), (1,)))
        batches = spmdctx.data.shard(spmdctx.data.arrays(files, 8, shuffle=shuffle, epochs=2), step, remainder="pad")
        labels, rows = [], []
        for image, label in batches:
            rows.append(batches.rows)
            labels += np.asarray(label)[: batches.rows].tolist()
            np.testing.assert_array_equal(image, files[0][np.asarray(label).astype(int)])
        assert rows == [8, 8, 4] * 2
        assert sorted(labels[:20]) == sorted(labels[20:]) == list(range(20))
        assert (labels[:20] == labels[20:]) is (shuffle is None)

    def test_shuffled_rows_of_what_takes_slices_only(self):
        array = Counted((12, 3))
        for (block,) in spmdctx.data.arrays((array,), 5, shuffle=0):
            rows = block[slice(0, block.shape[0]), slice(0, 3)]
            assert rows.shape == block.shape
            np.testing.assert_array_equal(rows, array.array[(rows[:, 0] / 3).astype(int)])
        assert array.pixels == array.array.size

    @pytest.mark.parametrize(
        ("tree", "options", "error", "words"),
        [
            ([np.ones(3), np.ones(4)], {}, StrategyError, "different numbers of rows"),
            ([3.0], {}, TypeError, "Blocks are read from an array"),
            ([], {}, StrategyError, "no arrays"),
            ([np.ones(3)], {"batch_size": 0}, StrategyError, "batch_size is 0"),
            ([np.ones(3)], {"epochs": 0}, StrategyError, "epochs is 0"),
            ([np.ones(3)], {"batch_size": 2.0}, TypeError, "batch_size is a number"),
        ],
    )
    def test_what_is_no_set_of_arrays_is_refused(self, tree, options, error, words):
        with pytest.raises(error, match=words):
            spmdctx.data.arrays(tree, **{"batch_size": 2, **options})

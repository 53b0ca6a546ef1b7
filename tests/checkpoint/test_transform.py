"""MindSpore's functions on files per rank: every split becomes every other, and only what is needed is read."""

from __future__ import annotations

import itertools
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx import CheckpointError, UnsupportedError
from spmdctx.checkpoint import Parameter, Reads
from spmdctx.checkpoint.blocks import block_of, slices_of
from spmdctx.checkpoint.tensor_file import Tensor, TensorFile, write_tensors
from spmdctx.plan.mindspore.file import ParameterLayout, write_layouts

SHAPE = (24, 48)
SPLITS = {
    "rows by 8": ParameterLayout((8,), ((0,), ()), SHAPE),
    "columns by 8": ParameterLayout((8,), ((), (0,)), SHAPE),
    "2 by 4": ParameterLayout((2, 4), ((1,), (0,)), SHAPE),
    "4 by 2, turned": ParameterLayout((4, 2), ((0,), (1,)), SHAPE),
    "whole on 8": ParameterLayout((8,), ((), ()), SHAPE),
    "rows by 2 and the optimizer by 4": ParameterLayout((2, 4), ((1,), ()), SHAPE, 1, 4),
    "rows by 4": ParameterLayout((4,), ((0,), ()), SHAPE),
    "columns by 3": ParameterLayout((3,), ((), (0,)), SHAPE),
    "rows by 3": ParameterLayout((3,), ((0,), ()), SHAPE),
    "one": None,
}
BIAS = {8: ParameterLayout((8,), ((),), (5,)), 4: ParameterLayout((4,), ((),), (5,)), 3: ParameterLayout((3,), ((),), (5,))}
W = np.arange(24 * 48, dtype=np.float32).reshape(SHAPE)
B = np.arange(5, dtype=np.float64)


def layouts(split):
    own = SPLITS[split]
    return None if own is None else {"net.w": own, "net.b": BIAS[int(np.prod(own.device_matrix))]}


def num_ranks(split):
    return 1 if SPLITS[split] is None else int(np.prod(SPLITS[split].device_matrix))


def part(split, rank):
    return W if SPLITS[split] is None else W[slices_of(block_of(SPLITS[split], rank))]


def row(name, value):
    return Tensor(name, value.shape, str(value.dtype), lambda: value)


def read(path):
    found = {}
    with TensorFile(path, Reads()) as file:
        for name, info in file.tensors.items():
            found[name] = np.empty(info.shape, info.dtype)
            file.read(name, tuple((0, size) for size in info.shape), found[name])
    return found


def save(folder, split):
    for rank in range(num_ranks(split)):
        rows = [row("net.w", part(split, rank)), row("net.b", B), row("step", np.int32(7))]
        write_tensors(folder / f"rank_{rank}" / f"net{rank}.safetensors", [row(one.name, np.asarray(one.make())) for one in rows])
    if SPLITS[split] is None:
        return None
    path = folder / "strategy.json"
    write_layouts(layouts(split), path)
    return str(path)


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SPLITS, SPLITS)])
def test_every_split_becomes_every_other(tmp_path, source, target):
    strategy = save(tmp_path / "src", source)
    reads = spmdctx.transform_checkpoints(str(tmp_path / "src"), str(tmp_path / "dst"), "new", strategy, layouts(target), process_num=2)
    for rank in range(num_ranks(target)):
        found = read(tmp_path / "dst" / f"rank_{rank}" / f"new{rank}.safetensors")
        assert sorted(found) == ["net.b", "net.w", "step"]
        np.testing.assert_array_equal(found["net.w"], part(target, rank))
        np.testing.assert_array_equal(found["net.b"], B)
        assert found["step"] == 7
    assert reads.needed_bytes == sum(part(target, rank).nbytes + B.nbytes + 4 for rank in range(num_ranks(target)))


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SPLITS, SPLITS)])
def test_the_listed_ranks_are_enough_and_none_is_too_many(tmp_path, source, target):
    strategy = save(tmp_path / "src", source)
    for rank in {0, num_ranks(target) - 1}:
        ranks = spmdctx.rank_list_for_transform(rank, strategy, layouts(target))
        assert ranks == sorted(set(ranks))
        files = {own: tmp_path / "src" / f"rank_{own}" / f"net{own}.safetensors" for own in ranks}
        path = tmp_path / "out.safetensors"
        spmdctx.transform_checkpoint_by_rank(rank, files, str(path), strategy, layouts(target))
        np.testing.assert_array_equal(read(path)["net.w"], part(target, rank))
        for left_out in ranks if len(ranks) > 1 else ():
            fewer = {own: file for own, file in files.items() if own != left_out}
            with pytest.raises(CheckpointError, match="only a part"):
                spmdctx.transform_checkpoint_by_rank(rank, fewer, path, strategy, layouts(target))


@pytest.mark.parametrize(
    ("rank", "source", "target", "ranks"),
    [
        (0, "rows by 8", "rows by 4", [0, 1]),
        (3, "rows by 8", "rows by 4", [6, 7]),
        (1, "rows by 8", "rows by 3", [2, 3, 4, 5]),
        (2, "whole on 8", "rows by 4", [2]),
        (5, "rows by 4", "whole on 8", [0, 1, 2, 3]),
        (0, "2 by 4", "one", list(range(8))),
        (6, "one", "2 by 4", [0]),
        (1, "2 by 4", "rows by 4", [0, 1, 2, 3]),
    ],
)
def test_the_ranks_of_known_cases(rank, source, target, ranks):
    assert spmdctx.rank_list_for_transform(rank, layouts(source), layouts(target)) == ranks


def test_tensors_that_the_target_does_not_know_are_left_out(tmp_path):
    strategy = save(tmp_path / "src", "rows by 8")
    spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy, {"net.w": SPLITS["rows by 4"]})
    assert sorted(read(tmp_path / "dst" / "rank_3" / "new3.safetensors")) == ["net.w", "step"]
    wrong = {"net.w": ParameterLayout((4,), ((), (0,)), (24, 44)), "net.b": BIAS[4]}
    with pytest.raises(CheckpointError, match="another shape in the target"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy, wrong)
    with pytest.raises(CheckpointError, match=r"no 'net\.v'"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy, {"net.v": SPLITS["rows by 4"]})


@pytest.mark.parametrize("target", ["rows by 4", "columns by 3"])
def test_little_more_than_what_is_needed_is_read_from_large_files(tmp_path, target):
    shape = (1536, 3072)
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    source = {"w": ParameterLayout((2, 4), ((1,), (0,)), shape)}
    for rank in range(8):
        write_tensors(tmp_path / f"rank_{rank}" / "a.safetensors", [row("w", value[slices_of(block_of(source["w"], rank))])])
    wanted = {"w": SPLITS[target]._replace(shape=shape)}
    reads = spmdctx.transform_checkpoints(tmp_path, tmp_path / "dst", "new", source, wanted)
    assert reads.needed_bytes == value.nbytes
    assert reads.read_bytes < 1.001 * value.nbytes


@pytest.mark.parametrize("count", [3, 4])
def test_one_tensor_at_a_time_is_in_memory(tmp_path, count):
    shape = (768, 768)
    names = [f"w{index}" for index in range(6)]
    source = {name: ParameterLayout((2, 4), ((1,), (0,)), shape) for name in names}
    target = {name: ParameterLayout((count,), ((), (0,)), shape) for name in names}
    for rank in range(8):
        part = np.full((384, 192), rank, np.float32)
        write_tensors(tmp_path / f"rank_{rank}" / "a.safetensors", [row(name, part) for name in names])
    files = {rank: tmp_path / f"rank_{rank}" / "a.safetensors" for rank in range(8)}
    tracemalloc.start()
    spmdctx.transform_checkpoint_by_rank(0, files, tmp_path / "out.safetensors", source, target)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one_part = 768 * 768 * 4 // count
    assert (tmp_path / "out.safetensors").stat().st_size > 6 * one_part
    assert peak < 2 * one_part + (1 << 18)


@pytest.mark.parametrize("split", [name for name in SPLITS if name != "one"])
@pytest.mark.parametrize("kind", ["arrays", "jax arrays", "parameters"])
def test_slices_are_merged_by_their_strategy(split, kind):
    slices = [part(split, rank) for rank in range(num_ranks(split))]
    if kind == "jax arrays":
        slices = [jnp.asarray(one) for one in slices]
    strategy = {"net.w": SPLITS[split]}
    if kind == "parameters":
        strategy |= {"net.b": BIAS[num_ranks(split)]}
        slices = [Parameter(one, "net.w") for one in slices]
    merged = spmdctx.merge_sliced_parameter(slices, strategy)
    if kind == "parameters":
        assert merged.name == "net.w"
        merged = merged.data
    assert isinstance(merged, jnp.ndarray if kind == "jax arrays" else np.ndarray)
    np.testing.assert_array_equal(merged, W)


def test_without_a_strategy_slices_are_joined_and_of_copies_the_last_is_taken():
    np.testing.assert_array_equal(spmdctx.merge_sliced_parameter([W[:8], W[8:]]), W)
    copies = [np.full((4,), rank) for rank in range(4)]
    merged = spmdctx.merge_sliced_parameter(copies, {"w": ParameterLayout((2, 2), ((1,),), (8,))})
    np.testing.assert_array_equal(merged, [1, 1, 1, 1, 3, 3, 3, 3])


@pytest.mark.parametrize(
    ("slices", "strategy", "error", "text"),
    [
        (W, None, TypeError, "must be a list"),
        ([W], 3, TypeError, "must be a dict"),
        ([], None, CheckpointError, "no slices"),
        (["w"], None, TypeError, "arrays or Parameters"),
        ([Parameter(W, "v"), Parameter(W, "w")], None, CheckpointError, "different parameters"),
        ([Parameter(W, "v")], {"w": SPLITS["rows by 4"]}, CheckpointError, "no 'v'"),
        ([W], {"w": SPLITS["rows by 4"]}, CheckpointError, "slices of 4 ranks"),
        ([W] * 4, {"w": SPLITS["rows by 4"]}, CheckpointError, "slice of rank 0"),
        ([W] * 4, {"w": SPLITS["rows by 4"], "v": SPLITS["rows by 4"]}, CheckpointError, "strategy of one entry"),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices, strategy, error, text):
    with pytest.raises(error, match=text):
        spmdctx.merge_sliced_parameter(slices, strategy)


def test_missing_and_wrong_files_are_named(tmp_path):
    strategy = save(tmp_path / "src", "rows by 8")

    def run(files=None, target="out.safetensors", source=strategy):
        known = {rank: tmp_path / "src" / f"rank_{rank}" / f"net{rank}.safetensors" for rank in range(8)}
        return spmdctx.transform_checkpoint_by_rank(0, known if files is None else files, tmp_path / target, source, None)

    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        run({0: tmp_path / "gone.safetensors"})
    with pytest.raises(CheckpointError, match="no files to read"):
        run({})
    with pytest.raises(CheckpointError, match="strategy that they were saved with"):
        run(source=None)
    with pytest.raises(CheckpointError, match=r"net0\.safetensors(.|\n)*float32\[3, 48\](.|\n)*float32\[6, 48\]"):
        run({rank: tmp_path / "src" / f"rank_{rank}" / f"net{rank}.safetensors" for rank in range(4)}, source=layouts("rows by 4"))
    with pytest.raises(CheckpointError, match="more files than ranks"):
        run(source=layouts("rows by 4"))
    with pytest.raises(UnsupportedError, match=r"out\.ckpt"):
        run(target="out.ckpt")
    with pytest.raises(TypeError, match="checkpoint_files_map"):
        run([1])
    (tmp_path / "src" / "rank_3" / "net3.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank_3"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy)
    (tmp_path / "src" / "rank_3").rmdir()
    with pytest.raises(CheckpointError, match="no file of rank 3"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy)


def test_a_missing_strategy_file_is_named(tmp_path):
    save(tmp_path / "src", "rows by 8")
    for source, target in ((tmp_path / "gone.json", None), (None, tmp_path / "gone.json")):
        with pytest.raises(CheckpointError, match=r"no such strategy file(.|\n)*gone\.json"):
            spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", source, target)
        with pytest.raises(CheckpointError, match=r"gone\.json"):
            spmdctx.rank_list_for_transform(0, source, target)
    with pytest.raises(CheckpointError, match=r"cannot be read(.|\n)*src"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", tmp_path / "src")


@pytest.mark.parametrize("target", ["rows by 4", "one", None])
@pytest.mark.parametrize("by_rank", [False, True], ids=["all at once", "rank by rank"])
def test_what_was_transformed_is_loaded_by_its_folder_alone(tmp_path, target, by_rank):
    strategy, goal = save(tmp_path / "src", "rows by 8"), None if target is None else layouts(target)
    if by_rank:
        files = {rank: tmp_path / "src" / f"rank_{rank}" / f"net{rank}.safetensors" for rank in range(8)}
        for rank in range(1 if target is None else num_ranks(target)):
            path = tmp_path / "dst" / f"rank_{rank}" / f"new{rank}.safetensors"
            spmdctx.transform_checkpoint_by_rank(rank, files, path, strategy, goal)
    else:
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy, goal)
    found = spmdctx.load_distributed_checkpoint({"net": {"w": jnp.zeros_like(W), "b": jnp.zeros_like(B)}}, tmp_path / "dst").network["net"]
    np.testing.assert_array_equal(found["w"], W)
    np.testing.assert_array_equal(found["b"], B)


def test_the_strategy_beside_a_checkpoint_is_taken_where_none_is_named(tmp_path):
    save(tmp_path / "src", "rows by 8")
    spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "middle", "new", layouts("rows by 8"), layouts("rows by 4"))
    spmdctx.transform_checkpoints(tmp_path / "middle", tmp_path / "dst", "new")
    network = {"net": {"w": jnp.zeros_like(W), "b": jnp.zeros_like(B)}}
    np.testing.assert_array_equal(spmdctx.load_distributed_checkpoint(network, tmp_path / "dst").network["net"]["w"], W)


def test_a_flipped_bit_is_named_where_files_are_verified(tmp_path):
    strategy = save(tmp_path / "src", "rows by 4")
    path = tmp_path / "src" / "rank_2" / "net2.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes([content[-40] ^ 4]) + content[-39:])
    with pytest.raises(CheckpointError, match=r"net2\.safetensors(.|\n)*its checksum differs"):
        spmdctx.transform_checkpoints(tmp_path / "src", tmp_path / "dst", "new", strategy, layouts("rows by 8"), verify=True)
    network = {"net": {"w": jnp.zeros_like(W), "b": jnp.zeros_like(B)}}
    with pytest.raises(CheckpointError, match=r"net2\.safetensors(.|\n)*its checksum differs"):
        spmdctx.load_distributed_checkpoint(network, tmp_path / "src", train_strategy_filename=strategy, verify=True)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="rank_id"):
        spmdctx.rank_list_for_transform("0")
    with pytest.raises(CheckpointError, match="no such rank"):
        spmdctx.rank_list_for_transform(4, None, layouts("rows by 4"))
    with pytest.raises(TypeError, match="A strategy"):
        spmdctx.rank_list_for_transform(0, 3)
    with pytest.raises(UnsupportedError, match="ckpt"):
        spmdctx.transform_checkpoints(tmp_path, tmp_path, "new", output_format="ckpt")
    with pytest.raises(TypeError, match="process_num"):
        spmdctx.transform_checkpoints(tmp_path, tmp_path, "new", process_num="2")
    with pytest.raises(CheckpointError, match="no such folder"):
        spmdctx.transform_checkpoints(tmp_path / "gone", tmp_path, "new")
    with pytest.raises(CheckpointError, match="no checkpoint in files per rank"):
        spmdctx.transform_checkpoints(tmp_path, tmp_path, "new")

"""Files per rank: what devices hold is written and loaded into another split, by slices, by name, or refused with the name."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import CheckpointError, UnsupportedError
from spmdctx.plan.mindspore.file import ParameterLayout
from tests.checkpoint.net import Net, forward

SPLITS = {
    "rows": ((8,), P("a0")),
    "columns": ((4,), P(None, "a0")),
    "both": ((2, 4), P("a1", "a0")),
    "three": ((3,), P(None, "a0")),
    "whole": ((2, 2), P()),
}


def sharding(split):
    sizes, spec = SPLITS[split]
    grid = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return NamedSharding(jax.sharding.Mesh(grid, tuple(f"a{index}" for index in range(len(sizes)))), spec)


def value(dtype=np.float32):
    return np.random.default_rng(0).standard_normal((24, 48)).astype(dtype)


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(SPLITS, 2)])
def test_a_checkpoint_of_one_split_is_loaded_into_another(tmp_path, source, target):
    state = {"w": jax.device_put(value(), sharding(source)), "b": np.arange(3), "key": jax.random.key(4), "half": jnp.ones(4, jnp.bfloat16)}
    layouts = spmdctx.save_distributed_checkpoint(state, tmp_path, "net")
    assert spmdctx.build_searched_strategy(tmp_path / "strategy.json") == layouts
    for rank, device in enumerate(sharding(source).mesh.devices.flat):
        file = safetensors.safe_open(tmp_path / f"rank_{rank}" / f"net{rank}.safetensors", "numpy")
        np.testing.assert_array_equal(file.get_tensor("w"), value()[sharding(source).devices_indices_map((24, 48))[device]])
    shapes = {
        "w": jax.ShapeDtypeStruct((24, 48), jnp.float32, sharding=sharding(target)),
        "b": np.zeros(3, np.int64),
        "key": jax.random.key(0),
        "half": jnp.zeros(4, jnp.bfloat16),
    }
    found, reads = spmdctx.load_distributed_checkpoint(shapes, tmp_path)
    assert found["w"].sharding == sharding(target)
    assert found["key"] == jax.random.key(4)
    for name in ("w", "b", "half"):
        np.testing.assert_array_equal(found[name], state[name])
    assert reads.needed_bytes == value().nbytes + 3 * 8 + 2 * 4 + 4 * 2  # of copies one is read
    listed = [tmp_path / f"rank_{rank}" / f"net{rank}.safetensors" for rank in range(len(sharding(source).mesh.devices.flat))]
    again, _ = spmdctx.load_distributed_checkpoint(shapes, listed, train_strategy_filename=tmp_path / "strategy.json")
    np.testing.assert_array_equal(again["w"], state["w"])


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def create():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def trained(directory):
    x = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    step = spmdctx.parallel(train_step, parallel_mode="semi_auto_parallel", device_num=8, enable_parallel_optimizer=True)
    model, optimizer = step.init(create, batch=x)
    step(model, optimizer, x)
    spmdctx.save_distributed_checkpoint({"model": model, "optimizer": optimizer}, directory)
    step.plan(model, optimizer, x).save(directory / "plan.json")
    return model, x


@pytest.mark.parametrize("strategy", ["strategy.json", "plan.json"])
def test_a_trained_model_is_loaded_into_the_plan_of_its_prediction(tmp_path, strategy):
    model, x = trained(tmp_path)
    predict = spmdctx.parallel(forward, parallel_mode="auto_parallel", device_num=4, topology="tpu-v5e")
    network = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    layouts = predict.infer_predict_layout(network, x)
    loaded, reads = spmdctx.load_distributed_checkpoint(network, tmp_path, layouts, tmp_path / strategy)
    assert loaded is network
    np.testing.assert_array_equal(network.up.kernel, model.up.kernel)
    assert network.up.kernel.sharding.is_equivalent_to(predict.in_shardings(network, x)[0]["up"]["kernel"].get_value(), 2)
    np.testing.assert_allclose(predict(network, x), model(x), rtol=1e-5, atol=1e-6)
    assert predict.notes == ()
    header = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert reads.read_bytes <= reads.needed_bytes + header


def test_the_context_names_the_strategy_of_the_training(tmp_path):
    model, _ = trained(tmp_path)
    files = [tmp_path / f"rank_{rank}" / f"checkpoint{rank}.safetensors" for rank in range(8)]
    network = Net(nnx.Rngs(5))
    with pytest.raises(CheckpointError, match="strategy that they were saved with"):
        spmdctx.load_distributed_checkpoint(network, files)
    with spmdctx.auto_parallel_context(strategy_ckpt_load_file=str(tmp_path / "strategy.json")):
        spmdctx.load_distributed_checkpoint(network, files)
    np.testing.assert_array_equal(network.down.kernel, model.down.kernel)


def test_names_and_dtypes_may_differ_unless_loading_is_strict(tmp_path):
    spmdctx.save_distributed_checkpoint({"net": {"w": value(), "n": np.int32(3)}}, tmp_path)
    shapes = {"w": jax.ShapeDtypeStruct((24, 48), jnp.bfloat16), "n": jnp.int16(0)}
    found = spmdctx.load_distributed_checkpoint(shapes, tmp_path).network
    np.testing.assert_array_equal(found["w"], value().astype(jnp.bfloat16))
    assert found["n"] == 3
    with pytest.raises(CheckpointError, match="no 'n'"):
        spmdctx.load_distributed_checkpoint(shapes, tmp_path, strict_load=True)
    with pytest.raises(CheckpointError, match=r"another 'net\.w'"):
        spmdctx.load_distributed_checkpoint({"net": {"w": shapes["w"]}}, tmp_path, strict_load=True)
    for wrong in (jax.ShapeDtypeStruct((24, 48), jnp.int32), jax.ShapeDtypeStruct((24, 47), jnp.float32)):
        with pytest.raises(CheckpointError, match=r"another 'net\.w'"):
            spmdctx.load_distributed_checkpoint({"w": wrong}, tmp_path)
    with pytest.raises(CheckpointError, match="predict_strategy has another 'w'"):
        spmdctx.load_distributed_checkpoint(shapes, tmp_path, {"w": ParameterLayout((2,), ((0,), ()), (24, 44))})


def test_what_the_strategy_of_the_prediction_does_not_name_is_whole_on_its_devices(tmp_path):
    spmdctx.save_distributed_checkpoint({"w": value(), "v": value()}, tmp_path)
    layouts = {"v": ParameterLayout((2,), ((0,), ()), (24, 48))}
    found = spmdctx.load_distributed_checkpoint({"w": value() * 0, "v": jnp.zeros((24, 48))}, tmp_path, layouts).network
    np.testing.assert_array_equal(found["w"], value())
    np.testing.assert_array_equal(found["v"], value())
    assert [shard.data.shape for shard in found["v"].addressable_shards] == [(12, 48)] * 2


def test_a_name_that_fits_twice_is_refused(tmp_path):
    spmdctx.save_distributed_checkpoint({"a": {"w": value()}, "b": {"w": value()}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"several 'w'(.|\n)*a\.w, b\.w"):
        spmdctx.load_distributed_checkpoint({"w": value()}, tmp_path)


def test_encryption_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="dec_key"):
        spmdctx.load_distributed_checkpoint({"w": value()}, tmp_path, dec_key=b"0123456789abcdef", dec_mode="SM4-CBC")
    with pytest.raises(UnsupportedError, match="enc_key"):
        spmdctx.save_distributed_checkpoint({"w": value()}, tmp_path, enc_key=b"0123456789abcdef")
    with pytest.raises(UnsupportedError, match="ckpt"):
        spmdctx.load_distributed_checkpoint({"w": value()}, tmp_path, format="ckpt")


def test_missing_and_damaged_files_are_named(tmp_path):
    state = {"w": jax.device_put(value(), sharding("rows"))}
    spmdctx.save_distributed_checkpoint(state, tmp_path)
    path = tmp_path / "rank_5" / "checkpoint5.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=r"checkpoint5\.safetensors"):
        spmdctx.load_distributed_checkpoint(state, tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="rank_5"):
        spmdctx.load_distributed_checkpoint(state, tmp_path)
    files = [tmp_path / f"rank_{rank}" / f"checkpoint{rank}.safetensors" for rank in range(5)]
    with pytest.raises(CheckpointError, match="no file of rank 5"):
        spmdctx.load_distributed_checkpoint(state, files, train_strategy_filename=tmp_path / "strategy.json")
    for wrong in (3, [1], None):
        with pytest.raises(TypeError, match="checkpoint_filenames"):
            spmdctx.load_distributed_checkpoint(state, wrong)

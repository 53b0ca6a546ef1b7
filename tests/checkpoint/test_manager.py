"""The manager: what was saved comes back into any split, bit for bit, or an error names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import CheckpointError, CheckpointManager
from spmdctx.checkpoint.files import seal


def mesh(*sizes: int) -> jax.sharding.Mesh:
    names = tuple(f"a{index}" for index in range(len(sizes)))
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)


def split(shape: tuple[int, ...], sharding: NamedSharding, seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), sharding)


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_pytree_comes_back_as_what_it_was(tmp_path):
    whole = NamedSharding(mesh(2, 4), P("a0", "a1"))
    state = {
        "w": split((16, 24), whole),
        "half": split((16, 24), whole).astype(jnp.bfloat16),
        "count": jnp.int32(7),
        "host": np.arange(6.0).reshape(2, 3),
        "number": 3,
        "rate": 0.1,
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6), 4),
        "nested": [jnp.ones(3), (np.int16(4),)],
    }
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(state) == (0, state, None, None)
        assert checkpoints.save(5, state)
        checkpoints.wait()
        template = {**jax.tree.map(lambda leaf: leaf * 0, {name: own for name, own in state.items() if "key" not in name})}
        template |= {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 4)}
        step, found, data, plan = checkpoints.restore(template)
    assert (step, data, plan) == (5, None, None)
    assert jax.tree.map(type, found) == jax.tree.map(type, template)
    for name in ("key", "keys"):
        same(jax.random.key_data(found.pop(name)), jax.random.key_data(state.pop(name)))
    same(found, state)
    assert found["w"].sharding == whole
    assert found["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["lr=[0.1,0.2]", "run*", "what?", "[", "a b", "ä/[1]"])
def test_a_folder_of_any_name_keeps_its_checkpoint_also_after_a_move(tmp_path, name):
    state = {"w": split((8, 4), NamedSharding(mesh(8), P("a0"))), "b": jnp.arange(3.0), "empty": jnp.zeros((0, 2))}
    with CheckpointManager(tmp_path / name) as checkpoints:
        assert checkpoints.save(1, state)
    (tmp_path / name).rename(tmp_path / "moved[1]")
    with CheckpointManager(tmp_path / "moved[1]") as checkpoints:
        same(checkpoints.restore(state).state, state)


def test_a_folder_with_a_backslash_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="backslash"):
        CheckpointManager(tmp_path / "a\\b")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_cannot_be_read_back_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointHandler.finalize", lambda *_: None)  # nothing is merged
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(4)})
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoints.close()
    assert checkpoints.steps() == ()


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [((8,), P("a0")), ((8,), P(None, "a0")), ((2, 4), P("a1", "a0")), ((4, 2), P(("a0", "a1"))), ((3,), P("a0")), ((1,), P())],
)
def test_an_array_is_restored_into_another_split(tmp_path, sizes, spec):
    value = split((24, 48), NamedSharding(mesh(4, 2), P("a0", "a1")))
    target = NamedSharding(mesh(*sizes), spec)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": value})
        shape = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype)}
        by_argument = checkpoints.restore(shape, shardings={"w": target}).state["w"]
        by_leaf = checkpoints.restore({"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target)}).state["w"]
    for found in (by_argument, by_leaf):
        assert found.sharding == target
        same(found, value)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def train_step(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def create() -> tuple[Net, nnx.Optimizer[Net]]:
    model = Net(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def batch(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((24, 16)).astype(np.float32)


MODES: list[dict[str, Any]] = [
    {"parallel_mode": "data_parallel", "device_num": 8},
    {"parallel_mode": "semi_auto_parallel", "device_num": 4, "enable_parallel_optimizer": True},
    {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5e"},
]


@pytest.mark.parametrize("options", MODES, ids=lambda one: one["parallel_mode"])
def test_a_resumed_training_equals_the_undisturbed_one_bit_for_bit(tmp_path, options):
    shape = jax.ShapeDtypeStruct((24, 16), jnp.float32)

    def run(last: int, directory: Any) -> list[float]:
        step = spmdctx.parallel(train_step, **options)
        model, optimizer = step.init(create, batch=shape)
        state = {"model": model, "optimizer": optimizer}
        with CheckpointManager(directory, every=2) as checkpoints:
            losses = []
            for number in range(checkpoints.restore(state).step, last):
                losses.append(float(step(model, optimizer, batch(number))))
                checkpoints.save(number + 1, state)
        return losses

    whole = run(6, tmp_path / "whole")
    stopped = run(5, tmp_path / "stopped")
    assert stopped == whole[:5]
    assert run(6, tmp_path / "stopped") == whole[4:]


def test_nnx_objects_are_restored_in_place_into_another_mesh_and_plan(tmp_path):
    shape = jax.ShapeDtypeStruct((24, 16), jnp.float32)
    one = spmdctx.parallel(train_step, **MODES[1])
    model, optimizer = one.init(create, batch=shape)
    one(model, optimizer, batch(0))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer}, plan=one.plan(model, optimizer, shape))
        other = spmdctx.parallel(train_step, **MODES[2])
        new_model, new_optimizer = nnx.eval_shape(create)
        shardings = other.in_shardings(new_model, new_optimizer, shape)
        step, state, _, plan = checkpoints.restore(
            {"model": new_model, "optimizer": new_optimizer}, shardings=dict(zip(("model", "optimizer"), shardings, strict=False))
        )
    assert step == 1
    assert plan == one.plan(model, optimizer, shape)
    assert state["model"] is new_model
    assert new_model.up.kernel.sharding.is_equivalent_to(shardings[0]["up"]["kernel"].get_value(), 2)
    assert float(other(new_model, new_optimizer, batch(1))) == pytest.approx(float(one(model, optimizer, batch(1))), rel=1e-6)


def test_a_model_alone_is_restored_from_a_training_state(tmp_path):
    model, optimizer = create()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "optimizer": optimizer})
        other = Net(nnx.Rngs(9))
        checkpoints.restore({"model": other})
    same(nnx.to_pure_dict(nnx.state(other, nnx.Param)), nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_a_linen_train_state_comes_back(tmp_path):
    net = nn.Dense(8)
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), jnp.ones((2, 4))), tx=optax.adam(0.1))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        found = checkpoints.restore(jax.tree.map(jnp.zeros_like, state)).state
    assert isinstance(found, TrainState)
    same(found, state)


class Batches:
    def __init__(self) -> None:
        self.position = 0

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position, "bytes": b"\x00\xff", "rng": np.random.default_rng(1).bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_the_data_position_comes_back(tmp_path):
    batches = Batches()
    batches.position = 12
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, data=batches)
        other = Batches()
        *_, position, _ = checkpoints.restore({"w": jnp.ones(2)}, data=other)
        assert position == batches.get_state()
        assert other.position == 12
        checkpoints.save(2, {"w": jnp.ones(2)}, data=[1, "two", None])
        *_, position, _ = checkpoints.restore({"w": jnp.ones(2)})
        assert position == [1, "two", None]
        checkpoints.save(3, {"w": jnp.ones(2)}, data={"mean": float("nan"), "most": np.float32("inf")})
        *_, position, _ = checkpoints.restore({"w": jnp.ones(2)})
        assert str(position) == "{'mean': nan, 'most': inf}"
        for odd in (object(), {1: 1, "1": 2}, {"__bytes__": "x"}):
            with pytest.raises(TypeError, match="data position"):
                checkpoints.save(4, {"w": jnp.ones(2)}, data=odd)


def test_it_saves_every_so_many_steps_and_keeps_the_last_ones(tmp_path):
    with CheckpointManager(tmp_path, every=2, keep=2) as checkpoints:
        saved = []
        for step in range(1, 10):
            if checkpoints.save(step, {"w": jnp.full(2, step)}):
                saved.append(step)
            assert set(checkpoints.steps()) <= set(saved)  # asked for while it saves
        assert saved == [2, 4, 6, 8]
        assert checkpoints.save(9, {"w": jnp.full(2, 9)}, force=True)
        checkpoints.wait()
        assert checkpoints.steps() == (8, 9)
        assert checkpoints.latest_step() == 9
        assert checkpoints.restore({"w": jnp.ones(2, jnp.int32)}, step=8).state["w"][0] == 8


def test_what_a_kill_leaves_behind_is_no_checkpoint_and_is_removed(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
    half = tmp_path / "2.orbax-checkpoint-tmp" / "state"
    half.mkdir(parents=True)
    (half / "contents.json").write_text("{")
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == (1,)
        assert checkpoints.restore({"w": jnp.zeros(2)}).state["w"][0] == 1
        assert half.exists()  # it may be another's, who is saving
        checkpoints.save(2, {"w": jnp.ones(2)})
        checkpoints.wait()
        assert checkpoints.steps() == (1, 2)
    assert not half.exists()


def test_who_only_restores_leaves_the_save_of_another_alone(tmp_path):
    state = {"w": jnp.ones((1500, 1500))}
    with CheckpointManager(tmp_path) as training:
        training.save(1, state)
        with CheckpointManager(tmp_path) as reader:
            assert reader.restore({"w": jnp.zeros((1500, 1500))}).state["w"].shape == (1500, 1500)
        training.wait()
        assert training.steps() == (1,)
        with CheckpointManager(tmp_path) as other, pytest.raises(CheckpointError, match="Step 1 is saved already"):
            other.save(1, state)


def test_leaves_without_numbers_come_back(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"none": np.zeros((0, 3)), "w": jnp.ones(2), "of jax": jnp.zeros((2, 0), jnp.int32)})
        found = checkpoints.restore({"none": np.ones((0, 3)), "w": jnp.zeros(2), "of jax": jnp.zeros((2, 0), jnp.int32)}).state
    assert (found["none"].shape, found["of jax"].shape, found["of jax"].dtype) == ((0, 3), (2, 0), jnp.int32)
    np.testing.assert_array_equal(found["w"], [1, 1])


def _files(folder: Any) -> list[Any]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("how", ["a flipped bit", "a cut file", "no file"])
def test_a_damaged_file_is_named(tmp_path, how):
    state = {"w": split((64, 64), NamedSharding(mesh(8), P("a0")))}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        path = max(_files(tmp_path / "1" / "state"), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        if how == "no file":
            path.unlink()
        else:
            path.write_bytes(content if how == "a flipped bit" else content[:-3])
        with pytest.raises(CheckpointError, match=path.name):
            checkpoints.restore(state)


SEAL = [3, 12345]


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("files.json", lambda body: body.update({"../../x": SEAL}), "leads out of the folder"),
        ("files.json", lambda body: body.update({"/etc/passwd": SEAL}), "leads out of the folder"),
        ("files.json", lambda body: body.update({"a" * 5000: SEAL}), "leads out of|cannot be read"),
        ("files.json", lambda body: body.update({"a\0": SEAL}), "is damaged"),
        ("files.json", lambda body: body.update({"_METADATA": 3}), "is damaged"),
        ("files.json", lambda body: body.update({"_METADATA": [1, "2"]}), "is damaged"),
        ("files.json", lambda body: body.pop("contents.json"), "no contents.json"),
        ("contents.json", lambda body: body.update(step=7), "the name of another step"),
        ("contents.json", lambda body: body.update(processes=10**9), "processes"),
        ("contents.json", lambda body: body.update(leaves=[]), "no leaves"),
        ("contents.json", lambda body: body["leaves"].update(w=[[2], "no type", ""]), "leaf 'w'"),
        ("contents.json", lambda body: body["leaves"].update(w=[[-2], "float32", ""]), "leaf 'w'"),
        ("contents.json", lambda body: body.pop("plan"), "no plan"),
        ("contents.json", lambda body: body.update(plan=3), "a plan that is no text"),
        ("contents.0.json", lambda body: body.update(data={"__bytes__": 3}), "data position"),
    ],
)
def test_wrong_content_under_right_checksums_is_refused(tmp_path, name, change, text):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait()
        folder = tmp_path / "1" / "state"
        body = json.loads((folder / name).read_text())
        change(body)
        (folder / name).write_text(json.dumps(body))
        if name != "files.json":
            seals = json.loads((folder / "files.json").read_text())
            (folder / "files.json").write_text(json.dumps({**seals, name: seal(folder / name)}))
        with pytest.raises(CheckpointError, match=text):
            checkpoints.restore({"w": jnp.ones(2)})


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/contents.json", "state/d/x", "state/manifest.ocdbt"])
def test_a_pipe_in_a_checkpoint_does_not_hang(tmp_path, name):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
    (tmp_path / "1" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "1" / name)
    with pytest.raises(CheckpointError, match=Path(name).name), CheckpointManager(tmp_path) as checkpoints:
        checkpoints.restore({"w": jnp.ones(2)})


def test_links_out_of_the_folder_are_refused_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "theirs").write_text("theirs")
    saved = tmp_path / "saved"
    with CheckpointManager(saved) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
    (saved / "2.orbax-checkpoint-tmp").symlink_to(outside)
    with CheckpointManager(saved) as checkpoints:
        checkpoints.save(2, {"w": jnp.ones(2)})
    assert (outside / "theirs").read_text() == "theirs"
    (saved / "2" / "state" / "contents.json").rename(outside / "contents.json")
    (saved / "2" / "state" / "contents.json").symlink_to(outside / "contents.json")
    with pytest.raises(CheckpointError, match="leads out of the folder"), CheckpointManager(saved) as checkpoints:
        checkpoints.restore({"w": jnp.ones(2)})


@pytest.mark.parametrize("directory", ["a\0b", "\ud800", 5, None])
def test_a_folder_that_cannot_be_is_refused(directory):
    with pytest.raises((CheckpointError, TypeError), match="folder of checkpoints"):
        CheckpointManager(directory)


@pytest.mark.parametrize("name", ["contents.json", "files.json", "contents.0.json", "_METADATA", "manifest.ocdbt"])
def test_every_missing_file_is_named(tmp_path, name):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait()
        (tmp_path / "1" / "state" / name).unlink()
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            checkpoints.restore({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"other": np.ones(2, np.float32)}, "no leaf 'other'"),
        ({"w": np.ones(3, np.float32)}, r"another 'w'(.|\n)*float32\[2\](.|\n)*float32\[3\]"),
        ({"w": np.ones(2, np.int32)}, "another 'w'"),
        ({"w": jax.random.key(0)}, "another 'w'"),
        ({"moments": {"mu": np.ones(2, np.float32)}}, r"no place for(.|\n)*moments/nu"),
    ],
)
def test_another_state_is_refused_by_leaf(tmp_path, state, text):
    with CheckpointManager(tmp_path) as checkpoints:
        two = np.ones(2, np.float32)
        checkpoints.save(1, {"w": two, "moments": {"mu": two, "nu": two}})
        with pytest.raises(CheckpointError, match=text):
            checkpoints.restore(state)


@pytest.mark.parametrize(
    ("step", "state", "error", "text"),
    [
        (-1, {"w": 1}, CheckpointError, "counts those that are done(.|\n)*-1"),
        (1.0, {"w": 1}, TypeError, "an int(.|\n)*1.0"),
        (True, {"w": 1}, TypeError, "an int(.|\n)*True"),
        (1, {}, CheckpointError, "nothing to save"),
        (1, {"w": np.zeros((0, 2))}, CheckpointError, "nothing to save(.|\n)*1 leaves"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, step, state, error, text):
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(error, match=text):
            checkpoints.save(step, state)
        assert checkpoints.steps() == ()


def test_an_empty_folder_of_a_step_is_named(tmp_path):
    (tmp_path / "7").mkdir()
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"7.state.files\.json"):
        checkpoints.restore({"w": 1})


def test_wrong_use_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        with pytest.raises(CheckpointError, match="saved already"):
            checkpoints.save(1, {"w": jnp.ones(2)})
        with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
            checkpoints.restore({"w": jnp.ones(2)}, step=4)
        with pytest.raises(TypeError, match="arrays, random keys and numbers"):
            checkpoints.save(2, {"w": "text"})
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointManager(tmp_path, every=0)
    with pytest.raises(TypeError, match="keep"):
        CheckpointManager(tmp_path, keep="3")
    (tmp_path / "state.ckpt").touch()
    with pytest.raises(CheckpointError, match="this is a file"):
        CheckpointManager(tmp_path / "state.ckpt")


def test_a_save_that_fails_is_said_and_the_next_one_works(tmp_path, monkeypatch):
    from spmdctx.checkpoint import handler

    def full(folder, paths):
        raise OSError(28, "No space left on device")

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(handler, "seal_all", full)
            checkpoints.save(2, {"w": jnp.full(2, 2.0)})
            with pytest.raises(CheckpointError, match=r"could not be written(.|\n)*No space left"):
                checkpoints.wait()
        assert checkpoints.steps() == (1,)
        assert checkpoints.save(2, {"w": jnp.full(2, 2.0)})
        restored = checkpoints.restore({"w": jnp.zeros(2)})
        assert (restored.step, restored.state["w"][0]) == (2, 2)


def test_a_write_that_fails_ends_the_save_only_when_the_others_have_ended(tmp_path):
    from spmdctx.checkpoint import handler

    ended = []

    class Write:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def result(self, timeout=None):
            ended.append(self)
            if self.error:
                raise self.error

    with pytest.raises(OSError, match="the first"):
        handler._Sealed([Write(OSError("the first")), Write(OSError("the second")), Write(None)], tmp_path).result()
    assert len(ended) == 3
    assert list(tmp_path.iterdir()) == []

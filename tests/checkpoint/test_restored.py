"""A restored state is taken, or it is said aloud: training never goes on from fresh weights unnoticed."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import spmdctx
from spmdctx import CheckpointError, CheckpointManager
from spmdctx.checkpoint import Restored

TX = optax.adam(1e-2)
LINEN = linen.Dense(8)


def batch(number):
    return jnp.asarray(np.random.default_rng(number).normal(size=(16, 8)).astype(np.float32))


def error(prediction, x):
    return jnp.mean((prediction - jnp.sin(x)) ** 2)


@spmdctx.parallel(parallel_mode="auto_parallel", donate_argnames=("params", "opt_state"))
def pytree_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(lambda params: error(batch @ params["w"], batch))(params)
    updates, opt_state = TX.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@spmdctx.parallel(parallel_mode="data_parallel")
def linen_step(train, batch):
    loss, gradients = jax.value_and_grad(lambda params: error(train.apply_fn(params, batch), batch))(train.params)
    return train.apply_gradients(grads=gradients), loss


@spmdctx.parallel(parallel_mode="semi_auto_parallel")
def nnx_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda model: error(model(batch), batch))(model)
    optimizer.update(model, gradients)
    return loss


def of_pytrees():
    params = {"w": jnp.eye(8)}
    return {"params": params, "opt_state": TX.init(params)}


def of_linen():
    params = LINEN.init(jax.random.key(0), jnp.ones((1, 8)))
    return {"train": TrainState.create(apply_fn=LINEN.apply, params=params, tx=TX)}


def of_nnx():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}


def run_pytrees(state, batch):
    *new, loss = pytree_step(**state, batch=batch)
    return dict(zip(("params", "opt_state"), new, strict=True)), loss


def run_linen(state, batch):
    train, loss = linen_step(**state, batch=batch)
    return {"train": train}, loss


def run_nnx(state, batch):
    return state, nnx_step(**state, batch=batch)


@pytest.mark.parametrize(("make", "run"), [(of_pytrees, run_pytrees), (of_linen, run_linen), (of_nnx, run_nnx)])
def test_the_form_of_the_documentation_resumes_every_kind_of_state(tmp_path, make, run):
    def train(directory, last):
        state, losses = make(), []
        with CheckpointManager(directory, every=2) as checkpoints:
            restored = checkpoints.restore(state)
            state, start = restored.state, restored.step
            for number in range(start, last):
                state, loss = run(state, batch(number))
                losses.append(float(loss))
                checkpoints.save(number + 1, state)
        return losses

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "stopped", 4)
    assert train(tmp_path / "stopped", 6) == whole[4:]


def saved(directory, state):
    with CheckpointManager(directory) as checkpoints:
        checkpoints.save(5, state)


TEMPLATES = {
    "dict": (of_pytrees, "opt_state/0/count"),
    "TrainState": (lambda: of_linen()["train"], "step"),
    "tuple": (lambda: tuple(of_pytrees().values()), "0/w"),
    "nnx.State": (lambda: nnx.state(of_nnx()["model"]), "bias"),
    "objects and an average": (lambda: {**of_nnx(), "average": {"kernel": jnp.ones((8, 8))}}, "average/kernel"),
    "NumPy": (lambda: [np.ones(3)], "0"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_state_that_nobody_takes_is_warned_of_at_once_and_not_saved_over(tmp_path, name):
    make, path = TEMPLATES[name]
    saved(tmp_path, make())
    state = make()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning, match=path) as caught:
            assert checkpoints.restore(state).step == 5
        assert caught[0].filename == __file__
        with pytest.raises(CheckpointError, match=r"was not taken(.|\n)*fix: .*restored\.state"):
            checkpoints.save(6, state)
        with pytest.raises(CheckpointError, match="was not taken"):
            checkpoints.save(7, state, force=True)
        assert checkpoints.steps() == (5,)
        restored = checkpoints.restore(state)
        checkpoints.save(6, restored.state)


def test_a_save_at_a_step_that_is_not_kept_tells_it_too(tmp_path):
    saved(tmp_path, of_pytrees())
    with CheckpointManager(tmp_path, every=100) as checkpoints:
        restored = checkpoints.restore(of_pytrees())
        start = restored.step
        with pytest.raises(CheckpointError, match="was not taken"):
            checkpoints.save(start + 1, of_pytrees())


def test_a_state_kept_but_never_read_is_warned_of_when_it_is_dropped(tmp_path):
    saved(tmp_path, of_pytrees())
    with CheckpointManager(tmp_path) as checkpoints:
        restored = checkpoints.restore(of_pytrees())
    assert restored.step == 5
    with pytest.warns(RuntimeWarning, match="was not taken"):
        del restored


def test_a_state_may_be_read_after_the_manager_is_closed(tmp_path, recwarn):
    saved(tmp_path, of_pytrees())
    with CheckpointManager(tmp_path) as checkpoints:
        restored = checkpoints.restore(of_pytrees())
    assert restored.state
    del restored
    gc.collect()
    assert not [one for one in recwarn if one.category is RuntimeWarning]


@pytest.mark.parametrize(
    "take",
    [
        lambda restored: restored.state,
        lambda restored: restored[1],
        lambda restored: restored[-3],
        lambda restored: restored[:2],
        lambda restored: (lambda start, state, *_: state)(*restored),
        lambda restored: restored._asdict(),
    ],
    ids=["name", "place", "place from the end", "slice", "unpacked", "dict"],
)
def test_every_way_of_reading_a_state_takes_it(tmp_path, take, recwarn):
    saved(tmp_path, of_pytrees())
    with CheckpointManager(tmp_path) as checkpoints:
        take(checkpoints.restore(of_pytrees()))
        checkpoints.save(6, of_pytrees())
    gc.collect()
    assert not [one for one in recwarn if one.category is RuntimeWarning]


def test_objects_that_change_in_place_and_first_runs_give_no_warning(tmp_path, recwarn):
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(of_pytrees()).step == 0
        state = of_nnx()
        checkpoints.save(1, state)
        checkpoints.wait()
        assert checkpoints.restore(state).step == 1
        checkpoints.save(2, state)
    gc.collect()
    assert not [one for one in recwarn if one.category is RuntimeWarning]


def test_a_restored_checkpoint_is_a_named_tuple():
    restored = Restored(3, {"w": 1}, data=[4])
    assert restored == (3, {"w": 1}, [4], None)
    assert (restored.step, restored.data, restored._replace(step=4).step) == (3, [4], 4)
    assert repr(restored) == "Restored(step=3, state={'w': 1}, data=[4], plan=None)"


def test_a_donated_state_is_named_when_it_is_saved(tmp_path):
    state = of_pytrees()
    run_pytrees(jax.device_put(state, jax.devices()[0]), batch(0))
    gone = of_pytrees()
    gone["params"]["w"].delete()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"deleted(.|\n)*params/w"):
            checkpoints.save(1, gone)
        assert checkpoints.steps() == ()

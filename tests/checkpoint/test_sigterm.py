"""After SIGTERM the next save is the last thing that a training does."""

import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx import CheckpointManager
from spmdctx.communication.sigterm import CATCHER
from spmdctx.errors import SAVED


def told():
    """Sends SIGTERM to this process, and waits until it has been heard."""
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 10
    while not CATCHER._heard and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)


@pytest.fixture
def state():
    return {"x": jnp.arange(4.0)}


def test_the_next_save_saves_at_any_step_and_ends(tmp_path, state, capsys):
    with CheckpointManager(tmp_path, every=100) as checkpoints:
        assert not checkpoints.save(1, state)
        told()
        with pytest.raises(SystemExit) as ended:
            checkpoints.save(2, {"x": state["x"] + 1}, data={"batch": 7})
    assert ended.value.code == SAVED
    assert "SIGTERM: step 2 is saved; the same command run again goes on from there." in capsys.readouterr().err
    with CheckpointManager(tmp_path) as checkpoints:
        restored = checkpoints.restore(state)
    assert (restored.step, restored.data) == (2, {"batch": 7})
    np.testing.assert_array_equal(restored.state["x"], np.arange(4.0) + 1)


def test_a_save_that_was_due_anyway_is_made_once(tmp_path, state):
    with CheckpointManager(tmp_path, every=2) as checkpoints:
        told()
        with pytest.raises(SystemExit):
            checkpoints.save(2, state)
    assert checkpoints.steps() == (2,)


def test_sigterm_ends_the_process_again_once_the_manager_is_closed(tmp_path):
    with CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "b"):
        assert signal.getsignal(signal.SIGTERM) == CATCHER._handle
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_left_alone_when_asked(tmp_path):
    with CheckpointManager(tmp_path, save_on_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_own_stays(tmp_path, state):
    heard = []
    former = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with CheckpointManager(tmp_path) as checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.save(1, state)
        assert heard == [True]
    finally:
        signal.signal(signal.SIGTERM, former)

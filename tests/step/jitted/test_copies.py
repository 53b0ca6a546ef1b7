"""Steps are copied and pickled with trainers that hold them: as their function and options."""

import copy
import pickle

import numpy as np
import pytest

import spmdctx

ROWS = np.arange(16.0, dtype=np.float32).reshape(8, 2)


def plain(rows, scale=2):
    return rows * scale


step = spmdctx.parallel(plain, parallel_mode="data_parallel", device_num=4, static_argnames="scale")


@spmdctx.parallel(parallel_mode="data_parallel", device_num=4)
def decorated(rows):
    return rows + 1


class Trainer:
    def __init__(self, scale):
        self.scale = scale
        self.step = spmdctx.parallel(self._step, parallel_mode="data_parallel", device_num=4)

    def _step(self, rows):
        return rows * self.scale

    @spmdctx.parallel(parallel_mode="data_parallel", device_num=4)
    def method(self, rows):
        return rows - self.scale


def pickled(value):
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])


@COPIES
def test_a_copy_is_a_step_with_the_same_options_that_has_run_nothing(copied):
    step(ROWS)
    found = copied(step)
    assert found is not step
    np.testing.assert_array_equal(found(ROWS, scale=3), ROWS * 3)
    assert found.plan(ROWS, scale=3).mesh == {"data": 4}
    assert found.report().num_calls == 1


@COPIES
def test_a_step_that_its_module_has_by_name_is_itself(copied):
    assert copied(decorated) is decorated
    assert copied(Trainer.method) is Trainer.method


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_trainers_copy_runs_steps_of_its_own(copied):
    first = Trainer(2)
    first.step(ROWS)
    second = copied(first)
    second.scale = 5
    np.testing.assert_array_equal(second.step(ROWS), ROWS * 5)
    np.testing.assert_array_equal(second.method(ROWS), ROWS - 5)
    np.testing.assert_array_equal(first.step(ROWS), ROWS * 2)


def test_a_deep_copy_has_the_same_devices():
    import jax

    found = copy.deepcopy(spmdctx.parallel(plain, parallel_mode="data_parallel", devices=jax.devices()[:2], static_argnames="scale"))
    assert found(ROWS).sharding.device_set == set(jax.devices()[:2])

"""What a user is told when XLA says that a program does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spmdctx import parallel, plan
from spmdctx.machine.presets import PRESETS
from spmdctx.step.entry import Entry
from spmdctx.step.out_of_memory import add_advice
from tests.audit.compile_only import need_tpu

LARGE = jax.ShapeDtypeStruct((2**19, 2**17), jnp.float32)


def test_a_program_that_does_not_fit_has_a_note_and_an_error_that_says_what_to_do():
    step = parallel(lambda x: x + 1, parallel_mode="data_parallel", devices=need_tpu(), topology="tpu-v5e")
    assert any("(512 GiB) per device is over the 15.8 GiB that a program may use of a tpu-v5e" in note for note in step.plan(LARGE).notes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        step.audit(LARGE)
    (advice,) = caught.value.__notes__
    assert "predicted peak of 512 GiB, for 15.8 GiB of a tpu-v5e" in advice
    assert f"memory_bytes={int(0.9 * PRESETS['tpu-v5e'].memory_bytes)}" in advice


def test_the_presets_of_tpus_are_what_the_compiler_has():
    step = parallel(lambda x: x + 1, parallel_mode="stand_alone", devices=need_tpu()[:1], topology="tpu-v5e")
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"available HBM \({PRESETS['tpu-v5e'].memory_bytes / 2**30:.2f}G\)"):
        step.audit(LARGE)


def test_a_call_that_runs_out_of_memory_says_what_to_do(monkeypatch):
    def run(entry, read):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    monkeypatch.setattr(Entry, "run", run)
    step = parallel(lambda x: x + 1, parallel_mode="data_parallel")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        step(jnp.ones(8))
    assert "memory_bytes=" in caught.value.__notes__[0]


def test_other_errors_are_left_as_they_are():
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    add_advice(error, 1, PRESETS["cpu"])
    assert not getattr(error, "__notes__", [])


@pytest.mark.parametrize("search", ["recursive_programming", "dynamic_programming", "sharding_propagation", ""])
def test_a_plan_over_what_a_device_has_is_noted_whatever_made_it(search):
    mode = {"parallel_mode": "auto_parallel", "search_mode": search} if search else {"parallel_mode": "data_parallel"}
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))

    def notes(memory_bytes):
        small = dataclasses.replace(PRESETS["cpu"], device="small one", memory_bytes=memory_bytes)
        found = plan(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), w, x, device_num=8, topology=small, **mode)
        return [note for note in found.notes if "that a program may use of a small one" in note]

    assert len(notes(1000)) == 1
    assert not notes(2**20)

"""What a step logs, and that nothing is printed unless somebody asks."""

import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from tests.plan.summary.programs import mlp_loss, shaped, trained

WIDTH = 32


def train(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def budgeted(share):
    """A plan within a share of the memory that the fastest one takes."""
    loss, arguments = mlp_loss(), ({"up": shaped(256, 1024), "down": shaped(1024, 256)}, {name: shaped(64, 32, 256) for name in "xy"})
    options = {"parallel_mode": "auto_parallel", "topology": "h100"}
    fastest = trained(loss, *arguments, **options)
    return trained(loss, *arguments, **options, memory_bytes=int(share * fastest.safe_memory_bytes))


def rows(count, dtype=jnp.float32):
    return jnp.ones((count, WIDTH), dtype)


@pytest.fixture
def said(caplog):
    """A function that gives what was logged since it was last called."""
    caplog.set_level(logging.INFO, "spmdctx")

    def since():
        found = [(record.name.removeprefix("spmdctx."), record.getMessage()) for record in caplog.records if "spmdctx" in record.name]
        caplog.clear()
        return found

    return since


def planned_because(found):
    (text,) = [text for phase, text in found if phase == "plan" and "again" in text]
    return text


def test_phases_are_logged_in_their_order(said):
    spmdctx.parallel(train, parallel_mode="auto_parallel")(rows(WIDTH), rows(16))
    phases = [phase for phase, _ in said()]
    assert [phase for place, phase in enumerate(phases) if phase not in phases[:place]] == ["trace", "plan", "search", "step"]


def test_a_second_call_logs_nothing(said):
    step = spmdctx.parallel(train, parallel_mode="auto_parallel")
    step(rows(WIDTH), rows(16))
    said()
    step(rows(WIDTH), rows(16))
    assert said() == []


def test_verify_logs_what_it_is_at(said):
    spmdctx.parallel(train, parallel_mode="data_parallel").verify(rows(WIDTH), rows(16))
    first, second, *_, last = [text for phase, text in said() if phase == "step.verify"]
    assert first == "train is verified: it runs on 8 devices."
    assert second == "train is verified: it is compiled, and runs on one device."
    assert last.startswith("train was verified in ")
    assert last.endswith(": same on 8 devices as on one: 1 result.")


def test_the_search_logs_each_mesh(said):
    spmdctx.parallel(train, parallel_mode="auto_parallel").plan(rows(WIDTH), rows(16))
    meshes = [text for phase, text in said() if phase == "search"]
    assert len(meshes) == 3
    assert meshes[0].startswith("Mesh data 8: ")


def test_a_budget_logs_each_mesh_within_it(said):
    budgeted(0.8)
    assert any("per device" in text for phase, text in said() if phase == "search")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda step: step(rows(WIDTH), rows(8)), "x f32[16, 32] -> f32[8, 32]"),
        (lambda step: step(rows(WIDTH), rows(16, jnp.bfloat16)), "x f32[16, 32] -> bf16[16, 32]"),
    ],
    ids=["shape", "dtype"],
)
def test_another_shape_is_named_as_the_reason_for_planning_again(said, changed, why):
    step = spmdctx.parallel(train, parallel_mode="data_parallel")
    step(rows(WIDTH), rows(16))
    said()
    changed(step)
    assert planned_because(said()) == f"train is planned again, because this changed: {why}."


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_parallel_optimizer": True}, "enable_parallel_optimizer False -> True"),
        ({"parallel_mode": "semi_auto_parallel"}, "parallel_mode 'data_parallel' -> 'semi_auto_parallel'"),
        ({"device_num": 4}, "device_num"),
    ],
    ids=["optimizer", "mode", "devices"],
)
def test_another_option_is_named_as_the_reason_for_planning_again(said, options, why):
    spmdctx.set_auto_parallel_context(parallel_mode="data_parallel")
    step = spmdctx.parallel(train)
    step.plan(rows(WIDTH), rows(16))
    said()
    with spmdctx.auto_parallel_context(**options):
        step.plan(rows(WIDTH), rows(16))
    assert why in planned_because(said())


def test_what_was_planned_before_is_said_to_be(said):
    step = spmdctx.parallel(train, parallel_mode="data_parallel")
    for count in (16, 8, 16):
        said()
        step(rows(WIDTH), rows(count))
    assert said() == [("plan", "train was planned before for what changed back: x f32[8, 32] -> f32[16, 32].")]


SILENT = """
import jax, jax.numpy as jnp, spmdctx
step = spmdctx.parallel(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), parallel_mode="auto_parallel", device_num=1)
step.plan(jnp.ones((8, 8)), jnp.ones((8, 8)))
"""


def test_nothing_is_printed_by_default():
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "plan" not in done.stderr  # other libraries may write there

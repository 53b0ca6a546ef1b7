"""What calls of a step took, beside its plan."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.machine.presets import PRESETS, rated_flops_per_s
from spmdctx.machine.topology import Topology
from spmdctx.step.report import calls as calls_module
from spmdctx.step.report.calls import Calls

WIDTH, ROWS = 64, 16


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def train(w, batch):
    value, gradient = jax.value_and_grad(loss)(w, batch["x"], batch["y"])
    return w - 0.1 * gradient, value


def batch_of(rows=ROWS):
    return {"x": np.ones((rows, WIDTH), np.float32), "y": np.zeros((rows, WIDTH), np.float32)}


def ran(times, mode="data_parallel", rows=ROWS, fn=train, **options):
    step = spmdctx.parallel(fn, parallel_mode=mode, **options)
    w = jnp.ones((WIDTH, WIDTH))
    for _ in range(times):
        w, value = step(w, batch_of(rows))
        value.block_until_ready()
    return step


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; `now[0]` is its time."""
    now = [0.0]
    monkeypatch.setattr(calls_module.time, "perf_counter", lambda: now[0])
    return now


def called(clock, starts):
    calls = Calls(None)
    for start in starts:
        clock[0] = start + 0.25
        calls.note(start)
    return calls


def test_the_first_call_is_apart(clock):
    calls = called(clock, [0.0, 10.0, 11.0, 12.0])
    assert (calls.count, calls.first_s, calls.step_s(())) == (4, 0.25, 1.0)


def test_a_long_pause_between_calls_is_no_step(clock):
    assert called(clock, [0.0, 1.0, 2.0, 3.0, 63.0, 64.0]).step_s(()) == 1.0


@pytest.mark.parametrize("starts", [[], [0.0], [0.0, 1.0]])
def test_steps_are_timed_from_the_third_call(clock, starts):
    assert called(clock, starts).step_s(()) is None


def test_steps_that_are_queued_are_waited_for(clock, monkeypatch):
    def drain(_devices):
        clock[0] += 39.0

    monkeypatch.setattr(calls_module, "drain", drain)
    calls = called(clock, [0.0, 10.0, 10.25, 10.5, 10.75])
    assert calls.step_s(()) == (11.0 + 39.0 - 10.0) / 4


def test_a_step_that_was_not_called_has_no_report():
    with pytest.raises(spmdctx.PlanError, match="not called"):
        spmdctx.parallel(train, parallel_mode="data_parallel").report()


def test_a_plan_alone_is_no_call():
    step = spmdctx.parallel(train, parallel_mode="data_parallel")
    step.plan(jnp.ones((WIDTH, WIDTH)), batch_of())
    with pytest.raises(spmdctx.PlanError, match="not called"):
        step.report()


@pytest.mark.parametrize(("mode", "devices"), [("stand_alone", 1), ("data_parallel", 8), ("auto_parallel", 8)])
def test_figures_stand_beside_the_plan(mode, devices):
    step = ran(4, mode)
    found, plan = step.report(), step.plan(jnp.ones((WIDTH, WIDTH)), batch_of())
    assert (found.num_calls, found.num_devices, found.name) == (4, devices, "train")
    assert (found.planned_step_s, found.planned_peak_bytes) == (plan.cost.total_s, plan.cost.memory_bytes)
    # The product and the weight's gradient; nothing needs the gradient of x.
    assert found.flops == 2 * 2 * ROWS * WIDTH * WIDTH
    assert found.flops_per_s == pytest.approx(found.flops / found.step_s / devices)
    assert found.samples_per_s == pytest.approx(ROWS / found.step_s)
    assert found.step_ratio == pytest.approx(plan.cost.total_s / found.step_s)
    assert (found.utilization, found.tokens_per_s) == (None, None)


def test_products_inside_of_a_loss_of_each_device_are_counted():
    def local(w, batch):
        value, gradient = spmdctx.value_and_grad(loss)(w, batch["x"], batch["y"])
        return w - 0.1 * gradient, value

    assert ran(3, fn=local, gradients_mean=True).report().flops == 2 * 2 * ROWS * WIDTH * WIDTH


def test_other_shapes_are_counted_anew():
    step = ran(3)
    step(jnp.ones((WIDTH, WIDTH)), batch_of(2 * ROWS))
    assert step.report().num_calls == 1
    assert step.report().step_s is None


def test_tokens_are_counted_of_batches_of_whole_numbers():
    def read(table, tokens):
        return table[tokens].sum()

    step = spmdctx.parallel(read, parallel_mode="data_parallel", batch_argnums=(1,))
    for _ in range(3):
        step(jnp.ones((32, 8)), np.zeros((16, 24), np.int32)).block_until_ready()
    found = step.report()
    assert found.tokens_per_s == pytest.approx(24 * found.samples_per_s)


def test_a_pipeline_reports_its_own_plan(tmp_path):
    def layered(weights, batch):
        def of(weights, x, y):
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - y) ** 2)

        value, gradients = spmdctx.value_and_grad(of)(weights, batch["x"], batch["y"])
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    options = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2}
    step = spmdctx.parallel(layered, **options)
    weights = [jnp.ones((WIDTH, WIDTH))] * 4
    for _ in range(3):
        weights, value = step(weights, batch_of())
        value.block_until_ready()
    found = step.report()
    assert found.planned_step_s == step.plan(weights, batch_of()).step_s
    assert found.flops == (4 + 3 + 4) * 2 * ROWS * WIDTH * WIDTH
    with step.profile(tmp_path) as profile:
        jax.block_until_ready(step(weights, batch_of()))
    assert {row.planned_s for row in profile.rows} == {None}
    assert all(row.what.startswith("other programs (jit_") for row in profile.rows)
    assert sum(row.measured_s for row in profile.rows) == pytest.approx(profile.busy_s)
    assert profile.notes


def test_a_report_is_plain_data_and_a_table():
    found = ran(3).report()
    data = json.loads(json.dumps(found.to_dict()))
    assert data["schema"] == "spmdctx.step_report/1"
    assert data["step_s"] == found.step_s
    assert "planned / measured" in str(found)
    assert "not measured" in str(found)


@pytest.mark.parametrize(("device", "rate"), [("h100", 989e12), ("h200-measured", 989e12), ("tpu-v5p", 459e12), ("cpu", None)])
def test_the_data_sheet_is_what_utilization_refers_to(device, rate):
    machine = PRESETS[device.removesuffix("-measured")]
    fields = {name: getattr(machine, name) for name in machine.__dataclass_fields__}
    assert rated_flops_per_s(Topology(**{**fields, "device": device, "peak_flops_per_s": 1.0})) == rate


def test_the_first_report_compiles_nothing_that_it_would_take_for_a_queue():
    compiled = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    step = ran(3)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first = step.report()
        jax.jit(lambda x: x * 3)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1  # what the test itself compiles
    assert step.report().step_s == first.step_s


class Running:
    """Stands in for the array of a call's result; `runs` tells whether its step still runs when the next call begins."""

    runs = False

    def is_awaited(self):
        return self.runs

    def take(self, result):
        self.runs = result

    def wait(self):
        pass


@pytest.mark.parametrize(
    ("runs", "seconds"),
    [
        pytest.param(lambda place: True, 2.0, id="waited-for-behind-the-loop"),
        pytest.param(lambda place: place % 10 < 9, 2.0, id="waited-for-now-and-then"),
        pytest.param(lambda place: place == 50, 0.25, id="nearly-always-waited-for"),
        pytest.param(lambda place: False, 0.25, id="waited-for-each"),
    ],
)
@pytest.mark.parametrize("count", [5, 200])
def test_calls_that_do_not_wait_are_timed_until_the_report_is_asked_for(clock, runs, seconds, count):
    calls = Calls(None)
    calls._result = Running()
    for place in range(count):
        clock[0] = 9.0 + 0.25 * place
        calls.look()
        calls.note(clock[0], runs(place))
    clock[0] = 9.25 + 2.0 * (count - 1)
    assert calls.step_s(()) == seconds
    clock[0] += 1e6
    assert calls.step_s(()) == seconds


def test_a_report_keeps_no_result_alive_and_sees_what_runs():
    step = spmdctx.parallel(lambda x: {"rows": [jnp.sin(x)], "sum": x.sum()}, parallel_mode="data_parallel")
    seen = step(np.ones((ROWS, WIDTH), np.float32))
    result = step._calls._result
    assert result._array() is seen["sum"]
    result.wait()
    assert seen["sum"].is_ready()
    seen["sum"].delete()  # as a donation does
    assert not result.is_awaited()
    result.wait()
    result.take([seen["rows"][0].repeat(10)])
    assert result._array() is None


def test_a_second_report_gives_the_seconds_that_the_first_one_waited_for(clock, monkeypatch):
    calls = called(clock, [0.0, 10.0, 10.5, 11.0])

    def wait(devices):
        clock[0] += 18.75

    monkeypatch.setattr(calls_module, "drain", wait)
    assert calls.step_s(()) == (11.25 + 18.75 - 10.0) / 3
    monkeypatch.setattr(calls_module, "drain", lambda devices: None)
    assert calls.step_s(()) == (11.25 + 18.75 - 10.0) / 3
    clock[0] = 40.25
    calls.note(40.0)
    assert calls.step_s(()) != (11.25 + 18.75 - 10.0) / 3


def test_a_step_that_returns_keys_is_timed():
    """A key is the smallest array of the result."""

    def drawn(key, batch):
        key, own = jax.random.split(key)
        return key, jax.random.normal(own, batch["x"].shape) + batch["x"]

    step, key = spmdctx.parallel(drawn, parallel_mode="data_parallel"), jax.random.key(0)
    for _ in range(4):
        key, value = step(key, batch_of())
        value.block_until_ready()
    assert step.report().step_s > 0

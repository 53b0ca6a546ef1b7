"""strategy_ckpt_save_file and strategy_ckpt_load_file: the same plan again with no search, or a refusal that says why."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextWarning, PlanError, PlanFormatError, PlanMismatchError
from spmdctx.machine.presets import PRESETS
from spmdctx.plan.data import PeakForm
from spmdctx.step.planning import planner
from spmdctx.step.planning import saved as strategy_files

SGD = optax.sgd(0.1, momentum=0.9)
AUTO = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}


def batch_of(size=16):
    x = np.random.default_rng(0).normal(size=(2, size, 8)).astype(np.float32)
    return {"x": x[0], "y": x[1]}


def state_of():
    w = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    params = {"v": jnp.array(w[0]), "w": jnp.array(w[1])}
    return params, SGD.init(params)


def step_fn(params, opt_state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt_state = SGD.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


@pytest.fixture
def file(tmp_path):
    """A plan whose first layer is split along model."""
    path = tmp_path / "plans" / "plan.json"
    strategy = {"w": {"dev_matrix": [4, 2], "tensor_map": [-1, 0], "tensor_shape": [8, 8]}}
    (tmp_path / "ms.json").write_text(json.dumps({"parallel_layout_item": strategy}))
    files = {"strategy_ckpt_load_file": str(tmp_path / "ms.json"), "strategy_ckpt_save_file": str(path)}
    made = spmdctx.plan(step_fn, *state_of(), batch_of(), **AUTO, **files)
    assert {leaf.path: leaf.sharding for leaf in made.inputs}["params/w"] == ((), ("model",))
    return path


@pytest.fixture
def no_search(monkeypatch):
    def refuse(*_):
        raise AssertionError("a search runs")

    monkeypatch.setattr(strategy_files, "plan_program", refuse)
    monkeypatch.setattr(planner, "search", refuse)


def test_a_loaded_plan_is_the_saved_one_byte_for_byte_and_nothing_is_searched(file, tmp_path, no_search):
    again = tmp_path / "again.json"
    files = {"strategy_ckpt_load_file": str(file), "strategy_ckpt_save_file": str(again)}
    loaded = spmdctx.plan(step_fn, *state_of(), batch_of(), **AUTO, **files)
    assert again.read_bytes() == file.read_bytes()
    assert loaded == spmdctx.Plan.load(file)
    assert loaded.timing.trace_s > 0


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_a_loaded_plan_has_the_peak_of_this_step_and_not_of_the_saved_one(file, no_search, donated):
    """The file's step donates nothing; what is donated is no part of the program."""
    saved = spmdctx.Plan.load(file).cost.memory_bytes
    other = dict(strategy_ckpt_load_file=str(file), donate_argnums=donated, **AUTO)
    loaded = spmdctx.plan(step_fn, *state_of(), batch_of(), **other)
    assert (loaded.cost.memory_bytes < saved) == bool(donated)
    assert bool([note for note in loaded.notes if "as in the strategy file" in note]) == bool(donated)
    assert spmdctx.plan(step_fn, *state_of(), batch_of(), memory_bytes=loaded.safe_memory_bytes, **other).cost == loaded.cost
    with pytest.raises(PlanMismatchError, match="memory per device"):
        spmdctx.plan(step_fn, *state_of(), batch_of(), memory_bytes=loaded.safe_memory_bytes - 1, **other)


def test_a_loaded_plan_says_what_is_too_much_for_this_machine_not_the_saved_one(file, tmp_path, no_search):
    """On a machine of the same name that is too small, the file of one that is not; and the other way round."""
    machine = PRESETS["cpu"]
    cached = replace(machine, scratch_bytes=1 << 20, memory_bytes=1)
    load = {"strategy_ckpt_load_file": str(file), **AUTO}
    again = tmp_path / "again.json"
    small = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=cached, strategy_ckpt_save_file=str(again), **load)
    assert [note for note in small.notes if "that a program may use" in note]
    back = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=machine, **{**load, "strategy_ckpt_load_file": str(again)})
    assert not [note for note in back.notes if "that a program may use" in note]
    assert back.cost == spmdctx.Plan.load(file).cost


def test_reworded_notes_on_the_peak_are_replaced_too(file, tmp_path, no_search, monkeypatch):
    for form in PeakForm:
        monkeypatch.setattr(form, "_value_", form.value.replace("The predicted peak", "In other words, the peak"))
    machine = PRESETS["cpu"]
    load = {"strategy_ckpt_load_file": str(file), **AUTO}
    again = str(tmp_path / "again.json")
    small = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=replace(machine, scratch_bytes=1 << 20, memory_bytes=1), **load)
    small.save(again)
    assert len([note for note in small.notes if "In other words" in note]) == 2
    back = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=machine, **{**load, "strategy_ckpt_load_file": again})
    (note,) = [note for note in back.notes if "In other words" in note]
    assert "as in the strategy file" in note


def test_a_loaded_plan_has_the_time_of_this_machine_and_no_proof_of_another_one(file, no_search):
    """A machine of the same name with slower links and memory: each price is its own, and so is what is proven when asked."""
    machine = PRESETS["cpu"]
    slower = replace(machine, latency_s=2 * machine.latency_s, memory_bytes_per_s=machine.memory_bytes_per_s / 2)
    load, saved = {"strategy_ckpt_load_file": str(file), **AUTO}, spmdctx.Plan.load(file)
    loaded = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=slower, **load)
    assert loaded.cost.total_s > saved.cost.total_s * 1.5
    assert loaded.cost.communication_s == pytest.approx(sum(row.time_s * row.repeats for row in loaded.collectives))
    assert [row.payload_bytes for row in loaded.collectives] == [row.payload_bytes for row in saved.collectives]
    assert loaded.assignment == saved.assignment
    assert (loaded.lower_bound_s, loaded.gap) == (None, None)
    assert [note for note in loaded.notes if note.startswith("The predicted time of a step is") and "as in the strategy file" in note]
    assert not [note for note in spmdctx.plan(step_fn, *state_of(), batch_of(), **load).notes if "as in the strategy file" in note]


def test_a_loaded_plan_is_certified_for_this_machine(file):
    slower = replace(PRESETS["cpu"], link_bytes_per_s=PRESETS["cpu"].link_bytes_per_s / 8)
    load = {"strategy_ckpt_load_file": str(file), **AUTO}
    proven = spmdctx.plan(step_fn, *state_of(), batch_of(), topology=slower, **load).certify()
    assert 0 < proven.lower_bound_s <= proven.cost.total_s


def test_a_step_runs_as_the_file_says(file, no_search):
    step = spmdctx.parallel(step_fn, strategy_ckpt_config={"load_file": str(file)}, **AUTO)
    params, opt_state, loss = step(*state_of(), batch_of())
    want = step_fn(*state_of(), batch_of())
    assert params["w"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    assert opt_state[0].trace["w"].sharding.spec[1] in ("model", ("model", "data"))
    np.testing.assert_allclose(loss, want[2], rtol=1e-5)
    np.testing.assert_allclose(params["w"], want[0]["w"], rtol=1e-4, atol=1e-6)


def test_init_needs_no_batch_and_no_plan_with_a_loaded_strategy(file, no_search):
    step = spmdctx.parallel(step_fn, strategy_ckpt_load_file=str(file), **AUTO)
    params, opt_state = step.init(state_of)
    assert params["w"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
    np.testing.assert_array_equal(params["v"], state_of()[0]["v"])
    assert np.isfinite(step(params, opt_state, batch_of())[2])
    assert step.notes == ()


def test_init_makes_the_first_argument_alone(file, no_search):
    params = spmdctx.parallel(step_fn, strategy_ckpt_load_file=str(file), **AUTO).init(lambda: state_of()[0])
    assert params["w"].sharding.spec == jax.sharding.PartitionSpec(None, "model")


def test_init_makes_nnx_objects_as_a_loaded_strategy_says(tmp_path):
    def train(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    def make():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)

    path = str(tmp_path / "plan.json")
    pinned = {"parallel_layout_item": {"kernel": {"dev_matrix": [8], "tensor_map": [-1, 0], "tensor_shape": [8, 8]}}}
    (tmp_path / "ms.json").write_text(json.dumps(pinned))
    files = {"strategy_ckpt_load_file": str(tmp_path / "ms.json"), "strategy_ckpt_save_file": path}
    spmdctx.plan(train, *make(), batch_of(), **AUTO, **files)
    step = spmdctx.parallel(train, strategy_ckpt_load_file=path, **AUTO)
    model, optimizer = step.init(make)
    assert model.kernel[...].sharding.spec == jax.sharding.PartitionSpec(None, "data")
    assert np.isfinite(float(step(model, optimizer, batch_of())))


def test_init_refuses_a_state_that_the_saved_plan_does_not_have(file):
    step = spmdctx.parallel(step_fn, strategy_ckpt_load_file=str(file), **AUTO)
    with pytest.raises(PlanMismatchError, match=r"(?s)saved plan of step_fn.*input 'params/u' .* is here, but not in the file"):
        step.init(lambda: {"u": jnp.ones((8, 8))})


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        (AUTO, 32, r"input 'batch/x': f32\[16, 8\] in the file, f32\[32, 8\] here"),
        ({**AUTO, "mesh": {"data": 2, "model": 4}}, 16, "mesh axis 'data': 4 in the file, 2 here"),
        ({**AUTO, "topology": "h100"}, 16, "topology: cpu in the file, h100 here"),
        ({**AUTO, "device_num": 4}, 16, "data 4 . model 2 in the file, 4 devices here"),
        ({"parallel_mode": "semi_auto_parallel"}, 16, "parallel_mode: 'auto_parallel' in the file, 'semi_auto_parallel' here"),
    ],
    ids=["program", "mesh", "topology", "devices", "mode"],
)
def test_a_plan_for_something_else_is_refused_with_the_first_differences(file, options, size, said):
    with pytest.raises(PlanMismatchError, match=said):
        spmdctx.plan(step_fn, *state_of(), batch_of(size), strategy_ckpt_load_file=str(file), **options)


def test_another_format_version_is_refused(file):
    body = json.loads(file.read_text())
    body["format_version"] = 99
    file.write_text(json.dumps(body))
    with pytest.raises(PlanFormatError, match="another format version"):
        spmdctx.plan(step_fn, *state_of(), batch_of(), strategy_ckpt_load_file=str(file), **AUTO)


def test_a_binary_strategy_file_of_mindspore_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "strategy.ckpt"
    path.write_bytes(b"\x08\x01\x12\x05\xff")
    with pytest.raises(PlanFormatError, match=r"only those whose name ends in \.json are JSON"):
        spmdctx.plan(step_fn, *state_of(), batch_of(), strategy_ckpt_load_file=str(path), **AUTO)


def test_a_missing_file_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        spmdctx.plan(step_fn, *state_of(), batch_of(), strategy_ckpt_load_file=str(tmp_path / "none.json"), **AUTO)


def test_layouts_of_mindspore_are_pins_whose_origin_is_told(tmp_path):
    path = tmp_path / "strategy.json"
    entries = {
        "w": {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [8, 8], "opt_weight_shard_step": 4, "opt_weight_shard_size": 2},
        "params.vv": {"dev_matrix": [2, 4], "tensor_map": [0, -1], "tensor_shape": [8, 8]},
    }
    path.write_text(json.dumps({"current_stage": 1, "parallel_layout_item": entries}))
    made = spmdctx.plan(step_fn, *state_of(), batch_of(), strategy_ckpt_load_file=str(path), **AUTO)
    (w,) = [leaf for leaf in made.inputs if leaf.path == "params/w"]
    assert made.mesh == {"data": 2, "model": 4}
    assert (w.sharding, w.reason) == ((("data",), ("model",)), "the strategy file")
    assert "Strategy file: 'params.vv' is no parameter of the step (nearest: 'params.v', 'params.w'): ignored." in made.notes
    assert "Strategy file strategy.json: 1 parameters are split as it says." in made.notes
    made.save_mindspore(tmp_path / "back.json")
    back = spmdctx.plan(step_fn, *state_of(), batch_of(), strategy_ckpt_load_file=str(tmp_path / "back.json"), **AUTO)
    kept = {leaf.path: leaf.sharding for leaf in back.inputs if leaf.path.startswith("params")}
    assert kept == {leaf.path: leaf.sharding for leaf in made.inputs if leaf.path.startswith("params")}


def test_layouts_of_mindspore_do_not_replace_the_batch_of_init(tmp_path):
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({"parallel_layout_item": {"w": {"dev_matrix": [8], "tensor_map": [0, -1], "tensor_shape": [8, 8]}}}))
    with pytest.raises(PlanError, match="init needs a batch"):
        spmdctx.parallel(step_fn, strategy_ckpt_load_file=str(path), **AUTO).init(state_of)


def test_modes_without_plans_warn_and_leave_the_files_alone(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.warns(ContextWarning, match="strategy_ckpt_save_file"):
        spmdctx.plan(step_fn, *state_of(), batch_of(), parallel_mode="data_parallel", strategy_ckpt_save_file=str(path))
    assert not path.exists()


@pytest.mark.filterwarnings("ignore::spmdctx.ContextWarning")
@pytest.mark.parametrize(
    ("saved_with", "loaded_with"), [({"gradients_mean": True}, {}), ({}, {"gradients_mean": True, "loss_repeated_mean": False})]
)
def test_an_option_that_the_mode_does_not_use_refuses_no_file(tmp_path, saved_with, loaded_with):
    path, mode = str(tmp_path / "plan.json"), {"parallel_mode": "semi_auto_parallel", "device_num": 8}
    args = *state_of(), batch_of()
    made = spmdctx.plan(step_fn, *args, **mode, **saved_with, strategy_ckpt_save_file=path)
    again = spmdctx.plan(step_fn, *args, **mode, **loaded_with, strategy_ckpt_load_file=path)
    assert again.assignment == made.assignment
    with pytest.raises(PlanMismatchError, match="full_batch"):
        spmdctx.plan(step_fn, *args, **mode, full_batch=True, strategy_ckpt_load_file=path)

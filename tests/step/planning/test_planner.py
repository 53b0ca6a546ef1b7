"""Captured steps to plans: deterministic, self-consistent, and open about what was guessed or kept whole."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmdctx.context.layers import current_context
from spmdctx.errors import InfeasibleError, StrategyError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.lowering.compile import jit_program
from spmdctx.plan.plan import Plan
from spmdctx.rules import registry, replicate
from spmdctx.search.setup import modes
from spmdctx.shard.decorate import shard
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.settings import Settings
from tests.road import CPU, MESH
from tests.trace.capture import capture

X = jnp.ones((32, 64))
PARAMETERS = {"up": jnp.ones((64, 128)) / 64, "down": jnp.ones((128, 64)) / 128}
UNKNOWN = jax.extend.core.Primitive("unheard_of")
UNKNOWN.def_abstract_eval(lambda x: x)


def loss(parameters, x):
    return jnp.mean((jnp.tanh(x @ parameters["up"]) @ parameters["down"] - x) ** 2)


def step(parameters, x):
    value, gradient = jax.value_and_grad(loss)(parameters, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value


def plan(function, *args, devices=8, mesh=None, strict=False, batch=None, memory_bytes=None, layerwise=(), **options):
    options.setdefault("parallel_mode", "auto_parallel")
    if options["parallel_mode"] == "auto_parallel":
        options.setdefault("search_mode", "sharding_propagation")
    context = current_context().replace(**options)
    settings = Settings(context, devices, mesh, CPU, memory_bytes, strict, layerwise)
    return plan_program(capture(function, args, {}, batch_argnums=batch), settings)


def shardings(found):
    return {tensor.path: tensor.sharding for tensor in found.plan.inputs}


PROGRAM = """
import sys
import jax, jax.numpy as jnp, optax
import spmdctx
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.step.planning.test_planner import plan

def model(parameters, x):
    mlp = spmdctx.shard(lambda h, w: jnp.tanh(h @ w), in_strategy=((4, 1), (1, 2)))
    def layer(h, w):
        return h + mlp(h, w), h.sum(-1)
    h, sums = lax.scan(jax.checkpoint(layer), x, parameters["layers"])
    return jnp.mean(jax.nn.softmax(h @ parameters["out"])) + sums.mean()

optimizer = optax.adamw(1e-3)

def train(parameters, state, x, key):
    value, gradient = jax.value_and_grad(model)(parameters, x * jax.random.bernoulli(key, 0.9, x.shape))
    updates, state = optimizer.update(gradient, state, parameters)
    return optax.apply_updates(parameters, updates), state, {"loss": value, "norm": optax.global_norm(gradient)}

parameters = {"layers": jnp.ones((3, 16, 16)), "out": jnp.ones((16, 8))}
for mode in ("auto_parallel", "semi_auto_parallel", "data_parallel"):
    found = plan(train, parameters, optimizer.init(parameters), jnp.ones((8, 16)), jax.random.key(0), parallel_mode=mode)
    found.plan.save(f"{sys.argv[1]}/{mode}.json")
"""


def test_every_process_writes_the_same_plan_file(tmp_path):
    folders = [tmp_path / seed for seed in ("0", "4711")]
    root = str(Path(__file__).parents[3])
    running = []
    for folder in folders:
        folder.mkdir()
        env = {**os.environ, "PYTHONHASHSEED": folder.name, "PYTHONPATH": root}
        running.append(subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], cwd=root, env=env))
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes(), file.name
    plans = [Plan.load(file) for file in sorted(folders[0].iterdir())]
    assert [plan.mode for plan in plans] == ["auto_parallel", "data_parallel", "semi_auto_parallel"]
    assert min(len(plan.collectives) for plan in plans) > 2


def test_planning_twice_gives_the_same_plan():
    first, second = (plan(step, PARAMETERS, X) for _ in range(2))
    assert first.plan == second.plan
    assert first.assignment == second.assignment


def test_a_plan_tells_inputs_outputs_roles_and_costs():
    found = plan(step, PARAMETERS, X, parallel_mode="data_parallel").plan
    assert [(tensor.path, tensor.role) for tensor in found.inputs] == [
        ("parameters/down", Role.PARAMETER),
        ("parameters/up", Role.PARAMETER),
        ("x", Role.BATCH),
    ]
    assert [tensor.role for tensor in found.outputs[:2]] == [Role.PARAMETER] * 2
    assert found.mesh == {"data": 8}
    assert sum(row.payload_bytes for row in found.collectives) == 4 + 2 * 64 * 128 * 4
    assert found.cost.total_s == found.cost.compute_s + found.cost.communication_s
    assert found.cost.memory_bytes >= sum(tensor.local_bytes(found.logical_mesh) for tensor in found.inputs)


def test_state_comes_out_as_it_goes_in():
    found = plan(step, PARAMETERS, X, mesh=MESH)
    assert [tensor.sharding for tensor in found.plan.outputs[:2]] == [tensor.sharding for tensor in found.plan.inputs[:2]]


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_mode_computes_what_one_device_computes(mode, devices):
    found = plan(step, PARAMETERS, X, parallel_mode=mode, devices=devices)
    lowered = jit_program(found.program, found.assignment, found.mesh, jax.devices())
    leaves = jax.tree.leaves((PARAMETERS, X))
    got = lowered.jitted(*[jax.device_put(leaf, place) for leaf, place in zip(leaves, lowered.in_shardings, strict=True)])
    for left, right in zip(got, jax.tree.leaves(step(PARAMETERS, X)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [7, 24, 4096])
def test_planning_needs_no_devices(devices):
    x = jax.ShapeDtypeStruct((4096 * 7 * 3, 64), jnp.float32)
    found = plan(step, PARAMETERS, x, devices=devices, parallel_mode="data_parallel")
    assert found.plan.mesh == {"data": devices}
    assert shardings(found)["x"] == (("data",), ())


def test_a_strategy_spreads_through_the_step():
    def strategic(parameters, x):
        block = shard(lambda x, w: jnp.tanh(x @ w), in_strategy=((4, 1), (1, 2)))
        value, gradient = jax.value_and_grad(lambda p: jnp.mean((block(x, p["up"]) @ p["down"]) ** 2))(parameters)
        return jax.tree.map(lambda p, g: p - g, parameters, gradient), value

    with pytest.warns(Warning, match="no effect"):
        found = plan(strategic, PARAMETERS, X)
    model = next(name for name, size in found.plan.logical_mesh.axes if size == 2)
    assert shardings(found)["parameters/up"] == ((), (model,))
    assert shardings(found)["parameters/down"] == ((model,), ())


def test_a_parameter_named_layerwise_stays_free_of_the_data_parallel_pin():
    found = plan(step, PARAMETERS, X, parallel_mode="hybrid_parallel", layerwise=("*/up",))
    assert found.plan.mesh == {"data": 8}
    assert shardings(found)["parameters/down"] == ((), ())


def test_a_primitive_without_a_rule_is_computed_whole_and_named():
    found = plan(lambda w, x: UNKNOWN.bind(x @ w), PARAMETERS["up"], X, parallel_mode="data_parallel")
    (note,) = [note for note in found.plan.notes if "unheard_of" in note]
    assert "computed whole on every device" in note
    assert "test_planner.py" in note


def test_strict_refuses_a_primitive_without_a_rule():
    with pytest.raises(UnsupportedError, match="unheard_of") as error:
        plan(lambda w, x: UNKNOWN.bind(x @ w), PARAMETERS["up"], X, strict=True)
    assert "test_planner.py" in str(error.value)


def test_strict_refuses_a_primitive_without_a_rule_whatever_the_reason_is_called(monkeypatch):
    monkeypatch.setattr(registry, "replicate", lambda operands, results, _: replicate(operands, results, "(reworded)"))
    with pytest.raises(UnsupportedError, match=r"where: +\S*test_planner\.py:\d+ \(.*\)\n"):
        plan(lambda w, x: UNKNOWN.bind(x @ w), PARAMETERS["up"], X, strict=True)


def test_a_parameter_of_each_devices_own_keeps_its_reason_in_other_words(monkeypatch):
    monkeypatch.setattr(modes, "LAYERWISE", "reworded")
    found = plan(step, PARAMETERS, X, parallel_mode="hybrid_parallel", layerwise=("*/up",))
    assert {leaf.path: leaf.reason for leaf in found.plan.inputs}["parameters/up"] == "reworded"


def test_strict_accepts_what_can_only_be_done_whole_for_a_reason():
    assert plan(step, PARAMETERS, X, strict=True).plan.notes == plan(step, PARAMETERS, X).plan.notes


def test_a_loop_of_unknown_length_is_noted():
    found = plan(lambda w, x: lax.while_loop(lambda s: jnp.sum(s) > 1, lambda s: s @ w, x), jnp.eye(64) / 2, X)
    assert [note for note in found.plan.notes if "trip count" in note]


def test_notes_are_said_once():
    def twice(w, x):
        return lax.while_loop(lambda s: jnp.sum(s) > 1, jnp.sin, lax.while_loop(lambda s: jnp.sum(s) > 2, jnp.sin, x @ w))

    notes = plan(twice, jnp.eye(64), X).plan.notes
    assert len(set(notes)) == len(notes)


def test_a_batch_that_does_not_divide_is_refused_or_noted():
    with pytest.raises(StrategyError, match="not divisible by 8"):
        plan(step, PARAMETERS, X[:30], parallel_mode="data_parallel")
    for mode in ("auto_parallel", "semi_auto_parallel"):
        assert [note for note in plan(step, PARAMETERS, X[:30], parallel_mode=mode).plan.notes if "(30, 64)" in note]


def test_a_mesh_of_the_users_is_taken_as_it_is():
    mesh = LogicalMesh.of({"rows": 2, "columns": 4})
    found = plan(step, PARAMETERS, X, mesh=mesh, parallel_mode="data_parallel")
    assert found.plan.logical_mesh == mesh
    assert shardings(found)["x"] == (("rows", "columns"), ())


def test_a_batch_that_does_not_divide_is_said_to_be_computed_alike():
    notes = plan(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.eye(63), jnp.ones((7, 63))).plan.notes
    (note,) = [note for note in notes if "repeat each other's work" in note]
    assert "dot_general (test_planner.py" in note
    assert not [note for note in plan(step, PARAMETERS, X).plan.notes if "repeat" in note]


def test_guesses_about_the_batch_and_patterns_without_a_match_are_noted():
    assert [note for note in plan(lambda w: w @ w, jnp.eye(64)).plan.notes if "No argument is taken as the batch" in note]
    teacher = plan(lambda p, t, x: (p - jnp.mean(x @ t), 0), jnp.eye(64), jnp.eye(64), X).plan.notes
    assert [note for note in teacher if "differ in dimension 0" in note]
    hybrid = plan(step, PARAMETERS, X, parallel_mode="hybrid_parallel", layerwise=("q*",)).plan.notes
    assert [note for note in hybrid if "'q*' matches no argument" in note]
    several = plan(step, PARAMETERS, X, parallel_mode="hybrid_parallel", layerwise=("q*", "a", "b", "c")).plan.notes
    assert [note for note in several if "layerwise_parallel" in note] == [
        "4 patterns of layerwise_parallel match no argument. They are 'q*', 'a', 'b', and 1 more."
    ]


@pytest.mark.parametrize(("devices", "fix"), [(8, "dynamic_programming"), (1, "more devices")])
def test_a_plan_that_was_not_searched_for_memory_is_refused_over_the_budget(devices, fix):
    needed = plan(step, PARAMETERS, X, devices=devices).plan.safe_memory_bytes
    assert plan(step, PARAMETERS, X, devices=devices, memory_bytes=needed).plan.safe_memory_bytes == needed
    with pytest.raises(InfeasibleError, match=f"(?s)alive there.*memory_bytes={needed}.*{fix}"):
        plan(step, PARAMETERS, X, devices=devices, memory_bytes=needed - 1)


def test_data_parallel_over_the_budget_is_noted():
    found = plan(step, PARAMETERS, X, parallel_mode="data_parallel", memory_bytes=1000)
    assert any("memory_bytes=1000" in note for note in found.plan.notes)


def test_an_argmax_over_a_split_dimension_is_searched_with_the_price_it_is_billed_at():
    found = plan(lambda x: jnp.argmax(jnp.tanh(x), axis=-1), jnp.ones((7, 1 << 16)), search_mode="dynamic_programming", mesh=MESH).plan
    assert [row.kind for row in found.collectives] == ["all_gather", "all_gather"]
    assert found.gap == 0.0

"""The parallel optimizer: what each level splits, that nothing else changes, and that no activation is gathered for it."""

import math
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import spmdctx
from spmdctx.ir.graph import Role
from spmdctx.models import DecoderConfig, abstract_program
from tests.audit.compile_only import need_tpu

LEVELS = ("level1", "level2", "level3")
MODES = {
    "data_parallel": {"parallel_mode": "data_parallel"},
    "semi_auto_parallel": {"parallel_mode": "semi_auto_parallel"},
    "dynamic_programming": {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming"},
    "recursive_programming": {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"},
    "sharding_propagation": {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"},
}
MASK = {"up": True, "down": True, "bias": False, "odd": False}
LABELS = {"up": "adam", "down": "momentum", "bias": "momentum", "odd": "adam"}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "masked": optax.masked(optax.adamw(1e-2), MASK),
    "multi_transform": optax.multi_transform({"adam": optax.adamw(1e-2), "momentum": optax.sgd(1e-2, momentum=0.9)}, LABELS),
}
BATCH, WIDTH, HIDDEN = 32, 128, 256


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - y) ** 2) * (1 + params["odd"].sum())


def step_of(tx, differentiate=jax.value_and_grad):
    def step(params, state, x, y):
        value, gradients = differentiate(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(tx, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (HIDDEN,), "odd": (7,)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 10, dtype) for name, shape in shapes.items()}
    return params, tx.init(params), *(jnp.asarray(rng.normal(size=(BATCH, WIDTH)), dtype) for _ in range(2))


def parallel(step, level="level1", mode="data_parallel", **options):
    config = {"parallel_optimizer_threshold": 1, "optimizer_level": level, **options.pop("config", {})}
    return spmdctx.parallel(step, **MODES[mode], enable_parallel_optimizer=True, parallel_optimizer_config=config, **options)


def is_split(plan):
    """Path to whether the leaf is split, of all inputs but the batch."""
    return {leaf.path: any(leaf.sharding) for leaf in plan.inputs if leaf.role is not Role.BATCH}


def after(step, steps, state, *batch):
    for _ in range(steps):
        state = step(*state, *batch)[: len(state)]
    return state


def difference(got, want):
    """The largest difference by the documented measure."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / max(float(jnp.abs(b).max()), 1e-3)) for a, b in pairs)


# The same numbers


def check_numbers(tx, level, mode, steps=20):
    with jax.enable_x64(True):
        params, state, *batch = arguments(tx, np.float64)
        step = parallel(step_of(tx), level, mode)
        assert any(split for path, split in is_split(step.plan(params, state, *batch)).items() if path.startswith("state"))
        want = after(jax.jit(step_of(tx)), steps, (params, state), *batch)
        assert difference(after(step, steps, (params, state), *batch), want) < 1e-6
        report = step.audit(params, state, *batch)
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "level"), list(zip(OPTIMIZERS, LEVELS * 3, strict=False)))
def test_twenty_steps_are_those_of_the_whole_optimizer(name, level):
    check_numbers(OPTIMIZERS[name], level, "data_parallel")


@pytest.mark.parametrize(("mode", "level"), list(zip(list(MODES)[1:], ["level3", "level3", "level1", "level2"], strict=True)))
def test_every_mode_splits_the_state_and_computes_the_same(mode, level):
    check_numbers(OPTIMIZERS["clip_by_global_norm"], level, mode, steps=5)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_the_state_of_an_nnx_optimizer_is_split():
    def step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    _, _, x, y = arguments(OPTIMIZERS["adamw"])
    split = parallel(step, "level3", config={"parallel_optimizer_threshold": 0})
    found = is_split(split.plan(model, optimizer, x, y))
    assert sum(found.values()) == 4 * 3
    assert split.verify(model, optimizer, x, y).ok
    assert np.isfinite(split(model, optimizer, x, y))
    assert not model.up.kernel[...].sharding.is_fully_replicated


def test_the_state_of_a_linen_train_state_is_split():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(jnp.tanh(nn.Dense(HIDDEN)(x)))

    def step(state, x, y):
        value, gradients = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn(params, x) - y) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), value

    net = Net()
    _, _, x, y = arguments(OPTIMIZERS["adamw"])
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), x), tx=optax.lamb(1e-2))
    split = parallel(step, config={"parallel_optimizer_threshold": 0})
    found = is_split(split.plan(state, x, y))
    assert {path for path, own in found.items() if own} == {path for path in found if "mu" in path or "nu" in path}
    assert split.verify(state, x, y).ok


# What is split, and what stays whole


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_splits_the_state_and_the_third_the_weights_too(level):
    found = is_split(parallel(step_of(OPTIMIZERS["adamw"]), level).plan(*arguments(OPTIMIZERS["adamw"])))
    small = {path for path in found if path.endswith(("odd", "count"))}
    weights = {path for path in found if path.startswith("params")}
    assert {path for path, own in found.items() if own} == set(found) - small - (set() if level == "level3" else weights)


@pytest.mark.parametrize("level", LEVELS)
def test_a_callback_without_a_result_sees_the_whole_weight(level):
    seen, (params, *rest) = [], arguments(OPTIMIZERS["adamw"])

    def step(params, *rest):
        jax.debug.callback(seen.append, params["up"])
        return step_of(OPTIMIZERS["adamw"])(params, *rest)

    jax.block_until_ready(parallel(step, level)(params, *rest))
    jax.effects_barrier()
    np.testing.assert_array_equal(seen[0], params["up"])
    assert len(seen) == 1


def test_the_second_level_splits_gradients_of_parameters_without_state():
    tx = optax.sgd(1e-2)
    kinds = [Counter(row.kind for row in parallel(step_of(tx), level).plan(*arguments(tx)).collectives) for level in LEVELS[:2]]
    assert [own["reduce_scatter"] for own in kinds] == [0, 3]


def test_what_is_small_or_does_not_divide_stays_whole_and_is_named():
    tx = OPTIMIZERS["adamw"]
    params, _, *batch = arguments(tx)

    def step(params, state, x, y):
        value, gradients = jax.value_and_grad(lambda params: loss(params, x, y) + (params["long"] ** 2).sum())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {**params, "long": jnp.ones((1001, 33))}
    plan = parallel(step, config={"parallel_optimizer_threshold": 2}).plan(params, tx.init(params), *batch)
    small, indivisible = (next(note for note in plan.notes if word in note) for word in ("less than 2 KB", "does not divide"))
    assert "'params/bias'" in small
    assert "'params/odd'" in small
    assert "'params/long' [1001, 33] by its dimension 0" in indivisible
    found = is_split(plan)
    assert not any(found[f"state/0/{kind}/{name}"] for kind in ("mu", "nu") for name in ("bias", "odd", "long"))
    assert found["state/0/mu/up"]


def test_a_shard_size_splits_over_so_many_neighbours_only():
    tx = OPTIMIZERS["adamw"]
    step = parallel(step_of(tx), "level3", config={"optimizer_weight_shard_size": 2})
    plan = step.plan(*arguments(tx))
    assert plan.mesh == {"data": 4, "data_shard": 2}
    leaves = {leaf.path: leaf.sharding for leaf in plan.inputs}
    assert leaves["params/up"] == leaves["state/0/mu/up"] == (("data_shard",), ())
    assert leaves["x"] == (("data", "data_shard"), ())
    assert step.audit(*arguments(tx)).ok
    assert step.verify(*arguments(tx)).ok


@pytest.mark.parametrize("size", [3, 1])
def test_a_shard_size_that_does_not_fit_is_said(size):
    tx = OPTIMIZERS["adamw"]
    plan = parallel(step_of(tx), config={"optimizer_weight_shard_size": size}).plan(*arguments(tx))
    assert not any(is_split(plan).values())
    assert any("optimizer_weight_shard_size" in note and "'params/up'" in note for note in plan.notes)


def test_state_joins_the_axes_that_its_parameter_is_not_split_over():
    def step(params, state, x):
        def objective(params):
            split = spmdctx.shard(jnp.matmul, in_strategy=((2, 1), (1, 4)))
            return jnp.mean(spmdctx.shard(jnp.matmul, in_strategy=((2, 4), (4, 1)))(jnp.tanh(split(x, params["up"])), params["down"]) ** 2)

        value, gradients = jax.value_and_grad(objective)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tx = OPTIMIZERS["adamw"]
    params, _, x, _ = arguments(tx)
    params = {name: params[name] for name in ("up", "down")}
    parts = parallel(step, "level3", "semi_auto_parallel")
    plan = parts.plan(params, tx.init(params), x)
    first, second = plan.mesh
    leaves = {leaf.path: leaf.sharding for leaf in plan.inputs}
    assert leaves["params/up"] == leaves["state/0/nu/up"] == ((first,), (second,))
    assert leaves["params/down"] == leaves["state/0/nu/down"] == ((second, first), ())
    assert parts.audit(params, tx.init(params), x).ok
    assert parts.verify(params, tx.init(params), x).ok


# What is communicated


@pytest.mark.parametrize(("differentiate", "level"), [(jax.value_and_grad, "level3"), (spmdctx.value_and_grad, "level2")])
def test_weights_are_gathered_and_gradients_scattered_and_no_activation_moves(differentiate, level):
    tx = OPTIMIZERS["adamw"]
    sizes = sorted(leaf.nbytes for name, leaf in arguments(tx)[0].items() if name != "odd")
    step = parallel(step_of(tx, differentiate), level)
    report = step.audit(*arguments(tx))
    assert report.ok, str(report)
    rows = step.plan(*arguments(tx)).collectives
    for kind in ("all_gather", "reduce_scatter"):
        assert sorted(row.payload_bytes for row in rows if row.kind == kind) == sizes


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stacked_weights_are_split_inside_a_layer_in_a_local_loss_too(micro_batches):
    def step(params, x):
        def objective(params):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0] ** 2)

        return jax.tree.map(jnp.subtract, params, spmdctx.grad(objective)(params))

    split = parallel(step, "level3", grad_accumulation_step=micro_batches)
    plan = split.plan({"layers": jnp.stack([jnp.eye(WIDTH)] * 7)}, jnp.ones((BATCH, WIDTH)))
    assert plan.inputs[0].sharding == ((), ("data",), ())
    assert sorted(row.kind for row in plan.collectives) == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize(("mode", "micro_batches"), [("data_parallel", 1), ("semi_auto_parallel", 2)])
def test_stacked_weights_are_split_inside_a_layer_and_gathered_layer_by_layer(mode, micro_batches):
    differentiate = jax.value_and_grad if micro_batches == 1 else spmdctx.value_and_grad

    def step(params, state, x):
        def objective(params, x):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0] ** 2)

        value, gradients = differentiate(objective)(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tx = OPTIMIZERS["adamw"]
    params = {"layers": jnp.stack([jnp.eye(WIDTH)] * 7)}
    split = parallel(step, "level3", mode, grad_accumulation_step=micro_batches)
    plan = split.plan(params, tx.init(params), jnp.ones((BATCH, WIDTH)))
    assert plan.summary.startswith("ZeRO-3 over 8 devices")
    assert {leaf.sharding for leaf in plan.inputs if len(leaf.shape) == 3} == {((), ("data",), ())}
    gathers = [row for row in plan.collectives if row.kind == "all_gather"]
    assert {(row.payload_bytes, row.repeats) for row in gathers} == {(WIDTH * WIDTH * 4, 7 * micro_batches)}
    assert split.audit(params, tx.init(params), jnp.ones((BATCH, WIDTH))).ok


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_a_loop_over_whole_steps_keeps_its_state_split(level):
    tx = OPTIMIZERS["adamw"]
    params, state, *batch = arguments(tx)

    def steps(params, state, *batches):
        def turn(carry, batch):
            params, state, value = step_of(tx)(*carry, *batch)
            return (params, state), value

        (params, state), values = jax.lax.scan(turn, (params, state), batches)
        return params, state, values

    split = parallel(steps, level, "semi_auto_parallel", dataset_strategy=((1, 8, 1), (1, 8, 1)))
    batches = [jnp.stack([one] * 3) for one in batch]
    counts = Counter((row.kind, row.repeats) for row in split.plan(params, state, *batches).collectives if row.payload_bytes > 8)
    assert counts == {("reduce_scatter", 3): 3, ("all_gather", 3): 3}
    assert split.audit(params, state, *batches).ok
    assert split.verify(params, state, *batches).ok


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("shards", [True, False])
def test_accumulators_are_split_where_asked(mode, shards):
    tx = OPTIMIZERS["adamw"]
    own = {"gradients_mean": True} if mode == "data_parallel" else {}
    config = {"gradient_accumulation_shard": shards}
    step = parallel(step_of(tx, spmdctx.value_and_grad), mode=mode, grad_accumulation_step=2, config=config, **own)
    scattered = [row.repeats for row in step.plan(*arguments(tx)).collectives if row.kind == "reduce_scatter"]
    assert scattered == ([2] * 3 if shards else [1] * 3 if mode == "data_parallel" else [])
    assert step.audit(*arguments(tx)).ok
    assert step.verify(*arguments(tx)).ok


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("shards", [True, False])
def test_a_tpu_scatters_sums_of_micro_batches_as_often_as_the_plan_says(mode, shards):
    tx = OPTIMIZERS["adamw"]
    params, state, x, y = jax.eval_shape(lambda: arguments(tx))
    step = parallel(
        step_of(tx, spmdctx.value_and_grad),
        mode=mode,
        grad_accumulation_step=4,
        config={"gradient_accumulation_shard": shards, "parallel_optimizer_threshold": 64},
        devices=need_tpu(),
        topology="tpu-v5e",
    )
    report = step.audit(params, state, x, y)
    assert report.ok, str(report)
    scattered = [row.repeats for row in step.plan(params, state, x, y).collectives if row.kind == "reduce_scatter"]
    assert scattered == [4 if shards else 1] * 2


def test_a_loss_of_very_many_parameters_is_priced():
    tx = optax.sgd(1e-2)
    params = [jnp.ones((64, 4))] * 200

    def step(params, x):
        gradients = spmdctx.grad(lambda params: jnp.mean(x) * sum((index + 1) * jnp.sum(one) for index, one in enumerate(params)))(params)
        return optax.apply_updates(params, tx.update(gradients, tx.init(params))[0])

    plan = parallel(step, "level2", device_num=64, config={"parallel_optimizer_threshold": 0}).plan(params, jnp.ones((64, 4)))
    assert Counter(row.kind for row in plan.collectives) == {"reduce_scatter": 200, "all_gather": 200}
    assert 0 < plan.cost.compute_s < 1


# What a device holds


def share_of_theory(level, scan_layers, **options):
    """Compiled arguments per device over parameters and state as the level divides them."""
    sizes = {"num_layers": 2 if scan_layers else 1, "num_heads": 4, "num_kv_heads": 4, "hidden": 512, "max_seq": 32}
    config = DecoderConfig(vocab_size=512, width=256, remat=True, scan_layers=scan_layers, **sizes)
    step, args = abstract_program(config, 8)
    split = parallel(step, level, config={"parallel_optimizer_threshold": 64}, donate_argnums=(0, 1), **options)
    plan = split.plan(*args)
    held = Counter()
    for leaf in plan.inputs:
        held[leaf.role] += math.prod(leaf.shape) * 4
    state, weights = held[Role.OPTIMIZER] / 8, held[Role.PARAMETER] / (8 if level == "level3" else 1)
    compiled = split.lower(*args).compile().memory_analysis().argument_size_in_bytes
    return compiled / (weights + state + held[Role.BATCH] / 8)


@pytest.mark.parametrize(("level", "scan_layers"), [("level2", True), ("level3", True), ("level3", False)])
def test_a_device_of_a_llama_step_holds_what_theory_says(level, scan_layers):
    assert share_of_theory(level, scan_layers) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_a_tpu_of_a_llama_step_holds_what_theory_says(level):
    assert share_of_theory(level, False, devices=need_tpu(), topology="tpu-v5e") == pytest.approx(1, abs=0.05)

"""The decorated step: the same results as on one device, planned once, placed as planned, with every kind of state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.compute_on import compute_on2
from jax.experimental.shard_alike import shard_alike
from jax.sharding import PartitionSpec

import spmdctx
from spmdctx.errors import ContextError, ContextWarning, PlanError, StrategyError

SGD = optax.sgd(0.1, momentum=0.9)


def batch_of(size=16):
    x = np.random.default_rng(0).normal(size=(2, size, 8)).astype(np.float32)
    return {"x": x[0], "y": x[1]}


def params_of():
    w = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    return {"v": jnp.array(w[0]), "w": jnp.array(w[1])}


def mean_error(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def pytree_step(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(mean_error)(params, batch)
    updates, opt_state = SGD.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def linen_step(state, batch):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2))(state.params)
    return state.apply_gradients(grads=gradients), loss


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def nnx_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def make_linen():
    model = nn.Dense(8)
    return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), np.ones((1, 8))), tx=SGD)


def numbers(tree):
    leaves = [jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(leaf) for leaf in leaves]


def assert_same(tree, expected):
    for ours, theirs in zip(numbers(tree), numbers(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def parallel(fn, **options):
    return spmdctx.parallel(fn, **{"parallel_mode": "data_parallel", **options})


def test_a_pytree_step_trains_as_on_one_device():
    step, params, batch = parallel(pytree_step), params_of(), batch_of()
    ours = theirs = (params, SGD.init(params))
    for _ in range(3):
        *ours, loss = step(*ours, batch)
        *theirs, expected = pytree_step(*theirs, batch)
    assert_same((ours, loss), (theirs, expected))
    assert len(loss.sharding.device_set) == 8


def test_a_train_state_comes_back_as_one():
    step, state, batch = parallel(linen_step), make_linen(), batch_of()
    expected = linen_step(*linen_step(state, batch)[:1], batch)
    result = step(*step(state, batch)[:1], batch)
    assert isinstance(result[0], TrainState)
    assert_same(result, expected)


@pytest.mark.parametrize("wrap", [lambda fn: fn, nnx.jit], ids=["function", "nnx.jit"])
def test_nnx_objects_are_mutated_in_place_as_nnx_jit_does(wrap):
    step, batch = parallel(wrap(nnx_step)), batch_of()
    (model, optimizer), (other, other_optimizer) = make_nnx(), make_nnx()
    kernel, reference = model.first.kernel, nnx.jit(nnx_step)
    for _ in range(2):
        loss, expected = step(model, optimizer, batch), reference(other, other_optimizer, batch)
    assert model.first.kernel is kernel
    assert_same((loss, nnx.state((model, optimizer))), (expected, nnx.state((other, other_optimizer))))


def test_a_step_may_return_new_and_old_nnx_objects():
    def grow(model, x):
        model.extra = nnx.Param(x.mean(0))
        return model, nnx.Linear(8, 4, rngs=nnx.Rngs(0)), model.first(x).sum()

    model, batch = Net(nnx.Rngs(0)), batch_of()
    expected = Net(nnx.Rngs(0)).first(batch["x"]).sum()
    same, new, total = parallel(grow)(model, batch["x"])
    assert same is model
    assert new.kernel.shape == (8, 4)
    assert_same((model.extra[...], total), (batch["x"].mean(0), expected))


def test_an_array_that_is_no_variable_is_updated():
    class Counter(nnx.Module):
        def __init__(self):
            self.total = nnx.data(jnp.zeros(()))

    counter = Counter()

    def count(counter, x):
        counter.total = counter.total + x.sum()

    step = parallel(count)
    step(counter, np.ones((8, 2), np.float32))
    step(counter, np.ones((8, 2), np.float32))
    assert float(counter.total) == 32


def test_a_functional_nnx_state_is_not_mutated():
    graphdef, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graphdef, state)
        return model(x).sum(), nnx.state(model)

    before = numbers(state)
    _, after = parallel(step)(state, batch_of()["x"])
    assert_same(before, numbers(state))
    assert not np.array_equal(numbers(before)[0], numbers(after)[0])


def test_one_plan_serves_all_calls_of_one_shape():
    traces = []

    def step(params, batch):
        traces.append(1)
        return mean_error(params, batch)

    parallel_step, params = parallel(step), params_of()
    for size in (16, 16, 32, 16, 32):
        parallel_step(params, batch_of(size))
    assert len(traces) == 2


@pytest.mark.parametrize("leaf", ["adam", b"adam", object(), np.str_("adam"), np.array(["adam"])], ids=lambda leaf: type(leaf).__name__)
def test_a_later_call_with_what_is_no_array_is_refused_by_its_path(leaf):
    step = parallel(lambda state, x: {**state, "w": state["w"] + jnp.sum(x)}, batch_argnums=1)
    state, x = {"w": np.ones(8, np.float32), "name": np.float32(1)}, np.ones((8, 2), np.float32)
    step(state, x)
    with pytest.raises(TypeError, match="Argument 'state/name' is no array"):
        step.plan({**state, "name": leaf}, x)
    with pytest.raises(TypeError, match="name"):
        step({**state, "name": leaf}, x)


def test_weak_types_and_x64_are_traced_apart():
    step = parallel(lambda x, scale: x * scale, batch_argnums=0)
    x = np.ones((8, 2), np.float32)
    assert step(x, 2).dtype == jnp.float32
    assert step(x, np.float32(2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert step(x, np.float64(2)).dtype == jnp.float64
    assert step(x, 2).dtype == jnp.float32


def test_the_context_is_read_at_each_call():
    step, params, batch = spmdctx.parallel(mean_error), params_of(), batch_of()
    used = []
    for mode in ("stand_alone", "data_parallel", "stand_alone"):
        with spmdctx.auto_parallel_context(parallel_mode=mode):
            used.append(len(step(params, batch).sharding.device_set))
    assert used == [1, 8, 1]


def test_options_of_the_step_override_the_context():
    with spmdctx.auto_parallel_context(parallel_mode="stand_alone", device_num=4):
        loss = parallel(mean_error, device_num=2)(params_of(), batch_of())
    assert len(loss.sharding.device_set) == 2


def test_a_decorator_takes_options_and_keeps_the_name():
    @spmdctx.parallel(parallel_mode="data_parallel", device_num=4)
    def evaluate(params, batch):
        """Mean error."""
        return mean_error(params, batch)

    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Mean error.")
    assert evaluate.plan(params_of(), batch_of()).mesh == {"data": 4}


def test_a_step_sees_the_context_decorators_beneath_it():
    @spmdctx.parallel
    @spmdctx.auto_parallel_context(parallel_mode="data_parallel", device_num=2)
    @spmdctx.auto_parallel_context(device_num=4)
    def evaluate(params, batch):
        return mean_error(params, batch)

    plan = evaluate.plan(params_of(), batch_of())
    assert (plan.mode, plan.mesh) == ("data_parallel", {"data": 4})
    assert evaluate.with_options(device_num=8).plan(params_of(), batch_of()).mesh == {"data": 8}


def test_a_wrapper_between_a_step_and_a_context_decorator_still_runs():
    @spmdctx.auto_parallel_context(device_num=4)
    def evaluate(params, batch):
        return mean_error(params, batch)

    @functools.wraps(evaluate)
    def doubled(params, batch):
        return 2 * evaluate(params, batch)

    assert_same(parallel(doubled)(params_of(), batch_of()), 2 * mean_error(params_of(), batch_of()))


def test_a_method_plans_for_each_object():
    class Trainer:
        def __init__(self, scale):
            self.scale = scale

        @spmdctx.parallel(parallel_mode="data_parallel")
        def evaluate(self, params, batch):
            return self.scale * mean_error(params, batch)

    once, twice, params, batch = Trainer(1), Trainer(2), params_of(), batch_of()
    np.testing.assert_allclose(2 * once.evaluate(params, batch), twice.evaluate(params, batch), rtol=1e-6)
    assert once.evaluate is once.evaluate


def test_static_arguments_choose_the_program():
    step = parallel(lambda x, power: x**power, static_argnames="power")
    x = np.full((8, 2), 3, np.float32)
    assert [float(step(x, power)[0, 0]) for power in (2, 3, 2)] == [9, 27, 9]
    assert float(step(x, power=2)[0, 0]) == 9


def test_donated_arguments_are_given_up():
    step, params, batch = parallel(pytree_step, donate_argnums=(0, 1)), params_of(), batch_of()
    state = step(params, SGD.init(params), batch)[:2]
    step(*state, batch)
    assert state[0]["w"].is_deleted()


def test_nothing_is_donated_by_default():
    step, params, batch = parallel(pytree_step), params_of(), batch_of()
    state = step(params, SGD.init(params), batch)[:2]
    step(*state, batch)
    assert not state[0]["w"].is_deleted()


def test_more_devices_than_there_are_can_be_planned_but_not_run():
    step, arguments = parallel(mean_error, device_num=16), (params_of(), batch_of(32))
    assert step.plan(*arguments).mesh == {"data": 16}
    with pytest.raises(ContextError, match="device_num is 16, but there are 8 devices"):
        step(*arguments)


def test_a_plan_needs_shapes_only():
    abstract = jax.eval_shape(lambda: (params_of(), SGD.init(params_of()), batch_of()))
    concrete = (params_of(), SGD.init(params_of()), batch_of())
    assert parallel(pytree_step).plan(*abstract) == parallel(pytree_step).plan(*concrete)
    assert spmdctx.plan(pytree_step, *abstract, parallel_mode="data_parallel") == parallel(pytree_step).plan(*abstract)


def test_a_batch_that_does_not_divide_is_refused_in_data_parallel():
    with pytest.raises(StrategyError, match="batch/x"):
        parallel(mean_error).plan(params_of(), batch_of(12))


def test_an_option_without_effect_is_warned_of():
    with pytest.warns(ContextWarning, match="mem_coeff") as caught:
        parallel(mean_error, mem_coeff=0.5).plan(params_of(), batch_of())
    assert caught[0].filename == __file__


def test_lowered_and_compiled_are_those_of_jax():
    lowered = parallel(mean_error).lower(params_of(), batch_of())
    assert isinstance(lowered, jax.stages.Lowered)
    assert "all-reduce" in lowered.compile().as_text()


def test_shardings_have_the_shape_of_arguments_and_results():
    step, arguments = parallel(pytree_step), (params_of(), SGD.init(params_of()), batch_of())
    shardings = step.in_shardings(*arguments)
    assert jax.tree.structure(shardings) == jax.tree.structure(arguments)
    assert shardings[2]["x"].spec == PartitionSpec("data")
    assert jax.tree.structure(step.out_shardings(*arguments)) == jax.tree.structure((*arguments[:2], 0.0))
    placed = jax.device_put(arguments, shardings)
    step(*placed)
    assert step.notes == ()


def test_shardings_of_nnx_objects_are_states():
    model, optimizer = make_nnx()
    shardings = parallel(nnx_step).in_shardings(model, optimizer, batch_of())
    nnx.update(model, jax.device_put(nnx.state(model), shardings[0]))
    assert len(model.first.kernel[...].sharding.device_set) == 8


@pytest.mark.parametrize("as_given", [jnp.asarray, np.asarray])
def test_a_state_that_is_not_placed_yet_does_not_compile_twice(as_given, caplog):
    step, params, batch = parallel(pytree_step), jax.tree.map(as_given, params_of()), batch_of()
    opt_state = SGD.init(params)
    with jax.log_compiles(True):
        for _ in range(3):
            params, opt_state, _ = step(params, opt_state, batch)
    assert sum("Finished XLA compilation of jit(pytree_step)" in record.message for record in caplog.records) == 1
    assert step.notes == ()


@pytest.mark.parametrize("as_given", [jnp.asarray, np.asarray])
def test_audit_verify_lower_and_calls_share_one_compiled_program(as_given, caplog):
    step, params, batch = parallel(pytree_step), jax.tree.map(as_given, params_of()), batch_of()
    args = params, SGD.init(params), batch
    with jax.log_compiles(True):
        step.audit(*args)
        step.lower(*args).compile()
        step.verify(*args)
        for _ in range(3):
            step(*args)
        step.audit(*args)
    assert sum("Finished XLA compilation of jit(pytree_step)" in record.message for record in caplog.records) == 1


def test_audit_and_calls_of_an_nnx_step_share_one_compiled_program(caplog):
    model, optimizer = make_nnx()
    step = parallel(nnx_step)
    with jax.log_compiles(True):
        step.audit(model, optimizer, batch_of())
        for _ in range(3):
            step(model, optimizer, batch_of())
        step.lower(model, optimizer, batch_of()).compile()
    assert sum("Finished XLA compilation of jit(nnx_step)" in record.message for record in caplog.records) == 1


def test_a_step_runs_without_jit():
    params, batch = params_of(), batch_of()
    with jax.disable_jit():
        assert_same(parallel(mean_error)(params, batch), mean_error(params, batch))


def test_what_is_placed_otherwise_is_moved_and_noted():
    step, batch = parallel(mean_error), batch_of()
    params = jax.device_put(params_of(), jax.devices()[3])
    for _ in range(2):
        loss = step(params, batch)
    assert_same(loss, mean_error(params_of(), batch))
    assert [note.split(" ")[0] for note in step.notes] == ["params/v", "params/w"]


def test_a_sharding_that_changes_between_calls_is_moved():
    step, params, batch = parallel(mean_error), params_of(), batch_of()
    expected = mean_error(params, batch)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec("data")))
    for arguments in ((params, batch), (split, batch), (params, batch), (split, batch)):
        assert_same(step(*arguments), expected)


def test_shapes_may_alternate_for_long():
    step, params = parallel(mean_error), params_of()
    for size in (16, 32) * 60:
        loss = step(params, batch_of(size))
    assert_same(loss, mean_error(params, batch_of(32)))


def test_nnx_variables_stay_where_they_were_moved():
    step, model, batch = parallel(lambda model, x: model.first(x).sum()), Net(nnx.Rngs(0)), batch_of()
    step(model, batch["x"])
    assert len(model.first.kernel[...].sharding.device_set) == 8


def test_a_step_runs_inside_jit_grad_and_vmap():
    step, params, batch = parallel(mean_error), params_of(), batch_of()
    expected, gradients = jax.value_and_grad(mean_error)(params, batch)
    assert_same(jax.jit(lambda params, batch: 2 * step(params, batch))(params, batch), 2 * expected)
    assert_same(jax.grad(step)(params, batch), gradients)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    assert_same(jax.vmap(step, in_axes=(0, None))(many, batch), jnp.stack([expected, expected]))
    assert_same(step(params, batch), expected)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_that_is_set_does_not_disturb_the_step(kind):
    step, params, batch = parallel(mean_error), params_of(), batch_of()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    placed = jax.device_put((params, batch), (jax.NamedSharding(mesh, PartitionSpec()), jax.NamedSharding(mesh, PartitionSpec("data"))))
    expected = mean_error(params, batch)
    for _ in range(2):
        with jax.set_mesh(mesh):
            results = [step(params, batch), step(*placed)]
            assert step.audit(*placed).ok
            assert step.verify(*placed).ok
            assert step.init(params_of, batch=batch)["w"].shape == (8, 8)
        for loss in (*results, step(*placed), step(params, batch)):
            assert_same(loss, expected)


@pytest.mark.parametrize("first", [True, False], ids=["after arrays of one device", "at first"])
def test_arrays_over_explicit_axes_that_do_not_fit_together_are_moved_in_every_call(first):
    step, params, batch = parallel(mean_error), params_of(), batch_of()
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    placed = jax.device_put((params, batch), jax.NamedSharding(mesh, PartitionSpec("b")))
    placed[1]["x"] = jax.device_put(batch["x"], jax.NamedSharding(mesh, PartitionSpec("b", "a")))
    expected = mean_error(params, batch)
    for arguments in ([(params, batch)] if first else []) + [placed, (params, batch), placed]:
        assert_same(step(*arguments), expected)


@pytest.mark.parametrize("make", [lambda key: (params_of(), SGD.init(params_of())), lambda key: [params_of()]], ids=["tuple", "one"])
def test_a_state_is_made_where_the_step_takes_it(make):
    one = parallel(lambda state, batch: (state, mean_error(state[0], batch)))
    step = parallel(pytree_step) if isinstance(make(None), tuple) else one
    state = step.init(make, jax.random.key(0), batch=jax.eval_shape(batch_of))
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state))
    assert_same(state, make(None))


def test_a_split_parameter_is_made_split():
    model = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    options = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "mesh": {"data": 4, "model": 2}}
    step = spmdctx.parallel(lambda variables, x: model.apply(variables, x), **options)
    x = batch_of()["x"]
    variables = step.init(lambda key: model.init(key, x), jax.random.key(0), batch=x)
    kernel = variables["params"]["kernel"].value
    assert kernel.sharding.spec == PartitionSpec(None, "model")
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 4)}
    assert_same(step(variables, x), model.apply(model.init(jax.random.key(0), x), x))


def test_nnx_objects_with_metadata_are_made_split():
    def make():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "model")})
        return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)

    options = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "mesh": {"data": 4, "model": 2}}
    step = spmdctx.parallel(nnx_step, **options)
    model, optimizer = step.init(make, batch=batch_of())
    assert model.kernel[...].sharding.spec == PartitionSpec(None, "model")
    before = model.kernel[...]
    assert np.isfinite(float(step(model, optimizer, batch_of())))
    assert not np.array_equal(before, model.kernel[...])


def test_init_needs_no_batch_after_a_plan():
    step, batch = parallel(pytree_step), batch_of()
    step.plan(params_of(), SGD.init(params_of()), batch)
    params, opt_state = step.init(lambda: (params_of(), SGD.init(params_of())))
    assert step(params, opt_state, batch)[2].shape == ()


def test_init_without_a_batch_or_a_plan_is_refused():
    with pytest.raises(PlanError, match="init needs a batch"):
        parallel(pytree_step).init(params_of)


def test_a_state_that_does_not_fit_the_step_is_refused():
    with pytest.raises(PlanError, match="do not make up the arguments of pytree_step"):
        parallel(pytree_step).init(params_of, batch=batch_of())


def test_a_batch_is_split_as_planned():
    step, batch = parallel(mean_error), batch_of()
    with pytest.raises(PlanError, match="nothing was planned yet"):
        step.shard_batch(batch)
    step.plan(params_of(), batch)
    placed = step.shard_batch(batch)
    assert {shard.data.shape for shard in placed["x"].addressable_shards} == {(2, 8)}
    assert_same(placed, batch)


def test_several_batch_arguments_are_placed_together():
    step, batch = parallel(lambda params, x, y: mean_error(params, {"x": x, "y": y})), batch_of()
    step.plan(params_of(), batch["x"], batch["y"])
    x, y = step.shard_batch((batch["x"], batch["y"]))
    assert (x.sharding, y.shape) == (y.sharding, (16, 8))


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (batch_of(12), StrategyError, "cannot be split"),
        ({**batch_of(), "y": np.float32(1.0)}, StrategyError, "leaf 'batch/y' cannot be split"),
        ([1.0], PlanError, "no batch of this"),
    ],
)
def test_a_batch_that_the_plan_does_not_know_is_refused(batch, error, words):
    step = parallel(mean_error)
    step.plan(params_of(), batch_of())
    with pytest.raises(error, match=words):
        step.shard_batch(batch)


def test_an_audit_holds_the_compiled_program_against_the_plan():
    report = parallel(pytree_step).audit(params_of(), SGD.init(params_of()), batch_of())
    assert report.ok
    assert report.planned_bytes > 0


def test_a_step_of_a_step_takes_the_new_options():
    step = parallel(mean_error, device_num=4)
    assert spmdctx.parallel(step, device_num=2).plan(params_of(), batch_of()).mesh == {"data": 2}


def test_a_computation_on_the_host_is_planned_like_any_other():
    @compute_on2(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    def hidden(w, x):
        return jnp.tanh(x @ w)

    def step(params, batch):
        return jax.value_and_grad(lambda params: (hidden(params["w"], batch["x"]) @ params["v"] - batch["y"]).sum())(params)

    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", strict=True, batch_argnums=1)
    plan = parallel.plan(params_of(), batch_of())
    assert "data" in next(op for op in plan.ops if op.primitive == "tanh").sharding
    assert parallel.audit(params_of(), batch_of()).ok
    assert parallel.verify(params_of(), batch_of()).ok


def test_values_that_are_to_be_split_alike_are():
    def step(params, batch):
        first, second = shard_alike(batch["x"] @ params["w"], batch["y"])
        return (first * second).sum()

    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", strict=True, batch_argnums=1)
    assert parallel.verify(params_of(), batch_of()).ok
    assert parallel.audit(params_of(), batch_of()).ok

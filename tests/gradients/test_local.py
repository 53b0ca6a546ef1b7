"""The local loss of data_parallel and hybrid_parallel: sums and means against shard_map written by hand, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.errors import ContextWarning, StrategyError, UnsupportedError

N = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype(np.float32)
Y = RNG.normal(size=(16, 4)).astype(np.float32)
W = RNG.normal(size=(3, 4)).astype(np.float32)
MODES = ("data_parallel", "hybrid_parallel")


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def by_argument(w, x, y):
    value, gradient = spmdctx.value_and_grad(loss)(w, x, y)
    return w - 0.1 * gradient, value


def by_closure(w, x, y):
    batch = {"x": x, "y": y}

    def inner(w):
        return loss(w, **batch)

    value, gradient = spmdctx.value_and_grad(lambda w: inner(w))(w)
    return w - 0.1 * gradient, value


def by_partial(w, x, y):
    value, gradient = spmdctx.value_and_grad(functools.partial(loss, y=y))(w, x)
    return w - 0.1 * gradient, value


def by_nested_jit(w, x, y):
    scaled = x * 1.0

    @jax.jit
    def inner(w):
        return loss(w, scaled, y)

    value, gradient = jax.jit(lambda w: spmdctx.value_and_grad(inner)(w))(w)
    return w - 0.1 * gradient, value


def by_hand(w, x, y, *, mean=False):
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))

    def replica(w, x, y):
        value, gradient = jax.value_and_grad(loss)(w, x, y)
        return jax.lax.pmean(value, "data"), (jax.lax.pmean if mean else jax.lax.psum)(gradient, "data")

    specs = (P(), P("data"), P("data"))
    value, gradient = jax.shard_map(replica, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)(w, x, y)
    return w - 0.1 * gradient, value


def run(step, *args, **options):
    return spmdctx.parallel(step, **{"parallel_mode": "data_parallel", "gradients_mean": False, **options})(*args)


def same(got, want):
    for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("step", [by_argument, by_closure, by_partial, by_nested_jit])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_the_shard_map_written_by_hand(mode, step, mean):
    want = jax.jit(functools.partial(by_hand, mean=mean))(W, X, Y)
    same(run(step, W, X, Y, parallel_mode=mode, gradients_mean=mean), want)


def test_sum_and_mean_differ_by_exactly_the_number_of_devices():
    def step(w, x, y):
        return spmdctx.grad(loss)(w, x, y)

    options = {"batch_argnums": (1, 2)}
    same(run(step, W, X, Y, **options), N * run(step, W, X, Y, gradients_mean=True, **options))


def test_the_plan_says_that_gradients_are_summed():
    def notes(**options):
        return "".join(spmdctx.plan(by_argument, W, X, Y, parallel_mode="data_parallel", **options).notes)

    assert "gradients are summed over the 8 devices" in notes()
    assert "summed" not in notes(gradients_mean=True)


def test_planned_collectives_are_those_of_the_compiled_program():
    step = spmdctx.parallel(by_argument, parallel_mode="data_parallel")
    assert [(row.kind, row.payload_bytes) for row in step.plan(W, X, Y).collectives] == [("all_reduce", 48), ("all_reduce", 4)]
    assert step.audit(W, X, Y).ok


def test_aux_comes_back_whole_or_as_a_mean():
    def with_aux(w, x, y):
        out = x @ w
        return loss(w, x, y), {"out": out, "mean": out.mean(), "norm": jnp.linalg.norm(w), "turned": out.T, "size": 3}

    def step(w, x, y):
        (value, aux), gradient = spmdctx.value_and_grad(with_aux, has_aux=True)(w, x, y)
        return w - gradient, value, aux

    aux = run(step, W, X, Y)[2]
    want = with_aux(W, X, Y)[1]
    assert aux["size"] == 3
    for name in ("out", "mean", "norm", "turned"):
        np.testing.assert_allclose(aux[name], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aux", [lambda x: jnp.sum(x > 0), lambda x: x.sum(0)], ids=["integer", "array"])
def test_other_results_that_differ_are_refused_by_name(aux):
    def step(w, x, y):
        (value, _), gradient = spmdctx.value_and_grad(lambda w: (loss(w, x, y), {"odd": aux(x)}), has_aux=True)(w)
        return w - gradient, value

    with pytest.raises(StrategyError, match="The loss gives 'aux/odd'"):
        run(step, W, X, Y)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(StrategyError, match="'x' over 8 devices, but its size 12 is not divisible by 8"):
        run(by_argument, W, X[:12], Y[:12])


def test_the_batch_must_reach_the_loss_where_it_can_be_followed():
    class Holder:
        pass

    def step(w, x, y):
        holder = Holder()
        holder.x = x
        gradient = spmdctx.grad(lambda w: loss(w, holder.x, jnp.zeros(4)))(w)
        return w - gradient, y.sum()

    with pytest.raises(StrategyError, match="by a way that cannot be followed"):
        run(step, W, X, Y)


def test_a_loss_of_one_example_under_vmap_is_refused():
    def step(w, x, y):
        gradients = jax.vmap(spmdctx.grad(loss), in_axes=(None, 0, 0))(w, x, y)
        return w - gradients.mean(0)

    with pytest.raises(UnsupportedError, match="inside a vmap over the batch"):
        run(step, W, X, Y)


def test_an_ensemble_under_vmap_reduces_each_gradient():
    def step(w, x, y):
        return w - 0.1 * jax.vmap(spmdctx.grad(loss), in_axes=(0, None, None))(w, x, y)

    def want(w, x, y):
        return w - 0.1 * jax.vmap(jax.grad(loss), in_axes=(0, None, None))(w, x, y)

    ensemble = np.stack([W, 2 * W])
    np.testing.assert_allclose(run(step, ensemble, X, Y, gradients_mean=True), want(ensemble, X, Y), rtol=1e-5)


def test_a_loss_without_batch_is_computed_alike_and_divided():
    def step(w, x):
        return spmdctx.grad(lambda w: (w**2).sum())(w), x

    options = {"batch_argnums": 1}
    same(run(step, W, X, **options)[0], 2 * W)
    same(run(step, W, X, gradients_mean=True, **options)[0], 2 * W)
    same(run(step, W, X, loss_repeated_mean=False, **options)[0], N * 2 * W)


def test_gradients_of_the_batch_stay_where_they_are():
    def step(w, x, y):
        return spmdctx.grad(loss, argnums=(1, 0))(w, x, y)

    of_x, of_w = run(step, W, X, Y, batch_argnums=(1, 2))
    want_x, want_w = jax.grad(loss, argnums=(1, 0))(W, X, Y)
    np.testing.assert_allclose(of_x, N * want_x, rtol=1e-5)
    np.testing.assert_allclose(of_w, N * want_w, rtol=1e-5)


def test_plain_gradients_mean_the_global_loss():
    def step(w, x, y):
        return w - jax.grad(loss)(w, x, y)

    with pytest.warns(ContextWarning, match="gradients_mean=True has no effect on gradients of jax.grad"):
        got = run(step, W, X, Y, gradients_mean=True)
    np.testing.assert_allclose(got, W - jax.grad(loss)(W, X, Y), rtol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def nnx_step(model, x, y):
    value, gradients = spmdctx.value_and_grad(nnx_loss)(model, x, y)
    return value, gradients


@nnx.jit
def gradients_of_one(model, x, y):
    return nnx.value_and_grad(nnx_loss)(model, x, y)


def replicas_by_loop(model, x, y):
    """The values, gradients and states of each replica's loss, one after the other."""
    values, gradients, states = [], [], []
    for place in range(N):
        own = nnx.clone(model)
        for _, node in nnx.iter_graph(own):
            if isinstance(node, nnx.RngKey):
                node.set_raw_value(jax.random.fold_in(node.get_raw_value(), place))
        rows = slice(2 * place, 2 * place + 2)
        value, gradient = gradients_of_one(own, x[rows], y[rows])
        values.append(value)
        gradients.append(nnx.to_pure_dict(gradient))
        states.append(nnx.to_pure_dict(nnx.state(own, nnx.BatchStat)))
    return values, gradients, states


def mean_of(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(0), *trees)


def close(got, want, rtol=2e-5):
    for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=rtol, atol=1e-5)


def test_modules_have_statistics_averaged_and_dropout_of_their_own():
    model = Net(nnx.Rngs(0))
    values, gradients, states = replicas_by_loop(model, X, Y)
    keys = jax.random.key_data(model.drop.rngs.key[...])
    value, gradient = run(nnx_step, model, X, Y, gradients_mean=True)
    close(value, mean_of(values))
    close(nnx.to_pure_dict(gradient), mean_of(gradients))
    close(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), mean_of(states))
    assert model.drop.rngs.count[...] == 1
    same(jax.random.key_data(model.drop.rngs.key[...]), keys)


def test_the_optimizer_of_nnx_takes_the_reduced_gradients():
    import optax

    def step(model, optimizer, x, y):
        value, gradients = spmdctx.value_and_grad(nnx_loss, argnums=nnx.DiffState(0, nnx.Param))(model, x, y)
        optimizer.update(model, gradients)
        return value

    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    reference = nnx.clone(model)
    optimizers = [nnx.Optimizer(one, optax.sgd(0.1), wrt=nnx.Param) for one in (model, reference)]
    run(step, model, optimizers[0], X, Y, gradients_mean=True)
    gradients = nnx.grad(nnx_loss)(reference, X, Y)
    optimizers[1].update(reference, gradients)
    close(nnx.state(model), nnx.state(reference))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dense(4)(linen.Dropout(0.5, deterministic=not train)(jax.nn.relu(x)))


class State(TrainState):
    batch_stats: dict


def linen_state():
    import optax

    model = LinenNet()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    return State.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1), batch_stats=variables["batch_stats"])


def linen_gradients(transform, state, batch, key):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": key})
        return jnp.mean((out - batch["y"]) ** 2), updates

    return transform(loss_of, has_aux=True)(state.params)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_train_states_close_over_the_batch(make_key):
    def step(state, batch, key):
        (value, updates), gradients = linen_gradients(spmdctx.value_and_grad, state, batch, jax.random.fold_in(key, state.step))
        return state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"]), value

    state, key = linen_state(), make_key(7)
    got, value = run(step, state, {"x": X, "y": Y}, key, gradients_mean=True)
    parts = []
    for place in range(N):
        rows = slice(2 * place, 2 * place + 2)
        own = jax.random.fold_in(jax.random.fold_in(key, 0), place)
        parts.append(linen_gradients(jax.value_and_grad, state, {"x": X[rows], "y": Y[rows]}, own))
    (want_value, updates), gradients = mean_of(parts)
    want = state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"])
    close(value, want_value)
    close((got.params, got.batch_stats), (want.params, want.batch_stats))

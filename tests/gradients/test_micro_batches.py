"""grad_accumulation_step: against the big batch, against loops over micro-batches, and what it makes of collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextWarning, StrategyError
from tests.gradients.test_local import N, Net, by_argument, by_closure, close, linen_gradients, linen_state, loss, nnx_loss, nnx_step, same

K = 4
RNG = np.random.default_rng(1)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = RNG.normal(size=(64, 4)).astype(np.float32)
W = RNG.normal(size=(3, 4)).astype(np.float32)
MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")


def run(step, *args, **options):
    return spmdctx.parallel(step, grad_accumulation_step=K, **{"parallel_mode": "semi_auto_parallel", **options})(*args)


def micro(array, number):
    return array[number::K]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [by_argument, by_closure])
def test_a_step_equals_that_of_the_big_batch(step, mode):
    mean = {"gradients_mean": True} if mode in ("data_parallel", "hybrid_parallel") else {}
    close(run(step, W, X, Y, parallel_mode=mode, **mean), jax.jit(by_argument)(W, X, Y), 1e-5)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_ten_steps_of_adam_end_where_those_of_the_big_batch_do(mode):
    adam = optax.adam(1e-2)

    def step(state, x, y):
        params, moments = state
        value, gradients = spmdctx.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2))(params)
        updates, moments = adam.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"up": rng.normal(size=(3, 8)), "down": rng.normal(size=(8, 4))}
        batches = [(rng.normal(size=(64, 3)), rng.normal(size=(64, 4))) for _ in range(10)]
        mean = {"gradients_mean": True} if mode == "data_parallel" else {}
        ends = []
        for options in ({"grad_accumulation_step": K, **mean}, mean):
            state = (params, adam.init(params))
            run_one = spmdctx.parallel(step, parallel_mode=mode, **options)
            for x, y in batches:
                state, _ = run_one(state, x, y)
            ends.append(state)
        for ours, reference in zip(*map(jax.tree.leaves, ends), strict=True):
            scale = max(float(np.max(np.abs(reference))), 1e-3)
            assert float(np.max(np.abs(np.asarray(ours) - np.asarray(reference)))) <= 1e-5 * scale


def test_gradients_are_reduced_once_after_all_micro_batches():
    def rows(count):
        step = spmdctx.parallel(by_argument, parallel_mode="data_parallel", grad_accumulation_step=count)
        assert step.audit(W, X, Y).ok
        return [(row.kind, row.payload_bytes, row.repeats) for row in step.plan(W, X, Y).collectives]

    assert rows(K) == rows(1) == [("all_reduce", 48, 1), ("all_reduce", 4, 1)]


def test_low_precision_gradients_are_accumulated_in_float32():
    def step(w, x):
        return w, spmdctx.grad(lambda w: jnp.mean(x @ w).astype(jnp.float32))(w)

    x = np.concatenate([np.full((1, 3), 256.0), np.ones((3, 3))]).astype(jnp.bfloat16)
    w = jnp.ones((3, 2), jnp.bfloat16)
    _, gradient = spmdctx.parallel(step, parallel_mode="stand_alone", grad_accumulation_step=4, batch_argnums=1)(w, x)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == float(jnp.bfloat16(259 / 8))


@nnx.jit
def loop_of_modules(model, x, y):
    """The values and gradients of micro-batches one after the other, on a model that changes on the way."""
    values, gradients = [], []
    for number in range(K):
        value, gradient = nnx.value_and_grad(nnx_loss)(model, micro(x, number), micro(y, number))
        values.append(value)
        gradients.append(nnx.to_pure_dict(gradient))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(0), *zip(values, gradients, strict=True))


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto_parallel", "auto_parallel"])
def test_modules_behave_as_in_a_loop(mode):
    model = Net(nnx.Rngs(0))
    reference = nnx.clone(model)
    want_value, want = loop_of_modules(reference, X, Y)
    value, gradient = run(nnx_step, model, X, Y, parallel_mode=mode)
    close(value, want_value)
    close(nnx.to_pure_dict(gradient), want)
    close(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), nnx.to_pure_dict(nnx.state(reference, nnx.BatchStat)))
    assert model.drop.rngs.count[...] == reference.drop.rngs.count[...] == K


def test_modules_on_replicas_behave_as_loops_side_by_side():
    model = Net(nnx.Rngs(0))
    values, gradients, states = [], [], []
    for place in range(N):
        own = nnx.clone(model)
        own.drop.rngs.key.set_raw_value(jax.random.fold_in(own.drop.rngs.key[...], place))
        rows = slice(8 * place, 8 * place + 8)
        value, gradient = loop_of_modules(own, X[rows], Y[rows])
        values.append(value)
        gradients.append(gradient)
        states.append(nnx.to_pure_dict(nnx.state(own, nnx.BatchStat)))
    value, gradient = run(nnx_step, model, X, Y, parallel_mode="data_parallel", gradients_mean=True)
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(0), *zip(values, gradients, states, strict=True))
    close((value, nnx.to_pure_dict(gradient), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))), want)


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto_parallel"])
def test_train_states_behave_as_in_a_loop_with_folded_keys(mode):
    def step(state, batch, key):
        (value, updates), gradients = linen_gradients(spmdctx.value_and_grad, state, batch, key)
        return state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"]), value

    state, key = linen_state(), jax.random.key(7)
    got, value = run(step, state, {"x": X, "y": Y}, key, parallel_mode=mode)
    own, values, gradients = state, [], []
    for number in range(K):
        batch = {"x": micro(X, number), "y": micro(Y, number)}
        (loss_of_one, updates), gradient = linen_gradients(jax.value_and_grad, own, batch, jax.random.fold_in(key, number))
        own = own.replace(batch_stats=updates["batch_stats"])
        values.append(loss_of_one)
        gradients.append(gradient)
    want = state.apply_gradients(grads=jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(0), *gradients), batch_stats=own.batch_stats)
    close(value, jnp.stack(values).mean())
    close((got.params, got.batch_stats), (want.params, want.batch_stats))


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel"])
def test_results_with_the_batch_come_back_in_its_order(mode):
    def with_aux(w, x, y):
        return loss(w, x, y), {"out": x @ w, "turned": (x @ w).T, "mean": (x @ w).mean()}

    def step(w, x, y):
        (_, aux), gradient = spmdctx.value_and_grad(with_aux, has_aux=True)(w, x, y)
        return w - gradient, aux

    close(run(step, W, X, Y, parallel_mode=mode, gradients_mean=False)[1], with_aux(W, X, Y)[1])


def test_gradients_of_the_batch_come_back_in_its_order():
    def step(w, x, y):
        return spmdctx.grad(loss, argnums=1)(w, x, y), w

    got, _ = run(step, W, X, Y, batch_argnums=(1, 2))
    close(got, K * jax.grad(loss, argnums=1)(W, X, Y))


def test_metrics_go_from_one_micro_batch_to_the_next():
    def with_metrics(model, metrics, x, y):
        value = nnx_loss(model, x, y)
        metrics.update(loss=value)
        return value

    def step(model, metrics, x, y):
        return spmdctx.value_and_grad(with_metrics)(model, metrics, x, y)[0]

    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    value = run(step, model, metrics, X, Y)
    assert int(metrics.loss.count[...]) == K
    close(metrics.compute()["loss"], value)


def test_the_batch_must_divide():
    with pytest.raises(StrategyError, match="over 8 devices and into 4 micro-batches, but its size 48 is not divisible by 32"):
        run(by_argument, W, X[:48], Y[:48], parallel_mode="data_parallel")
    with pytest.raises(StrategyError, match="into 4 micro-batches, but its size 6 is not divisible by 4"):
        run(by_argument, W, X[:6], Y[:6])


def test_plain_gradients_are_not_accumulated_and_a_warning_says_so():
    def step(w, x, y):
        return w - jax.grad(loss)(w, x, y)

    with pytest.warns(ContextWarning, match="grad_accumulation_step=4 has no effect on gradients of jax.grad"):
        got = run(step, W, X, Y)
    close(got, W - jax.grad(loss)(W, X, Y))


def test_a_step_without_gradients_says_nothing():
    same(run(lambda w, x: x @ w, W, X).shape, (64, 4))


class Calls(nnx.Variable):
    """A kind of the user's own."""


class Counted(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.linear, self.calls, self.still = nnx.Linear(16, 16, rngs=rngs), Calls(jnp.zeros((), jnp.int32)), Calls(jnp.ones(3))
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else lambda x: x

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        self.still[...] = self.still[...]
        return self.dropout(x + jnp.tanh(self.linear(x)))


def counted_step(counts, **options):
    layers = [Counted if count else (lambda rngs: nnx.Linear(16, 16, rngs=rngs)) for count in counts]
    model = nnx.Sequential(*(layer(nnx.Rngs(number)) for number, layer in enumerate(layers)))

    def step(model, x):
        loss, grads = spmdctx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        nnx.update(model, jax.tree.map(lambda weight, grad: weight - 0.1 * grad, nnx.state(model, nnx.Param), grads))
        return loss

    return spmdctx.parallel(step, **{"parallel_mode": "semi_auto_parallel", **options}), model


TURNS = "micro-batches gives the next value of "


@pytest.mark.parametrize("options", [{}, {"pipeline_stages": 2}])
def test_state_that_each_micro_batch_changes_is_said_and_explains_what_verify_finds(options):
    step, model = counted_step([True, True], grad_accumulation_step=4, **options)
    x = jnp.ones((32, 16))
    (note,) = [note for note in step.plan(model, x).notes if TURNS in note]
    assert "Each of the 4" in note
    assert "'model/layers/0/calls', 'model/layers/1/calls', one after" in note
    report = step.verify(model, x)
    assert not report.ok
    assert note in report.explanations
    step(model, x)
    assert model.layers[0].calls[...] == 4


@pytest.mark.parametrize(
    ("counts", "options"), [([True], {}), ([False], {"grad_accumulation_step": 4}), ([True], {"parallel_mode": "data_parallel"})]
)
def test_state_that_changes_once_a_step_is_not_said(counts, options):
    step, model = counted_step(counts, **options)
    assert not any(TURNS in note for note in step.plan(model, jnp.ones((32, 16))).notes)


def test_the_counts_of_random_keys_are_not_said():
    def step(layer, x):
        return spmdctx.value_and_grad(lambda layer, x: jnp.mean(layer(x) ** 2))(layer, x)

    parallel = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", grad_accumulation_step=2)
    (note,) = [note for note in parallel.plan(Counted(nnx.Rngs(0), 0.5), jnp.ones((32, 16))).notes if TURNS in note]
    assert "of 'layer/calls', one after" in note

"""Guesses about the batch where each device has a loss of its own: what is no batch stays whole, or is refused with its name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import spmdctx
from spmdctx.errors import StrategyError
from spmdctx.ir.graph import Role

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X, Y, W, OUT = normal(32, 16), normal(32, 16), normal(16, 16) / 4, normal(16, 5)
TOKENS, LABELS = RNG.integers(0, 64, (32, 8)), RNG.integers(0, 5, 32)


def parallel(step, **options):
    return spmdctx.parallel(step, **{"parallel_mode": "data_parallel", "gradients_mean": True, **options})


def steps_of(loss):
    """A step that differentiates by its first argument, for devices with losses of their own and for one device."""

    def local(w, *rest):
        value, gradient = spmdctx.value_and_grad(loss)(w, *rest)
        return jax.tree.map(jnp.subtract, w, gradient), value

    def plain(w, *rest):
        value, gradient = jax.value_and_grad(loss)(w, *rest)
        return jax.tree.map(jnp.subtract, w, gradient), value

    return local, plain


def batch_of(plan):
    return {tensor.path for tensor in plan.inputs if tensor.role is Role.BATCH}


def close(got, want):
    for ours, reference in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=2e-4, atol=2e-5)


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def attention(h, keys, values):
    return jax.nn.softmax(h @ jnp.swapaxes(keys, -1, -2)) @ values


def recurrent(w, x):
    def turn(carry, now):
        return jnp.tanh(now @ w + carry), None

    return jax.lax.scan(turn, jnp.zeros((x.shape[0], 16)), jnp.swapaxes(x.reshape(x.shape[0], 2, -1)[..., :16], 0, 1))[0]


FROZEN = {
    "class weights": (lambda w, c, x, y: jnp.mean(c[y] * jnp.sum((x @ w) ** 2, -1)), (normal(64), X, LABELS), {"x", "y"}),
    "one-hot prototypes": (lambda w, p, x, y: jnp.mean((x @ w - jax.nn.one_hot(y, 5) @ p) ** 2), (normal(5, 16), X, LABELS), {"x", "y"}),
    "a base that LoRA adapts": (lambda w, base, x, y: jnp.mean((jnp.tanh(x @ (base + w)) - y) ** 2), (W, X, Y), {"x", "y"}),
    "a teacher as large as the batch": (lambda w, t, x: jnp.mean((x @ w - jnp.tanh(x @ t)) ** 2), (W, X[:16]), {"x"}),
    "a table of positions": (lambda w, p, x: jnp.mean(jnp.tanh(x @ w + p) ** 2), (normal(8, 16), normal(32, 8, 16)), {"x"}),
    "a scale and a bias": (
        lambda w, f, x: jnp.mean(jnp.tanh((x * f["scale"]) @ w + f["bias"]) ** 2),
        ({"scale": normal(16), "bias": normal(16)}, X),
        {"x"},
    ),
    "memory that is attended to": (lambda w, m, x: jnp.mean(attention(x @ w, m, m) ** 2), (normal(32, 16), X), {"x"}),
    "the nearest code, as large as the batch": (
        lambda w, c, x: jnp.mean(jnp.sum((x @ w - c[jnp.argmin(jnp.sum(((x @ w)[:, None] - c) ** 2, -1), 1)]) ** 2, -1)),
        (normal(32, 16), X),
        {"x"},
    ),
    "kernels of a convolution": (
        lambda w, k, x: jnp.mean(jax.lax.conv(jnp.tanh(x * w.sum()), k, (1, 1), "SAME") ** 2),
        (normal(8, 8, 3, 3), normal(16, 8, 6, 6)),
        {"x"},
    ),
    "weights of layers in a scan": (
        lambda w, stack, x: jnp.mean(jax.lax.scan(lambda h, one: (jnp.tanh(h @ one @ w), None), x, stack)[0] ** 2),
        (normal(8, 16, 16) / 4, X),
        {"x"},
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_stays_whole(name):
    loss, rest, batch = FROZEN[name]
    names = ", ".join(loss.__code__.co_varnames[1 : loss.__code__.co_argcount])
    local, plain = (eval(f"lambda w, {names}: step(w, {names})", {"step": step}) for step in steps_of(loss))
    step = parallel(local)
    plan = step.plan(W, *rest)
    assert batch_of(plan) == batch
    assert all(any(f"'{tensor.path}'" in note for note in plan.notes) for tensor in plan.inputs[1:] if tensor.path not in batch)
    close(step(W, *rest), jax.jit(plain)(W, *rest))


RIGHT = {
    "labels by arange": (lambda w, x, y: -jnp.mean(jax.nn.log_softmax(x @ w @ OUT)[jnp.arange(x.shape[0]), y]), (X, LABELS)),
    "a mask": (lambda w, x, y, mask: jnp.mean(jnp.where(mask, jnp.sum((x @ w - y) ** 2, -1), 0)), (X, Y, LABELS > 2)),
    "a dict": (lambda w, batch: cross_entropy(batch["x"] @ w @ OUT, batch["y"]), ({"x": X, "y": LABELS},)),
    "a dict with more than is read": (lambda w, batch: jnp.mean(batch["x"] @ w), ({"x": X, "number": LABELS},)),
    "tokens": (lambda e, ids: cross_entropy(jnp.tanh(e[ids]) @ e.T, jnp.roll(ids, -1, 1)), (TOKENS,)),
    "attention": (lambda w, x: jnp.mean(attention(x @ w, x, x) ** 2), (normal(16, 4, 16),)),
    "a weighted sum of losses": (lambda w, x, y: jnp.mean((x @ w) ** 2) + 0.1 * jnp.mean(jnp.abs(x @ w - y)) + jnp.sum(w**2), (X, Y)),
    "a loop over time": (lambda w, x: jnp.mean(recurrent(w, x) ** 2), (normal(16, 32),)),
    "a loop over parts of the batch": (
        lambda w, x: jax.lax.scan(lambda sum, one: (sum + jnp.mean((one @ w) ** 2), None), 0.0, x.reshape(2, -1, 16))[0] / 2,
        (X,),
    ),
    "rows and columns in one dimension": (lambda w, x: jnp.mean((x.reshape(-1, 16) @ w) ** 2), (normal(16, 4, 16),)),
    "remat and vmap": (lambda w, x, y: jnp.mean(jax.vmap(jax.checkpoint(lambda x, y: jnp.tanh(x @ w) @ y))(x, y)), (X, Y)),
    "two batches": (lambda w, x, z: jnp.mean((x @ w) ** 2) + jnp.mean(jnp.abs(z @ w)), (X, normal(64, 16))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_usual_batch_is_found_and_split(name):
    loss, rest = RIGHT[name]
    local, plain = steps_of(loss)
    w = normal(64, 16) if name == "tokens" else W
    step = parallel(local)
    plan = step.plan(w, *rest)
    assert all(tensor.role is Role.BATCH and tensor.sharding[0] for tensor in plan.inputs[1:])
    assert not any("taken as the batch" in note or "rows" in note for note in plan.notes)
    close(step(w, *rest), jax.jit(plain)(w, *rest))


STATISTICS = {
    "experts in balance": (
        lambda w, x: jnp.mean((x @ w) ** 2) + jnp.sum(jnp.mean(jax.nn.softmax(x @ w), 0) * jnp.mean(x @ w > 0, 0)),
        (X,),
    ),
    "the mean over a mask": (lambda w, x, mask: jnp.sum(mask * jnp.sum(x @ w, -1)) / jnp.sum(mask), (X, (LABELS > 2).astype(np.float32))),
    "normalized over the batch": (
        lambda w, x, a: jnp.mean((a - a.mean()) / (a.std() + 1e-3) * jnp.sum(x @ w, -1)),
        (X, normal(32)),
    ),
    "batch normalization": (lambda w, x: jnp.mean(jnp.abs((x @ w - jnp.mean(x @ w, 0)) * jax.lax.rsqrt(jnp.var(x @ w, 0)))), (X,)),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_over_the_batch_are_those_of_each_device_and_noted(name):
    loss, rest = STATISTICS[name]
    plan = parallel(steps_of(loss)[0]).plan(W, *rest)
    assert all(tensor.role is Role.BATCH for tensor in plan.inputs[1:])
    assert sum("is no plain sum over the rows of" in note for note in plan.notes) == 1


KEY = jax.random.key(0)


def dropout(w, x):
    return jnp.mean((x @ w) * jax.random.bernoulli(KEY, 0.5, x.shape))


def keys_of_rows(w, x):
    noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(jax.random.split(jax.random.key(1), x.shape[0]))
    return jnp.mean((x + noise) @ w)


def projected(w, x):
    return jnp.mean((x @ w) @ jax.random.normal(KEY, (16, 4)))


@pytest.mark.parametrize(("loss", "is_noted"), [(dropout, True), (keys_of_rows, True), (projected, False)])
@pytest.mark.parametrize("options", [{}, {"batch_argnums": 1}, {"grad_accumulation_step": 4}])
def test_random_numbers_that_all_devices_draw_alike_for_their_rows_are_noted(loss, is_noted, options):
    step = parallel(steps_of(loss)[0], **options)
    assert any("draws the same ones for its own rows" in note for note in step.plan(W, X).notes) == is_noted


REFUSED = {
    "a graph of nodes and edges": (
        lambda w, x, y, edges: cross_entropy((x + jax.ops.segment_sum(x[edges[:, 0]], edges[:, 1], x.shape[0])) @ w @ OUT, y),
        (X, LABELS, RNG.integers(0, 32, (64, 2))),
    ),
    "a root of the mean": (lambda w, x, y: jnp.sqrt(jnp.mean((x @ w - y) ** 2)), (X, Y)),
    "negatives of the own batch": (lambda w, x: jnp.mean(jax.nn.logsumexp((x @ w) @ (x @ w).T, -1)), (X,)),
    "pairs of two batches": (lambda w, x, y: cross_entropy((x @ w) @ y.T, jnp.arange(x.shape[0])), (X, Y)),
    "a table alone": (lambda w, table: jnp.mean((table[jnp.array([3, 1])] @ w) ** 2), (X,)),
    "time before the batch": (
        lambda w, x, y: cross_entropy(jax.lax.scan(lambda h, now: (jnp.tanh(h + now @ w), None), jnp.zeros((8, 16)), x)[0] @ OUT, y),
        (normal(16, 8, 16), LABELS[:8]),
    ),
    "rows in order": (lambda w, x, y: jnp.mean((jnp.cumsum(x @ w, 0) - y) ** 2), (X, Y)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_guess_that_is_not_shown_is_refused_with_its_name(name):
    loss, rest = REFUSED[name]
    step = steps_of(loss)[0]
    with pytest.raises(StrategyError, match=r"was guessed to be part of the batch.*[\s\S]*batch_argnames=") as caught:
        parallel(step).plan(W, *rest)
    assert "'rest/" in str(caught.value)


def test_what_the_user_names_is_not_judged():
    loss, rest = REFUSED["negatives of the own batch"]
    plan = parallel(steps_of(loss)[0], batch_argnums=1).plan(W, *rest)
    assert batch_of(plan) == {"rest/0"}


def test_labels_that_only_metrics_read_are_split_with_the_batch():
    def step(w, x, y):
        def loss(w):
            return jnp.mean((x @ w) ** 2), jnp.mean(jnp.argmax(x @ w, -1) == y)

        (value, accuracy), gradient = spmdctx.value_and_grad(loss, has_aux=True)(w)
        return w - gradient, value, accuracy

    plan = parallel(step).plan(W, X, LABELS)
    assert batch_of(plan) == {"x", "y"}


def test_gradients_alone_are_judged_by_their_loss():
    def step(w, table, x):
        return w - spmdctx.grad(lambda w: jnp.mean(jax.nn.logsumexp(x @ w @ table.T, -1)))(w)

    assert batch_of(parallel(step).plan(W, Y, X)) == {"x"}


def test_an_nnx_model_with_a_frozen_table_beside_it():
    def step(model, table, batch):
        def loss(model):
            return jnp.mean((model(table[batch["ids"]]) - batch["y"]) ** 2)

        value, gradients = spmdctx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), gradients))
        return value

    batch = {"ids": TOKENS[:, 0], "y": Y}
    plan = parallel(step).plan(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), normal(64, 16), batch)
    assert batch_of(plan) == {"batch/ids", "batch/y"}


def test_a_linen_model_with_dropout_and_a_frozen_teacher():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dropout(0.5, deterministic=False)(linen.Dense(16)(x))

    net = Net()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def step(params, teacher, x, key):
        def loss(params):
            return jnp.mean((net.apply(params, x, rngs={"dropout": key}) - jnp.tanh(x @ teacher)) ** 2)

        value, gradients = spmdctx.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, gradients), value

    assert batch_of(parallel(step).plan(variables, W, X, jax.random.key(2))) == {"x"}


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel", "data_parallel"])
def test_a_table_is_no_batch_of_a_global_loss_either(mode):
    def step(w, table, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jax.nn.logsumexp(x @ w @ table.T, -1)))(w)
        return w - gradient, value

    plan = spmdctx.parallel(step, parallel_mode=mode).plan(W, normal(30, 16), X)
    assert batch_of(plan) == {"x"}
    assert any("'table' is not taken as the batch" in note for note in plan.notes)


def test_a_forward_step_with_a_table():
    plan = spmdctx.plan(lambda w, table, ids: jnp.tanh(table[ids] @ w), W, normal(64, 16), TOKENS, parallel_mode="semi_auto_parallel")
    assert batch_of(plan) == {"ids"}


@pytest.mark.parametrize(
    "options", [{}, {"grad_accumulation_step": 4}, {"parallel_mode": "stand_alone", "gradients_mean": False, "grad_accumulation_step": 4}]
)
def test_a_named_batch_is_cut_and_a_loss_that_is_no_sum_over_it_is_said(options):
    local, _ = steps_of(lambda w, x: jnp.sqrt(jnp.mean((x @ w) ** 2)))
    step = parallel(local, batch_argnums=(1,), **options)
    said = [note for note in step.plan(W, X).notes if "not shown to be a sum over the rows of 'rest/0'" in note]
    assert len(said) == 1
    report = step.verify(W, X)
    assert not report.ok
    assert said[0] in report.explanations


def test_a_batch_that_the_user_names_and_the_loss_adds_up_needs_no_word():
    local, plain = steps_of(lambda w, x: jnp.mean((x @ w) ** 2))
    step = parallel(local, batch_argnums=(1,))
    assert not [note for note in step.plan(W, X).notes if "sum over the rows" in note]
    np.testing.assert_allclose(step(W, X)[1], plain(W, X)[1], rtol=1e-5)


def with_statistics(params, state, x):
    """A loss that takes and gives a moving mean, at a place that no name marks."""
    mean = 0.5 * state["norm/~/mean"]["average"] + 0.5 * x.mean(0, keepdims=True)
    return jnp.mean((x @ params) ** 2), {"norm/~/mean": {"average": mean}}


MOVING = {"norm/~/mean": {"average": jnp.ones((1, 4))}}
ROWS = jnp.arange(64.0).reshape(16, 4) / 64


@pytest.mark.parametrize(("mode", "steps"), [("data_parallel", 1), ("semi_auto_parallel", 2)])
def test_state_that_a_loss_takes_and_gives_is_averaged_as_statistics_are(mode, steps):
    def step(params, state, x):
        (value, state), gradient = spmdctx.value_and_grad(with_statistics, has_aux=True)(params, state, x)
        return params - 0.1 * gradient, state, value

    split = spmdctx.parallel(step, parallel_mode=mode, grad_accumulation_step=steps, gradients_mean=mode == "data_parallel")
    state = split(jnp.eye(4), MOVING, ROWS)[1]["norm/~/mean"]["average"]
    wanted = MOVING["norm/~/mean"]["average"]
    for part in [ROWS] if steps == 1 else [ROWS[0::2], ROWS[1::2]]:  # micro-batches come one after the other
        wanted = 0.5 * wanted + 0.5 * part.mean(0, keepdims=True)
    np.testing.assert_allclose(state, wanted, rtol=1e-6)
    plan = split.plan(jnp.eye(4), MOVING, ROWS)
    assert sum("next value of 'state/norm/~/mean/average'" in note for note in plan.notes) == 1


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_leaves_of_one_row_are_no_batch_beside_more(mode):
    def evaluate(params, state, x):
        return jnp.sum((x - state["norm/~/mean"]["average"]) @ params, axis=1)

    unread = {**MOVING, "other": {"hidden": jnp.ones((1, 4))}}
    plan = spmdctx.plan(evaluate, jnp.eye(4), unread, ROWS, parallel_mode=mode)
    assert [leaf.path for leaf in plan.inputs if leaf.role is Role.BATCH] == ["x"]
    assert sum("leaves of one row" in note for note in plan.notes) == 1


SUMS = {
    "squares": lambda w, x, y: jnp.sum((x @ w - y) ** 2),
    "in a loop": lambda w, x, y: jax.lax.fori_loop(0, 2, lambda _, total: total + jnp.sum((x @ w - y) ** 2), 0.0),
    "beside a mean": lambda w, x, y: jnp.mean((x @ w) ** 2) + jnp.sum((x @ w - y) ** 2),
    "halved": lambda w, x, y: 0.5 * jnp.sum((x @ w - y) ** 2),
    "halves of rows": lambda w, x, y: jnp.sum((x @ w - y) ** 2 / 2),
    "a tenth": lambda w, x, y: jnp.sum((x @ w - y) ** 2) / 10,
    "means of features": lambda w, x, y: 3 * jnp.sum(jnp.mean((x @ w - y) ** 2, -1)),
    "cross entropy": lambda w, x, y: -jnp.sum(jax.nn.log_softmax(x @ w) * jax.nn.one_hot(jnp.argmax(y, -1), 16)),
}
MEANS = {
    "mean": lambda w, x, y: jnp.mean((x @ w - y) ** 2),
    "divided": lambda w, x, y: jnp.sum((x @ w - y) ** 2) / x.shape[0],
    "rows divided": lambda w, x, y: jnp.sum((x @ w - y) ** 2 / x.shape[0]),
    "weighed": lambda w, x, y: jnp.vdot(jnp.sum((x @ w - y) ** 2, -1), jnp.full(x.shape[0], 1 / x.shape[0])),
    "beside a penalty": lambda w, x, y: jnp.mean((x @ w - y) ** 2) + 0.01 * jnp.sum(w**2),
    "a third of a mean": lambda w, x, y: jnp.mean((x @ w - y) ** 2) / 3,
    "thrice a mean": lambda w, x, y: 3 * jnp.mean((x @ w - y) ** 2),
    "a mean by a product": lambda w, x, y: jnp.sum((x @ w - y) ** 2) * (1 / x.shape[0]),
    "masked": lambda w, x, y: jnp.sum(jnp.sum((x @ w - y) ** 2, -1) / x.shape[0] * (y[:, 0] > 0)),
    "among other divisors": lambda w, x, y: jnp.mean((x @ w / 4) ** 2 / 64 - jnp.sum(y / 64, -1, keepdims=True) / 512 + x),
    "sums of features": lambda w, x, y: jnp.mean(jnp.sum((x @ w - y) ** 2, -1)),
}


@pytest.mark.parametrize(
    ("options", "value", "gradients"),
    [
        ({}, "1/8", "1/8"),
        ({"gradients_mean": False}, "1/8", "the same"),
        ({"parallel_mode": "semi_auto_parallel", "gradients_mean": False, "grad_accumulation_step": 4}, "1/4", "1/4"),
        ({"grad_accumulation_step": 2}, "1/16", "1/16"),
    ],
)
@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS.keys())
def test_a_loss_that_adds_up_rows_is_said_to_be_averaged(loss, options, value, gradients):
    local, plain = steps_of(loss)
    step = parallel(local, **options)
    (note,) = [note for note in step.plan(W, X, Y).notes if "adds up the rows" in note]
    assert f"it is {value} of that of one device, and its gradients are {gradients}." in note
    if loss is SUMS["squares"]:
        share = 1 / int(value.partition("/")[2])
        np.testing.assert_allclose(step(W, X, Y)[1], share * plain(W, X, Y)[1], rtol=1e-5)


FIXED = {
    "a number": lambda w, x, y: jnp.sum((x @ w - y) ** 2) / 32,
    "rows divided": lambda w, x, y: jnp.sum(jnp.sum((x @ w - y) ** 2, -1) / 32),
    "by a product": lambda w, x, y: jnp.sum((x @ w - y) ** 2) * 1e-3,
    "in a function": lambda w, x, y: jax.jit(lambda z: jnp.sum(z**2) / 512)(x @ w - y),
}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 8),
        ({"parallel_mode": "auto_parallel", "gradients_mean": False, "grad_accumulation_step": 4}, 4),
        ({"parallel_mode": "semi_auto_parallel", "gradients_mean": False, "pipeline_stages": 2, "grad_accumulation_step": 4}, 4),
    ],
)
@pytest.mark.parametrize("loss", FIXED.values(), ids=FIXED.keys())
def test_a_divisor_that_does_not_follow_the_rows_is_said(loss, options, count):
    local, plain = steps_of(loss)
    step = parallel(local, **options)
    (note,) = [note for note in step.plan(W, X, Y).notes if "adds up the rows" in note]
    assert "divides by a number that is the same for fewer rows" in note
    assert f"it is 1/{count} of that of one device" in note
    if loss is FIXED["a number"]:
        np.testing.assert_allclose(step(W, X, Y)[1], plain(W, X, Y)[1] / count, rtol=1e-5)
        report = step.verify(W, X, Y)
        assert not report.ok
        assert "pipeline_stages" in options or note in report.explanations


@pytest.mark.parametrize(("rows", "said"), [(0, "0 rows"), (1, "1 row")])
@pytest.mark.parametrize("options", [{}, {"parallel_mode": "semi_auto_parallel", "gradients_mean": False, "grad_accumulation_step": 4}])
def test_too_few_rows_are_refused_by_their_number(rows, said, options):
    local, _ = steps_of(lambda w, x: jnp.mean((x @ w) ** 2))
    with pytest.raises(StrategyError, match=rf"has {said}\.|not divisible by"):
        parallel(local, **options).plan(W, X[:rows])


@pytest.mark.parametrize("other", MEANS.values(), ids=MEANS.keys())
def test_of_several_losses_one_with_a_fixed_divisor_is_said_once(other):
    def step(w, x, y):
        fixed, first = spmdctx.value_and_grad(FIXED["a number"])(w, x, y)
        again, second = spmdctx.value_and_grad(FIXED["rows divided"])(w, x, y)
        mean, third = spmdctx.value_and_grad(other)(w, x, y)
        return w - first - second - third, (fixed, again, mean)

    step = parallel(step)
    (note,) = [note for note in step.plan(W, X, Y).notes if "adds up the rows" in note]
    assert "divides by a number that is the same for fewer rows" in note
    assert step.verify(W, X, Y).explanations.count(note) == 1


def test_of_several_means_nothing_is_said():
    def step(w, x, y):
        losses = [spmdctx.value_and_grad(loss)(w, x, y) for loss in MEANS.values()]
        return w - sum(gradient for _, gradient in losses), [value for value, _ in losses]

    assert not any("adds up the rows" in note for note in parallel(step).plan(W, X, Y).notes)


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS.keys())
def test_of_a_mean_over_the_rows_nothing_is_said(loss):
    local, plain = steps_of(loss)
    step = parallel(local)
    assert not any("adds up the rows" in note for note in step.plan(W, X, Y).notes)
    close(step(W, X, Y), plain(W, X, Y))

"""The numerics check: differences by the documented measure, and verdicts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.experimental import io_callback

import spmdctx
from spmdctx.errors import ContextError
from spmdctx.step.entry import Entry
from spmdctx.step.verify.verify import VerifyReport, VerifyRow


def parallel(fn, **options):
    return spmdctx.parallel(fn, parallel_mode="data_parallel", **options)


def row(path="out", dtype="float32", difference=2e-4, **fields):
    return VerifyRow(path, dtype, difference, **fields)


def test_a_step_is_the_same_on_one_device():
    def step(w, x, key):
        noise = jax.random.normal(key, x.shape, x.dtype)
        return w - jax.grad(lambda w: jnp.mean(((x + noise) @ w) ** 2))(w), jnp.argmax(x), jax.random.split(key)[0]

    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(16, 4))
        report = parallel(step).verify(jnp.ones((4, 4)), x, jax.random.key(0))
    assert report.ok
    assert report.num_devices == 8
    assert [entry.dtype for entry in report.rows] == ["float64", "int64", "key<fry>"]
    assert report.worst.difference < 1e-12


def test_arguments_that_are_donated_survive():
    w, x = jnp.ones((4, 4)), np.ones((8, 4), np.float32)
    step = parallel(lambda w, x: w - x.mean(), donate_argnums=0)
    assert step.verify(w, x).ok
    assert not w.is_deleted()


def test_constraints_of_the_user_do_not_bind_the_one_device_run():
    def step(w, x):
        sharding = jax.NamedSharding(spmdctx.get_mesh(), jax.P("data"))
        body = jax.checkpoint(lambda x: jax.lax.with_sharding_constraint(x @ w, sharding))
        return body(x).sum()

    assert parallel(step).verify(jnp.ones((4, 4)), np.ones((8, 4), np.float32)).ok


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("given", ["in_shardings", "out_shardings", "a nested jit"])
def test_shardings_of_jit_do_not_bind_the_one_device_run(mode, given):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))

    def plain(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.sum()

    def nested(w, x):
        return plain(w, jax.jit(lambda x: 2 * x, in_shardings=(rows,), out_shardings=rows)(x))

    steps = {
        "in_shardings": jax.jit(plain, in_shardings=(rows, rows)),
        "out_shardings": jax.jit(plain, out_shardings=(rows, None)),
        "a nested jit": nested,
    }
    step = spmdctx.parallel(steps[given], parallel_mode=mode, mesh=mesh)
    report = step.verify(jnp.eye(16), np.ones((16, 16), np.float32))
    assert report.ok, report


def test_a_step_that_solves_equations_is_the_same_on_one_device():
    def step(matrix, right):
        return jnp.linalg.solve(matrix + 10 * jnp.eye(4), right), jnp.linalg.slogdet(matrix)[1]

    matrix = jax.random.normal(jax.random.key(0), (8, 4, 4))
    report = spmdctx.parallel(step, topology="cpu").verify(matrix, matrix[..., :1])
    assert report.ok, report


def test_a_shard_map_over_several_devices_is_compared_on_all_of_them():
    def step(w, x):
        product = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "data"),
            mesh=spmdctx.get_mesh(),
            in_specs=(jax.P(None, "data"), jax.P("data")),
            out_specs=jax.P(),
        )
        return w - jax.grad(lambda w: jnp.mean(product(x, w) ** 2))(w)

    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    report = spmdctx.parallel(step, parallel_mode="hybrid_parallel").verify(jnp.ones((16, 4)), x)
    assert report.ok
    assert report.reference == "with whole arguments"


@pytest.mark.parametrize(
    ("rows", "ok"),
    [
        ((row(),), True),
        ((row(num_over=1),), False),
        ((row(num_over=2, num_allowed=2),), True),
        ((row(num_over=1, rtol=1e-3),), True),
        ((row(num_over=1, rtol=1e-5),), False),
        ((row(), row(difference=float("inf"), num_over=1)), False),
    ],
)
def test_a_verdict_follows_the_noise_and_rtol(rows, ok):
    assert VerifyReport(rows, 8).ok is ok


def test_a_report_names_the_faults_first():
    rows = row(difference=2.0, noise=2.0), row("loss", difference=0.5, noise=1e-7, num_over=1)
    first, *others = str(VerifyReport(rows, 4)).splitlines()
    assert first == "NOT the same on 4 devices as on one: 2 results"
    assert others[0] == (
        "  ! loss: differs by 5.0e-01 (float32); rounding alone moves it by up to 1.0e-07 on one device, "
        "and 1 of 1 values are beyond their own noise"
    )
    assert VerifyReport(rows, 4).worst is rows[1]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (row(difference=0.0), "out: the same (float32)"),
        (row(), "out: differs by 2.0e-04 (float32); the last operation may round so"),
        (row(noise=1e-3), "out: differs by 2.0e-04 (float32); rounding alone moves it by up to 1.0e-03 on one device"),
        (row(noise=2.0), "one device: rounding errors decide some of its values, as where a true gradient is zero"),
        (row(noise=1e-7, num_over=3, rtol=1e-3), "by up to 1.0e-07 on one device, and rtol accepts 1e-03"),
        (row(dtype="int32", difference=2.0, noise=3.0, size=9), "2 of 9 differ (int32); rounding alone changes 3 on one device"),
    ],
)
def test_a_report_says_why_a_difference_is_none(one, words):
    assert words in str(one)
    assert one.ok


@pytest.mark.parametrize(("rtol", "error"), [(-1, ContextError), (float("nan"), ContextError), ("1e-3", TypeError), (True, TypeError)])
def test_an_rtol_that_is_none_is_refused(rtol, error):
    with pytest.raises(error, match="rtol must be"):
        parallel(lambda w, x: w - x.mean()).verify(jnp.ones(4), np.ones(8, np.float32), rtol=rtol)


def test_rtol_accepts_what_differs(monkeypatch):
    step, args = parallel(lambda w, x: w - x.mean()), (jnp.ones(4), np.ones((8, 3), np.float32) / 3)
    execute = Entry.execute
    monkeypatch.setattr(Entry, "execute", lambda entry, leaves: [result * 1.001 for result in execute(entry, leaves)])
    assert not step.verify(*args).ok
    assert not step.verify(*args, rtol=1e-4).ok
    assert step.verify(*args, rtol=2e-3).ok


def test_an_argument_of_the_step_that_is_called_rtol_is_its_own():
    assert parallel(lambda w, x, *, rtol: w - rtol * x.mean()).verify(jnp.ones(4), np.ones(8, np.float32), rtol=-1.0).ok


# Right steps of which rounding decides something


def trained(loss, tx, params, *batch, **options):
    def step(params, state, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return parallel(step, **options).verify(params, tx.init(params), *batch)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_key_bias_has_no_true_gradient():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(num_heads=2)(x, x)

    x, y = numbers(16, 8, 16), numbers(16, 8, 16, seed=1)
    net = Net()
    report = trained(lambda p, x, y: jnp.mean((net.apply(p, x) - y) ** 2), optax.adam(1e-3), net.init(jax.random.key(0), x), x, y)
    assert report.ok, report
    bias = next(row for row in report.rows if "key/bias" in row.path)
    assert bias.difference > 1e-4
    assert bias.noise > 1e-2


def test_a_bias_before_batch_norm_has_no_true_gradient():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.dropout, self.down = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))

    def step(net, optimizer, x, y):
        value, gradients = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        optimizer.update(net, gradients)
        return value

    net = Net(nnx.Rngs(0, dropout=1))
    report = parallel(step).verify(net, nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param), numbers(32, 8), numbers(32, 4, seed=1))
    assert report.ok, report


@pytest.mark.parametrize(("dtype", "optimizer"), [(jnp.bfloat16, optax.contrib.muon(1e-2, ns_steps=2)), (jnp.float16, optax.adam(1e-2))])
def test_float32_state_is_as_exact_as_the_arithmetic_that_makes_it(dtype, optimizer):
    def loss(params, x, y):
        hidden = jax.nn.gelu(x.astype(dtype) @ params["up"].astype(dtype) + params["bias"].astype(dtype))
        return jnp.mean(((hidden @ params["down"].astype(dtype)).astype(jnp.float32) - y) ** 2)

    params = {"up": numbers(16, 32), "bias": np.zeros(32, np.float32), "down": numbers(32, 4, seed=1)}
    report = trained(loss, optimizer, params, numbers(64, 16, seed=2), numbers(64, 4, seed=3))
    assert report.ok, report
    assert report.worst.noise > 1e-4


def test_a_choice_that_rounding_decides_is_no_fault():
    def step(w, x):
        scores = x @ w
        return jnp.argmax(jnp.stack([scores, scores[:, ::-1] @ jnp.eye(8)[::-1]]).sum(-1), 0), jnp.argmax(scores, -1)

    report = parallel(step).verify(jnp.asarray(numbers(64, 8)), numbers(64, 64, seed=1))
    assert report.ok, report


# Callbacks


def test_reports_to_the_host_come_once_and_answers_are_asked_for_twice():
    seen, asked = [], []

    def answer(x):
        asked.append(x)
        return x

    def step(w, x):
        def iteration(total, row):
            jax.debug.callback(seen.append, row.sum())
            return total + row, None

        total, _ = jax.lax.scan(iteration, jnp.zeros(x.shape[1:]), x)
        return w - io_callback(answer, jax.ShapeDtypeStruct((), np.float32), jnp.tanh(total).sum())

    report = spmdctx.parallel(step, parallel_mode="data_parallel", batch_argnums=1).verify(jnp.ones(()), numbers(8, 4) / 3)
    jax.effects_barrier()
    assert report.ok, report
    assert len(asked) == 2
    assert len(seen) == 8


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bool_])
def test_sums_of_whole_numbers_are_exact_beside_floats(dtype):
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        codes = jnp.round(10 * (x @ w)).astype(dtype)
        products = jax.lax.dot_general(codes, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        return w - gradient, value + 0.0 * products.sum(), products.sum(0), jnp.cumsum(codes, 0), jnp.sum(x > 0, 1)

    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    assert parallel(step).verify(jnp.eye(16, 8), x).ok

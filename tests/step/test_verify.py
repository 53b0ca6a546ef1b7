"""The numerics check: differences by the documented measure, and verdicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.step.verify import VerifyReport, VerifyRow


def parallel(fn, **options):
    return spmdctx.parallel(fn, parallel_mode="data_parallel", **options)


def row(difference=0.0, change=0.0, dtype="float32", tolerance=1e-4, is_state=False):
    return VerifyRow("out", dtype, difference, change, tolerance, is_state)


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
        ((row(1e-5),), True),
        ((row(2e-4),), False),
        ((row(2e-4, 2e-4, is_state=True),), True),
        ((row(2e-4, 2e-3, is_state=True),), False),
        ((row(2e-5, 0.0, "float64", 1e-5, is_state=True),), False),
        ((row(1.0, 0.0, "int32", 0.0),), False),
        ((row(), row(float("inf"))), False),
    ],
)
def test_a_verdict_follows_the_dtype(rows, ok):
    assert VerifyReport(rows, 8).ok is ok


def test_a_report_names_the_worst_results_first():
    text = str(VerifyReport((row(1e-6), VerifyRow("loss", "float32", 0.5, 0.5, 1e-4, False)), 4))
    assert text.splitlines()[0] == "NOT the same on 4 devices as on one: 2 results"
    assert text.splitlines()[1] == "  ! loss: 5.0e-01 (float32, tolerance 1e-04)"


def test_a_report_says_what_is_judged_by_its_norm():
    assert str(row(2e-4, 3e-5, is_state=True)) == "out: 2.0e-04, by its norm 3.0e-05 (float32, tolerance 1e-03 by norm)"
    assert str(row(2e-4, 3e-3, is_state=True)) == "! out: 2.0e-04 (float32, tolerance 1e-04)"

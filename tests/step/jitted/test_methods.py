"""What a step shares with the functions of jax.jit: trace, lower, eval_shape, clear_cache and the signature of the user's function."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx

WEIGHTS, ROWS = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)


def plain(weights: jax.Array, rows: jax.Array, rate: float = 0.5) -> dict[str, jax.Array]:
    """Moves weights."""
    return {"weights": weights - rate * (rows.T @ rows), "loss": (rows @ weights).mean(), "count": jnp.int32(3)}


def parallel(fn=plain, **options):
    return spmdctx.parallel(fn, **{"parallel_mode": "auto_parallel", "device_num": 4, **options})


class Trainer:
    @spmdctx.parallel(parallel_mode="auto_parallel", device_num=4)
    def train(self, weights, rows):
        return weights + rows.sum()


def test_eval_shape_is_that_of_jit():
    want = jax.jit(plain).eval_shape(WEIGHTS, ROWS)
    found = parallel().eval_shape(WEIGHTS, jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype))
    assert jax.tree.map(lambda one: (one.shape, one.dtype), found) == jax.tree.map(lambda one: (one.shape, one.dtype), want)


def test_eval_shape_needs_no_devices_and_knows_nnx():
    def train(model, rows):
        return model(rows).sum(axis=0), {"rows": rows}

    found = parallel(train, device_num=64).eval_shape(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), ROWS)
    assert found[0].shape == (4,)
    assert found[1]["rows"].shape == (8, 8)


def test_a_traced_step_lowers_and_compiles_to_the_program_that_runs():
    step = parallel()
    traced = step.trace(WEIGHTS, ROWS)
    assert traced.out_info["weights"].shape == (8, 8)
    assert "sharding_constraint" in str(traced.jaxpr) or "sharding" in str(traced.jaxpr)
    compiled = traced.lower().compile()
    assert compiled.as_text() == step.lower(WEIGHTS, ROWS).compile().as_text()


def test_a_traced_step_of_keywords_takes_flat_leaves():
    traced = parallel().trace(WEIGHTS, rows=ROWS)
    assert len(traced.jaxpr.in_avals) == 2
    assert traced.lower().compile()


def test_a_pipeline_is_no_one_program_to_trace():
    def step(params, rows):
        loss = lambda params, rows: (jnp.tanh(rows @ params[0]) @ params[1]).mean()  # noqa: E731  short and local
        return spmdctx.value_and_grad(loss)(params, rows)

    cut = parallel(step, parallel_mode="semi_auto_parallel", pipeline_stages=2, grad_accumulation_step=4)
    with pytest.raises(spmdctx.UnsupportedError, match="pipeline"):
        cut.trace([WEIGHTS, WEIGHTS], ROWS)
    assert cut.eval_shape([WEIGHTS, WEIGHTS], ROWS)[0].shape == ()


def test_after_clear_cache_a_step_traces_again():
    traced = []

    def counted(weights, rows):
        traced.append(1)
        return weights + rows.sum()

    step = parallel(counted)
    for _ in range(3):
        step(WEIGHTS, ROWS)
    before = len(traced)
    step(WEIGHTS, ROWS)
    assert len(traced) == before
    step.clear_cache()
    with pytest.raises(spmdctx.PlanError):
        step.report()
    np.testing.assert_array_equal(step(WEIGHTS, ROWS), WEIGHTS + ROWS.sum())
    assert len(traced) > before


def test_clear_cache_reaches_methods():
    trainer = Trainer()
    bound = trainer.train
    bound(WEIGHTS, ROWS)
    Trainer.train.clear_cache()
    with pytest.raises(spmdctx.PlanError):
        bound.report()


def test_a_step_keeps_signature_name_and_docstring():
    step = parallel()
    assert inspect.signature(step) == inspect.signature(plain)
    assert (step.__name__, step.__doc__, step.__module__, step.__wrapped__) == (plain.__name__, plain.__doc__, plain.__module__, plain)
    assert step.__annotations__ == plain.__annotations__
    assert list(inspect.signature(Trainer().train).parameters) == ["weights", "rows"]
    assert list(inspect.signature(Trainer.train).parameters) == ["self", "weights", "rows"]


def test_a_jitted_function_keeps_its_signature():
    assert inspect.signature(parallel(jax.jit(plain))) == inspect.signature(plain)

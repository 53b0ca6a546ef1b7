"""A user's file as a type checker sees it: `make lint` fails where a line marked as an error is none, or another line is one."""

from typing import Any, assert_type

import jax
import optax

import spmdctx

Params = dict[str, jax.Array]


@spmdctx.parallel(parallel_mode="auto_parallel", donate_argnums=0)
def train_step(params: Params, batch: jax.Array, rate: float = 0.1) -> tuple[Params, jax.Array]:
    loss, gradients = spmdctx.value_and_grad(mean)(params, batch)
    return optax.apply_updates(params, gradients), loss * rate


@spmdctx.parallel
def mean(params: Params, batch: jax.Array) -> jax.Array:
    return (batch @ params["w"]).mean()


class Trainer:
    @spmdctx.parallel(parallel_mode="data_parallel")
    def train(self, params: Params, batch: jax.Array) -> Params:
        return params


def untyped(params, batch):  # type: ignore[no-untyped-def]  # many steps have no types
    return params


def uses(params: Params, batch: jax.Array, trainer: Trainer) -> None:
    assert_type(train_step(params, batch), tuple[Params, jax.Array])
    assert_type(train_step(params, batch=batch, rate=1.0), tuple[Params, jax.Array])
    assert_type(mean(params, batch), jax.Array)
    assert_type(trainer.train(params, batch), Params)
    assert_type(spmdctx.parallel(mean)(params, batch), jax.Array)
    assert_type(train_step.with_options(strict=True)(params, batch)[1], jax.Array)
    assert_type(train_step.plan(params, jax.ShapeDtypeStruct((8, 8), "float32")), spmdctx.Plan)
    print(train_step.__name__, spmdctx.parallel(untyped)(1, "anything"))
    spmdctx.set_auto_parallel_context(parallel_mode="auto_parallel", device_num=8, parallel_optimizer_config={"optimizer_level": "level2"})
    with spmdctx.auto_parallel_context(dataset_strategy=((8, 1), (8,)), comm_fusion={"allreduce": {"mode": "size", "config": 64}}):
        assert_type(spmdctx.plan(mean, params, batch, search_mode="recursive_programming", mesh={"data": 8}), spmdctx.Plan)
    assert_type(train_step.trace(params, batch), jax.stages.Traced)
    train_step.clear_cache()
    assert_type(train_step.plan(params, batch).to_dict(), dict[str, Any])
    with spmdctx.CheckpointManager("run") as checkpoints:
        restored = checkpoints.restore({"params": params})
        assert_type(restored.step, int)

    # Each of these is a mistake; mypy reports the comment that none of them needs any longer.
    train_step(params)  # type: ignore[call-arg]
    train_step(params, "x")  # type: ignore[arg-type]
    train_step(params, batch, speed=1.0)  # type: ignore[call-arg]
    mean(batch, params)  # type: ignore[arg-type]
    trainer.train(batch, params)  # type: ignore[arg-type]
    train_step.plann(params, batch)  # type: ignore[attr-defined]
    spmdctx.parallel(mean)(1, 2)  # type: ignore[arg-type]
    spmdctx.value_and_grad(mean)(params, 1)  # type: ignore[arg-type]
    spmdctx.set_auto_parallel_context(parallel_mode="auto")  # type: ignore[arg-type]
    spmdctx.set_auto_parallel_context(device_nums=8)  # type: ignore[call-arg]
    spmdctx.set_auto_parallel_context(parallel_optimizer_config={"level": 2})  # type: ignore[typeddict-unknown-key]
    spmdctx.auto_parallel_context(search_mode="fast")  # type: ignore[arg-type]
    spmdctx.plan(mean, params, batch, strict="yes")  # type: ignore[arg-type]
    train_step.with_options(topologie="h100")  # type: ignore[call-arg]
    spmdctx.set_algo_parameters(fully_use_devices=1.5)  # type: ignore[arg-type]

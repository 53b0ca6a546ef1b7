"""What a process of a job answers: its place in the world, and what steps do there. Every process must ask for all of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmdctx
from spmdctx import communication, ops
from spmdctx.errors import CommunicationError, PlanMismatchError
from spmdctx.step.agreement import agree_on_plan
from spmdctx.step.processes import to_host


def everything():
    """Answers by name, as plain data."""
    alone = (place, collectives, state_and_batch, checks)
    together = (other_plan, other_constant) if jax.process_count() > 1 else ()
    return {question.__name__: question() for question in (*alone, *together)}


def place():
    size = jax.device_count()
    own = list(range(0, size, 2))
    communication.create_group("even", own)
    communication.create_group("halves", [list(range(size // 2)), list(range(size // 2, size))])
    return {
        "rank": communication.get_rank(),
        "size": communication.get_group_size(),
        "local": [communication.get_local_rank(), communication.get_local_rank_size()],
        "even": [communication.get_rank("even"), communication.get_group_size("even")],
        "halves": [communication.get_rank("halves"), communication.get_group_size("halves"), communication.get_local_rank_size("halves")],
        "to world": [communication.get_world_rank_from_group_rank("even", 2), communication.get_world_rank_from_group_rank("halves", 1)],
        "from world": communication.get_group_rank_from_world_rank(size - 2, "even"),
    }


def collectives():
    """In the loss of hybrid_parallel, over devices of all processes."""
    size = jax.device_count()
    communication.create_group("ends", [[rank, size - 1 - rank] for rank in range(size // 2)])
    following = ops.NeighborExchange([[(rank + 1) % size] for rank in range(size)], [[(rank - 1) % size] for rank in range(size)])

    def loss(w, x):
        h = x * w
        terms = {
            "sum": ops.AllReduce()(h),
            "largest": ops.AllReduce("max")(h),
            "ends": ops.AllReduce(group="ends")(h),
            "gathered": ops.AllGather()(h),
            "scattered": ops.ReduceScatter()(ops.AllGather()(h)),
            "exchanged": ops.AlltoAll(size, 1, 0)(h),
            "from 1": ops.Broadcast(1)(h),
            "before": following((h,))[0],
        }
        return sum(jnp.mean(term**2) for term in terms.values()), terms["sum"]

    def step(w, x):
        (value, total), gradient = spmdctx.value_and_grad(loss, has_aux=True)(w, x)
        return value, total, gradient

    x = np.arange(size * size, dtype=np.float32).reshape(size, size) / size**2
    found = spmdctx.parallel(step, parallel_mode="hybrid_parallel", gradients_mean=False, batch_argnums=1)(np.float32(1.5), x)
    return [np.asarray(to_host(one)).tolist() for one in found]


def trained(**options):
    """A small step of a module, and its state made by `step.init`."""

    def create():
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return value

    step = spmdctx.parallel(train_step, **{"parallel_mode": "auto_parallel", "dataset_strategy": "data_parallel", **options})
    return step, step.init(create, batch=jax.ShapeDtypeStruct((24, 16), np.float32))


def state_and_batch():
    """State that is made split, and a batch of which each process gives its block."""
    step, (model, optimizer) = trained()
    x = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    part = 24 // jax.process_count()
    block = x[part * jax.process_index() :][:part]
    losses = [float(step(model, optimizer, step.shard_batch(block))) for _ in range(3)]
    return {"losses": losses, "kernel": to_host(model.kernel[...]).tolist(), "moved": list(step.notes)}


def checks():
    """Verify and audit, on all processes."""
    step, (model, optimizer) = trained(topology="cpu")
    x = np.ones((24, 16), np.float32)
    verified, audited = step.verify(model, optimizer, x), step.audit(model, optimizer, x)
    return {"verified": [verified.ok, verified.num_devices], "audited": audited.ok}


def other_plan():
    """A process that plans otherwise; nothing is run."""
    step, (model, optimizer) = trained()
    plan = step.plan(model, optimizer, np.ones((24, 16), np.float32))
    if jax.process_index():
        first = plan.inputs[0]
        plan = dataclasses.replace(plan, inputs=(first._replace(reason="another"), *plan.inputs[1:]), notes=(*plan.notes, "Another note."))
    return _refusal(plan, jax.make_jaxpr(lambda x: x + 1)(1.0))


def other_constant():
    """A process that writes its rank into the program."""
    step, (model, optimizer) = trained()
    plan = step.plan(model, optimizer, np.ones((24, 16), np.float32))
    rank = float(communication.get_rank())
    return _refusal(plan, jax.make_jaxpr(lambda x: x + rank)(1.0))


def _refusal(plan, jaxpr):
    try:
        agree_on_plan("train_step", plan, jaxpr)
    except (PlanMismatchError, CommunicationError) as error:
        return str(error)
    return ""

"""Updates by one part each: they are those of optax on the gradients of the parts, though servers do not wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.server.alone import part_results, pushed_to
from spmdctx.server.program.crossing import crossing_of
from spmdctx.server.program.cut import cut_step
from spmdctx.server.program.spec import raw, server_specs
from spmdctx.server.program.worker import worker_program
from spmdctx.server.state.shard import Shard

CHAINS = {
    "adam by a schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 50)),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
    "skips what is not finite": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1)), 3),
    "ratios of norms": optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)),
}


def parameters():
    rng = np.random.default_rng(0)
    sizes = {"w1": (8, 16), "w2": (16, 4), "bias": (4,), "scale": ()}
    return {name: jnp.asarray(rng.normal(size=shape) / 4) for name, shape in sizes.items()}


def batch():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(12, 8))), jnp.asarray(rng.normal(size=(12, 4)))


def loss(params, x, y):
    return jnp.mean((params["scale"] * jnp.tanh(x @ params["w1"]) @ params["w2"] + params["bias"] - y) ** 2)


def step_of(tx, make=loss, has_aux=False):
    def step(state, given):
        params, own = state
        value, grads = spmdctx.value_and_grad(make, has_aux=has_aux)(params, *given)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    return step


def captured(fn, num_parts, *args):
    spmdctx.set_ps_context(enable_ps=True, num_servers=2)
    step = spmdctx.parallel(fn, parallel_mode="stand_alone", grad_accumulation_step=num_parts)
    return step._entry_of(args, {}).step


def updated(step, num_servers, leaves, parts):
    """The arrays of the step after an update by each part, by slot."""
    cut = cut_step(step, num_servers)
    crossing, program = crossing_of(step, cut), worker_program(step, cut)
    call = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr))
    specs = server_specs(step, cut, x64=True)
    shards = [Shard(spec, {slot: raw(jnp.asarray(leaves[int(slot[3:])])) for slot in spec.held}, 0) for spec in specs]
    for part in parts:
        values = dict(enumerate(leaves))
        for number in {*cut.pulled, *crossing.pulled}:
            values[number] = shards[cut.home.get(number, 0)].pull([f"in/{number}"])[1][0]
        made = part_results(program, call, values, part, step.loss.num_parts)
        sent = crossing.run(made, values)
        for number, shard in enumerate(shards):
            shard.update({**pushed_to(cut, number, made, values, gives=True), **sent})
    return {slot: value for shard in shards for slot, value in shard.values.items()}


@pytest.mark.parametrize("tx", CHAINS.values(), ids=CHAINS)
def test_each_part_is_an_update_of_optax(tx):
    with jax.enable_x64(True):
        params = parameters()
        state = params, tx.init(params)
        step = captured(step_of(tx), 3, state, batch())
        found = updated(step, 2, jax.tree.leaves((state, batch())), (2, 0))
        for part in (2, 0):
            grads = jax.grad(loss)(state[0], *(one[part::3] for one in batch()))
            updates, own = tx.update(grads, state[1], state[0])
            state = optax.apply_updates(state[0], updates), own
        wanted = jax.tree.leaves(state)
        assert len(found) == len(wanted)
        for number, value in enumerate(wanted):
            np.testing.assert_allclose(found[f"in/{number}"], value, rtol=0, atol=1e-13)


def with_norm_of_updates(tx):
    return optax.chain(tx, optax.clip_by_global_norm(0.1), optax.scale(-0.1))


@pytest.mark.parametrize("tx", [optax.scale_by_adam(), optax.trace(0.9)], ids=["adam", "momentum"])
def test_a_norm_over_state_of_several_servers_is_refused_by_its_line(tx):
    tx = with_norm_of_updates(tx)
    step = captured(step_of(tx), 1, (parameters(), tx.init(parameters())), batch())
    with pytest.raises(UnsupportedError, match="the update combines state that several of them hold") as error:
        crossing_of(step, cut_step(step, 2))
    assert "test_crossing.py" in str(error.value)
    assert "update_mode" in str(error.value)
    assert crossing_of(step, cut_step(step, 1)).outputs == ()


def test_a_norm_of_parameters_that_the_loss_reads_is_computed_by_the_worker():
    def step(params, given):
        value, grads = spmdctx.value_and_grad(loss)(params, *given)
        shrunk = 1 / (1 + optax.tree.norm(params))
        return jax.tree.map(lambda own, grad: shrunk * own - 0.1 * grad, params, grads), value

    own = captured(step, 1, parameters(), batch())
    cut = cut_step(own, 2)
    assert set(crossing_of(own, cut).pulled) <= set(cut.pulled)
    assert crossing_of(own, cut).outputs


def test_a_result_of_each_element_of_the_batch_is_refused():
    def with_errors(params, x, y):
        errors = jnp.mean((x @ params["w1"] @ params["w2"] - y) ** 2, axis=1)
        return jnp.mean(errors), errors

    tx = optax.sgd(0.1)
    state = parameters(), tx.init(parameters())
    step = captured(step_of(tx, with_errors, has_aux=True), 3, state, batch())
    with pytest.raises(UnsupportedError, match="a result of the loss that grows with the batch"):
        crossing_of(step, cut_step(step, 2))
    whole = captured(step_of(tx, with_errors, has_aux=True), 1, state, batch())
    assert crossing_of(whole, cut_step(whole, 2)).outputs == ()


def test_a_plan_of_async_refuses_what_cannot_cross():
    tx = with_norm_of_updates(optax.scale_by_adam())
    spmdctx.set_ps_context(enable_ps=True, num_servers=2, update_mode="async")
    step = spmdctx.parallel(step_of(tx), parallel_mode="stand_alone")
    with pytest.raises(UnsupportedError, match="the update combines state"):
        step.plan((parameters(), tx.init(parameters())), batch())


def test_what_is_no_table_in_the_end_does_not_keep_norms_from_workers():
    def loss(params, ids):
        return (params["few"][ids] @ params["tower"]).mean() ** 2

    def step(state, ids):
        params, own = state
        value, grads = spmdctx.value_and_grad(loss)(params, ids)
        updates, own = tx.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    params = {"few": jnp.ones((600, 4)), "tower": jnp.ones((4, 2))}
    spmdctx.set_ps_context(enable_ps=True, num_servers=2)
    served = spmdctx.parallel(step, parallel_mode="stand_alone", grad_accumulation_step=2, batch_argnames="ids")
    entry = served._entry_of(((params, tx.init(params)), jnp.arange(8)), {})
    assert any("crosses whole" in note for note in entry.plan.notes)
    assert crossing_of(entry.step, entry.cut).outputs

"""A step that waits for an update of state."""

import functools

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdctx
from spmdctx.errors import ContextWarning
from spmdctx.lowering.rewrite.waiting.waits import wait_for
from tests.audit.compile_only import need_tpu
from tests.own_process import numbers

X = jnp.arange(12.0).reshape(3, 4) / 12


def step(w, m, x):
    """A gate, an update of two states of which one reads the other, and what is computed from the gate."""
    gate = jnp.tanh(x)
    moment = 0.9 * m + x.sum(0)
    return w - 0.1 * moment, moment, (gate * 2.0).sum()


ARGUMENTS = (jnp.ones(4), jnp.full(4, 0.5), X)


def written():
    closed = jax.make_jaxpr(step)(*ARGUMENTS)
    jaxpr = closed.jaxpr
    gate = next(eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "tanh")
    eqns, outputs = wait_for(jaxpr.eqns, jaxpr.outvars, gate, *jaxpr.outvars[:2])
    return jaxpr, gate, jexc.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outputs), closed.consts)


def test_the_numbers_are_the_same():
    _, _, changed = written()
    for found, expected in zip(jexc.jaxpr_as_fun(changed)(*ARGUMENTS), step(*ARGUMENTS), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_readers_of_the_gate_and_of_the_results_wait_but_not_their_makers():
    jaxpr, gate, changed = written()
    (barrier,) = [eqn for eqn in changed.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert list(barrier.invars) == [gate, *jaxpr.outvars[:2]]
    assert changed.jaxpr.outvars[:2] == barrier.outvars[1:]
    readers = [eqn for eqn in changed.jaxpr.eqns if gate in [atom for atom in eqn.invars if not isinstance(atom, jexc.Literal)]]
    assert readers == [barrier]
    weight = next(eqn for eqn in changed.jaxpr.eqns if jaxpr.outvars[0] in eqn.outvars)
    assert not set(barrier.outvars) & {atom for atom in weight.invars if not isinstance(atom, jexc.Literal)}


def test_two_updates_may_wait_for_one_gate():
    jaxpr, gate, _ = written()
    eqns, outputs = wait_for(jaxpr.eqns, jaxpr.outvars, gate, jaxpr.outvars[0])
    eqns, outputs = wait_for(eqns, outputs, gate, jaxpr.outvars[1])
    found = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outputs), ()))(*ARGUMENTS)
    np.testing.assert_array_equal(found[2], step(*ARGUMENTS)[2])
    assert [eqn.primitive.name for eqn in eqns].count("optimization_barrier") == 2


def test_what_is_made_inside_of_a_call_is_named():
    jaxpr, gate, _ = written()
    with pytest.warns(ContextWarning, match="made inside of a call"):
        eqns, outputs = wait_for(jaxpr.eqns, jaxpr.outvars, gate, jexc.Var(gate.aval))
    assert eqns == list(jaxpr.eqns)
    assert outputs == list(jaxpr.outvars)


PEAKS = """
from benchmarks import fidelity_plans
from spmdctx.cost.memory import early_updates

name = "transformer sharding_propagation 2x4 none seed 3"
fidelity_plans.SEEDS = (3,)
job = next(job for job in fidelity_plans.jobs("v5e:2x4") if fidelity_plans.name_of(job) == name)
for least in (early_updates._LEAST_SAVED, 2.0):
    early_updates._LEAST_SAVED = least
    built = fidelity_plans.build(job)
    memory = built.lowered.compile().memory_analysis()
    notes = [note for note in built.plan.notes if note.startswith("The rest of the step waits for") and "head" in note]
    print(built.plan.cost.memory_bytes, memory.argument_size_in_bytes + memory.temp_size_in_bytes, len(built.plan.early), len(notes))
"""


def test_the_compiled_program_frees_the_logits_gradient_before_the_backward_pass():
    need_tpu()
    (planned, early, *said), (planned_late, late, *unsaid) = numbers(PEAKS)
    assert (said, unsaid) == ([1, 1], [0, 0])
    assert planned < 0.75 * planned_late
    assert early < 0.75 * late


def test_a_step_that_waits_gives_the_numbers_of_one_device(monkeypatch):
    monkeypatch.setattr("spmdctx.cost.memory.early_updates._LEAST_SAVED", 0.0)
    monkeypatch.setattr("spmdctx.cost.memory.early_updates._LEAST_SHARE", 0.0)
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys[:4]]

    def step(weights, x):
        def loss(weights):
            return functools.reduce(lambda x, weight: jnp.tanh(x @ weight), weights, x).sum()

        value, gradients = jax.value_and_grad(loss)(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value

    mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "model"))
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))

    def split(weights, x):
        return step([jax.lax.with_sharding_constraint(weight, columns) for weight in weights], x)

    parallel = spmdctx.parallel(
        split, parallel_mode="auto_parallel", search_mode="sharding_propagation", mesh=mesh, topology="tpu-v5e", donate_argnums=0
    )
    x = jax.random.normal(keys[4], (16, 32))
    expected = step(weights, x)
    plan = parallel.plan(weights, x)
    assert len(plan.early) == 3
    assert any(note.startswith("The rest of the step waits for the new value of") for note in plan.notes)
    for got, want in zip(jax.tree.leaves(parallel(weights, x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

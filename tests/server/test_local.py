"""What stays with workers is taken out of a step: servers do not need it, and each worker renews it by sums alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.server.local.split import with_local
from spmdctx.server.program.spec import fingerprint
from spmdctx.server.state.progress import Done, Go, Progress, Save
from tests.server import cases

CLIP = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def marked(fn, *patterns, num_servers=2, **options):
    step = cases.served(fn, num_servers, 3, **options)
    spmdctx.set_param_ps(list(patterns))
    return step


def entry_of(step, *args):
    return step._entry_of(args, {})


def test_each_array_lies_on_one_server_or_with_workers():
    state = cases.state_of(CLIP)
    plan = marked(cases.step_of(CLIP), "*/w1", "*/w3").plan(state, cases.batch())
    own = [f"state/{place}/{name}" for place in ("0", "1/1/0/mu", "1/1/0/nu") for name in ("bias", "w2")]
    assert sorted(plan.local.arrays) == own
    elements = 4 + 16 * 16
    assert plan.local.num_bytes == plan.to_dict()["local"]["num_bytes"] == 3 * 4 * elements
    held = [path for one in plan.servers for path in one.arrays if not path.endswith(("scale", "count"))]
    assert len(held) == len(set(held)) == 3 * 2
    assert not set(held) & set(own)
    pulled = sum(one.pulled_bytes for one in plan.servers)
    least = 4 * (elements + 8 * 16 + 16 * 4)  # of marked parameters and of sums of other gradients
    assert least < pulled < least + 100
    text = str(plan)
    assert "each worker" in text
    assert "Servers hold scalars without a mark of set_param_ps, too: state/0/scale." in text.replace("\n    ", " ")


@pytest.mark.parametrize("num_servers", [1, 3])
def test_workers_take_sums_and_scalars_and_make_the_rest(num_servers):
    entry = entry_of(marked(cases.step_of(CLIP), "*/w1", num_servers=num_servers), cases.state_of(CLIP), cases.batch())
    shapes = sorted(var.aval.shape for var in entry.step.local.taken)
    assert [shape for shape in shapes if shape] == [(4,), (16, 4), (16, 16)]
    kept = [slot for server in entry.cut.servers for slot in server.kept]
    assert sorted(kept) == sorted(set(entry.cut.taken))
    names = {eqn.primitive.name for eqn in entry.step.local.jaxpr.jaxpr.eqns}
    assert "reduce_sum" not in names, "the norm is made by servers"


def test_marks_belong_to_the_step_of_a_job():
    args = cases.state_of(CLIP), cases.batch()
    found = set()
    for patterns in (["*/w1"], ["*/w2"], ["*/w1", "*/w2"]):
        spmdctx.reset_ps_context()
        found.add(fingerprint(entry_of(marked(cases.step_of(CLIP), *patterns), *args).step))
    assert len(found) == 3
    spmdctx.reset_ps_context()
    step = entry_of(cases.served(cases.step_of(CLIP), 2, 3), *args).step
    assert with_local(step, []) is step


NORMS = {
    "of updates": optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.1), optax.scale(-0.1)),
    "of parameters": optax.chain(optax.stateless(lambda grads, own: optax.tree.scale(1 / optax.tree.norm(own), grads)), optax.sgd(0.1)),
}


@pytest.mark.parametrize("tx", NORMS.values(), ids=NORMS)
def test_servers_that_would_need_what_workers_hold_are_refused_by_line(tx):
    step = marked(cases.step_of(tx), "*/w2")
    with pytest.raises(UnsupportedError, match=r"(?s)depends on these parameters or their state.*where: .*py:.*state/0/") as error:
        step.plan(cases.state_of(tx), cases.batch())
    assert 'set_param_ps("*")' in str(error.value)
    spmdctx.reset_ps_context()
    assert marked(cases.step_of(tx), "*").verify(cases.state_of(tx), cases.batch()).ok


STAYS = {
    "lamb": (optax.lamb(1e-2), 3),
    "accumulates": (optax.MultiSteps(CLIP, 2), 3),
    "norm of updates": (optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-0.1)), 1),
}


@pytest.mark.parametrize(("tx", "count"), STAYS.values(), ids=STAYS)
def test_state_that_servers_combine_lies_with_them_if_it_follows_from_gradients(tx, count):
    with jax.enable_x64(True):
        step, state = marked(cases.step_of(tx), "*/w1", "*/bias"), cases.state_of(tx)
        report = step.verify(state, cases.batch())
        assert len(step.plan(state, cases.batch()).local.arrays) == 2 * count
    assert max(row.difference for row in report.rows) <= 1e-12


def test_arguments_values_before_the_loss_and_results_reach_workers():
    def step(state, given, rate):
        x, y = given
        scaled = jax.tree.map(lambda w: w * rate.mean(), state)
        value, grads = spmdctx.value_and_grad(cases.loss)(scaled, x, y)
        new = jax.tree.map(lambda w, g, own: w - g * rate[0] - 1e-3 * own, state, grads, scaled)
        return new, {"loss": value, "norm": optax.tree.norm(new), "old": state["bias"], "gradient": grads["bias"]}

    with jax.enable_x64(True):
        step = marked(step, "w1", "*/w1", batch_argnames="given")
        report = step.verify(cases.parameters(), cases.batch(), jnp.asarray([0.1, 0.2]))
    assert max(row.difference for row in report.rows) <= 1e-12
    assert len(report.rows) == len(cases.SIZES) + 4


def test_a_print_of_what_workers_hold_is_theirs(capfd):
    def step(params, x, y):
        value, grads = spmdctx.value_and_grad(cases.loss)(params, x, y)
        jax.debug.print("bias {}", jnp.sum(params["bias"]) * 0 + 3)
        jax.debug.print("loss {}", value * 0 + 5)
        return jax.tree.map(lambda own, grad: own - grad, params, grads), value

    step = marked(step, "*/w1")
    entry = entry_of(step, cases.parameters(), *cases.batch())
    assert [eqn.primitive.name for eqn in entry.step.local.jaxpr.jaxpr.eqns].count("debug_print") == 1


def test_a_version_is_saved_by_one_worker_and_by_another_if_that_one_is_lost():
    progress = Progress(1)
    for worker in range(3):
        progress.hello(worker)
    progress.start(0, 1, 1)
    assert isinstance(progress.ask(0, 0), Go)
    progress.pushed(progress.generation, 0, [0])
    assert progress.applied(0, progress.generation, 1, {})
    progress.save()
    assert progress.ask(1, 0) == progress.ask(1, 1) == Save(progress.generation, 1)
    assert progress.ask(0, 0) == Done(1, {})
    progress.lost(1)
    assert progress.ask(2, 0) == Save(progress.generation, 1)
    progress.busy = True
    assert progress.ask(0, 1) is None
    assert progress.ask(2, 0) == Save(progress.generation, 1), "servers that wait for it do not keep a worker from saving"
    progress.saved_by_worker()
    assert progress.ask(2, 0) is None
    progress.save()
    progress.rewind(0)
    progress.busy = False
    assert isinstance(progress.ask(1, 0), Go)
    progress.reported(0, {4: np.float32(1)})
    assert progress.results == {}, "the step is to be done again"

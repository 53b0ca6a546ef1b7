"""Marks of stages: what they pin lies on its stage, the rest is cut between, and what cannot be is refused with source lines."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextError, ContextWarning, StrategyError

WIDTH = 8
pytestmark = pytest.mark.usefixtures("quick_compiler")
X, Y = (jax.random.normal(jax.random.key(seed), (16, WIDTH)) for seed in (0, 1))


def params(count=8):
    return {f"w{number}": 0.3 * jax.random.normal(jax.random.key(number), (WIDTH, WIDTH)) for number in range(count)}


def layer(w, x):
    return x + jnp.tanh(x @ w)


def loss_of(marks, wrap=lambda fn: fn):
    """A loss of as many layers as marks; None leaves a layer without a mark."""
    layers = [wrap(layer) if mark is None else wrap(spmdctx.pipeline_stage(layer, mark)) for mark in marks]

    def loss(params, x, y):
        for number, own in enumerate(layers):
            x = own(params[f"w{number}"], x)
        return jnp.mean((x - y) ** 2)

    return loss


def stepped(loss, stages=2, mode="auto_parallel", **options):
    def step(params, x, y):
        value, gradient = spmdctx.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value

    return spmdctx.parallel(step, parallel_mode=mode, pipeline_stages=stages, grad_accumulation_step=4, **options)


def stages_of(shardings, count=2):
    """The stage of each leaf, by its devices."""
    width = len(jax.devices()) // count
    return [{device.id // width for device in one.device_set} for one in jax.tree.leaves(shardings)]


def placed(step, *args):
    """The stages of the leaves of a planned step's first argument."""
    return stages_of(step.in_shardings(*args)[0])


def check_numbers(step, loss, given):
    got, value = step(given, X, Y)
    want, gradient = jax.value_and_grad(loss)(given, X, Y)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for name, own in got.items():
        np.testing.assert_allclose(own, given[name] - 0.1 * gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        ([0, 1, 1, 1], [0, 1, 1, 1]),
        ([0, 0, 0, 1], [0, 0, 0, 1]),
        ([None, 1, None, None], [0, 1, 1, 1]),
        ([None, None, 0, None], [0, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_marks_pin_the_cut_and_the_rest_is_automatic(marks, wanted, wrap):
    loss = loss_of(marks, wrap)
    step = stepped(loss)
    assert placed(step, params(4), X, Y) == [{stage} for stage in wanted]
    if marks == [0, 1, 1, 1] and wrap is jax.checkpoint:
        check_numbers(step, loss, params(4))


def test_marks_lie_inside_of_what_is_differentiated_and_checkpointed():
    inner = spmdctx.pipeline_stage(layer, 1)

    def loss(params, x, y):
        x = layer(params["w0"], x)
        for name in ("w1", "w2", "w3"):
            x = jax.checkpoint(lambda w, x: jnp.sin(inner(w, x)))(params[name], x)
        return jnp.mean((x - y) ** 2)

    assert placed(stepped(loss), params(4), X, Y) == [{0}, {1}, {1}, {1}]


@pytest.mark.parametrize(
    ("marks", "wanted", "config"),
    [
        ([0, 1, 0, 1], [0, 1, 0, 1], {"pipeline_interleave": True}),
        ([0, 1, 1, 0], [0, 1, 1, 0], {"pipeline_scheduler": "zero_bubble_v"}),
        ([0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], {"pipeline_interleave": True}),
        ([None, 1, None, 0], [0, 1, 1, 0], {"pipeline_scheduler": "zero_bubble_v"}),
    ],
)
def test_with_several_chunks_marks_name_stages(marks, wanted, config):
    loss, given = loss_of(marks), params(len(marks))
    step = stepped(loss, pipeline_config=config)
    assert placed(step, given, X, Y) == [{stage} for stage in wanted]
    if marks == [0, 1, 1, 0]:
        check_numbers(step, loss, given)


@pytest.mark.parametrize(("inside", "wanted"), [(True, 1), (False, 1), (None, 0)])
def test_a_mark_keeps_a_whole_loop_on_its_stage(inside, wanted):
    given = {**params(4), "stacked": jnp.stack(list(params(6).values()))}
    body = spmdctx.pipeline_stage(layer, 1) if inside else layer

    def loop(stacked, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, stacked)[0]

    loop = spmdctx.pipeline_stage(loop, 1) if inside is False else loop

    def loss(params, x, y):
        x = layer(params["w0"], x)
        x = layer(params["w3"], loop(params["stacked"], layer(params["w1"], x)))
        return jnp.mean((layer(params["w2"], x) - y) ** 2)

    stages = placed(stepped(loss), given, X, Y)
    assert (stages[0] == {1}) == (wanted == 1)
    assert stages[1:3] == [{0}, {0}] or wanted == 0


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_step(model, optimizer, x, y):
    loss, gradient = spmdctx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


@pytest.mark.parametrize("by_attribute", [True, False])
def test_a_module_of_nnx_is_marked_by_its_attribute(by_attribute):
    call, model = Layer.__call__, Net(nnx.Rngs(0))
    for number in (1, 2, 3):
        if by_attribute:
            model.layers[number].pipeline_stage = 1
        else:
            assert spmdctx.pipeline_stage(model.layers[number], 1) is model.layers[number]
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    step = spmdctx.parallel(nnx_step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=4)
    if by_attribute:
        want = float(jnp.mean((model(X) - Y) ** 2))
        assert float(step(model, optimizer, X, Y)) == pytest.approx(want, rel=1e-5)
        leaves = [jax.tree.map(lambda leaf: leaf.sharding, nnx.state(layer, nnx.Param)) for layer in model.layers]
        assert [stages_of(own) for own in leaves] == [[{0}] * 2, *[[{1}] * 2] * 3]
    else:
        assert len(step.plan(model, optimizer, X, Y).stages) == 2
    assert Layer.__call__ is call
    sources = {source.split(":")[0] for chunk in step.plan(model, optimizer, X, Y).chunk_reasons for source in chunk.sources if source}
    assert sources == {"test_marks.py"}


@pytest.mark.parametrize("in_setup", [True, False])
def test_a_module_of_linen_is_marked_wherever_it_is_made(in_setup):
    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(4):
                x = jnp.tanh(spmdctx.pipeline_stage(nn.Dense(WIDTH), min(number, 1))(x))
            return x

    class Setup(nn.Module):
        def setup(self):
            self.denses = [spmdctx.pipeline_stage(nn.Dense(WIDTH), min(number, 1)) for number in range(4)]

        def __call__(self, x):
            for dense in self.denses:
                x = jnp.tanh(dense(x))
            return x

    net = Setup() if in_setup else Compact()
    given = net.init(jax.random.key(0), X)["params"]
    assert sorted(given) == sorted((f"denses_{number}" if in_setup else f"Dense_{number}") for number in range(4))

    def loss(params, x, y):
        return jnp.mean((net.apply({"params": params}, x) - y) ** 2)

    assert placed(stepped(loss), given, X, Y) == [{0}] * 2 + [{1}] * 6


@pytest.mark.parametrize("marks", [[1, 0, None, None], [0, 1, None, 0], [1, None, None, 0]])
def test_a_hop_backwards_is_refused_with_both_source_lines(marks):
    with pytest.raises(StrategyError, match=r"(?s)hop backwards.*stage 1 at \S*test_marks\.py:\d+.*then stage 0 at \S*test_marks\.py:\d+"):
        stepped(loss_of(marks)).plan(params(4), X, Y)


def test_marks_beyond_the_stages_or_without_room_are_refused():
    with pytest.raises(StrategyError, match=r"(?s)marked for stage 2.*test_marks\.py.*from 0 to 1"):
        stepped(loss_of([0, 2, None, None])).plan(params(4), X, Y)
    with pytest.raises(StrategyError, match=r"(?s)leave nothing to chunks 1, 2"):
        stepped(loss_of([0, 0, 3, 3]), stages=4).plan(params(4), X, Y)

    def both(x, own):
        return spmdctx.pipeline_stage(layer, 1)(own[1], spmdctx.pipeline_stage(layer, 0)(own[0], x)), None

    def loss(params, x, y):
        stacked = tuple(jnp.stack([params[name] for name in names]) for names in (("w0", "w1"), ("w2", "w3")))
        return jnp.mean((jax.lax.scan(both, x, stacked)[0] - y) ** 2)

    with pytest.raises(StrategyError, match=r"(?s)One equation.*stages 0, 1.*test_marks\.py"):
        stepped(loss).plan(params(4), X, Y)


@pytest.mark.parametrize("stage", [True, -1, 1.0, "1", None])
def test_a_mark_is_a_whole_number(stage):
    with pytest.raises(ContextError, match="stage of a pipeline"):
        spmdctx.pipeline_stage(layer, stage)
    model = Net(nnx.Rngs(0))
    model.layers[1].pipeline_stage = stage
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ContextError, match=r"Layer\.pipeline_stage"):
        spmdctx.parallel(nnx_step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=4).plan(model, optimizer, X, Y)


@pytest.mark.parametrize("what", [Layer, nn.Dense, 3, [layer], nnx.List([])])
def test_what_cannot_be_called_has_no_mark(what):
    with pytest.raises(ContextError, match="functions and modules"):
        spmdctx.pipeline_stage(what, 0)


def test_marks_without_a_pipeline_are_noted_and_change_nothing():
    plain, marked = stepped(loss_of([None] * 4), 1), stepped(loss_of([0, 1, None, 2]), 1)
    given = params(4)
    with pytest.warns(ContextWarning, match=r"pipeline_stage have no effect: pipeline_stages is 1"):
        marked(given, X, Y)
    assert any("pipeline_stage have no effect" in note for note in marked.plan(given, X, Y).notes)
    assert marked.lower(given, X, Y).as_text() == plain.lower(given, X, Y).as_text()
    model = Net(nnx.Rngs(0))
    model.layers[1].pipeline_stage = 1
    step = spmdctx.parallel(nnx_step, parallel_mode="auto_parallel")
    plan = step.plan(model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), X, Y)
    assert any("pipeline_stage have no effect" in note for note in plan.notes)


def test_marks_leave_no_trace_in_the_programs_of_a_pipeline():
    step = stepped(loss_of([0, 0, 1, 1]))
    plan = step.plan(params(4), X, Y)
    texts = [str(task) for stage in plan.stages for task in stage.tasks.values()]
    assert not any("spmdctx_pipeline_stage" in text for text in texts)
    entry = step._entry_of((params(4), X, Y), {})
    stacks = {
        str(eqn.source_info.name_stack)
        for chunk in entry.pipeline.planned
        for task in chunk.tasks.values()
        for eqn in task.program.jaxpr.eqns
    }
    assert not any("spmdctx_pipeline_stage" in stack for stack in stacks)

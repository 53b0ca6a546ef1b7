"""The passes of all chunks, run one after the other, give the loss and its gradient."""

from functools import partial

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.programs.split import split_backward
from tests.pipeline import losses
from tests.pipeline.cut.test_chunks import cut_line


def call(program, held):
    made = jexc.jaxpr_as_fun(program.jaxpr)(*(held[slot] for slot in program.inputs))
    held.update(zip(program.outputs, made, strict=True))


def passes_of(fn, params, batch, num_chunks):
    """The chunks of a loss, its flat arguments, and the passes of each chunk."""
    chunks, leaves, still = cut_line(fn, params, batch, num_chunks)
    differentiated = frozenset(range(len(jax.tree.leaves(params))))
    return chunks, leaves, [Passes(chunk, differentiated, 0, still) for chunk in chunks]


def gradient_of(fn, params, batch, num_chunks, *, split):
    """The loss and its gradient by leaf, computed by the passes of chunks."""
    chunks, leaves, passes = passes_of(fn, params, batch, num_chunks)
    held = [{Slot(Holds.LEAF, index): leaves[index] for index in chunk.leaves} for chunk in chunks]
    for number, own in enumerate(passes):
        call(own.forward, held[number])
        if number + 1 < len(passes):
            held[number + 1].update(handed(held[number], Holds.LEAVING, Holds.ENTERING))
    value = held[-1][Slot(Holds.RESULT, 0)]
    total = {}
    for number, own in reversed([*enumerate(passes)]):
        held[number].update({Slot(Holds.SUM, leaf): jnp.zeros(own.sum_of(leaf).shape, own.sum_of(leaf).dtype) for leaf in own.weights})
        for program in split_backward(own.backward) if split else [own.backward]:
            call(program, held[number])
        if number:
            held[number - 1].update(handed(held[number], Holds.OF_ENTERING, Holds.OF_LEAVING))
        for leaf in own.weights:
            total[leaf] = total.get(leaf, 0) + held[number][Slot(Holds.SUM, leaf)]
    return value, [total[leaf] for leaf in sorted(total)]


def handed(held, source, target):
    return {Slot(target, slot.number): value for slot, value in held.items() if slot.holds is source}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("num_chunks", "tied", "remat"), [(1, True, False), (2, False, True), (4, True, False), (4, True, True)])
def test_passes_give_the_loss_and_its_gradient(num_chunks, tied, remat, split):
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), 4, tied=tied), losses.batch(jax.random.key(1), 4)
        fn = partial(losses.loss, remat=remat)
        value, gradient = gradient_of(fn, params, batch, num_chunks, split=split)
        want, wanted = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert float(value) == pytest.approx(float(want), abs=1e-12)
    for one, other in zip(gradient, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_whole_numbers_cross_without_a_cotangent():
    def fn(params, batch):
        x, count = batch[0], jnp.zeros((), jnp.int32)
        for own in params:
            x = jnp.tanh(x @ own)
            count = count + (x > 0).sum(dtype=jnp.int32)
        return jnp.mean(x**2) * jnp.where(count > 3, 1.0, 2.0)

    params, batch = [jnp.eye(8) * 0.5 + 0.1] * 4, (jnp.ones((4, 8)),)
    value, gradient = gradient_of(fn, params, batch, 2, split=False)
    want, wanted = jax.value_and_grad(fn)(params, batch)
    assert float(value) == pytest.approx(float(want))
    for one, other in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_checkpointed_chunk_keeps_its_input_alone():
    params, batch = losses.decoder(jax.random.key(0), 8, tied=False), losses.batch(jax.random.key(1), 4)
    kept = [len(own.kept) for own in passes_of(partial(losses.loss, remat=True), params, batch, 4)[2]]
    plain = [len(own.kept) for own in passes_of(losses.loss, params, batch, 4)[2]]
    assert kept[1] <= 2
    assert plain[1] > 10


def test_the_parts_of_a_backward_pass_compute_nothing_twice():
    params, batch = losses.decoder(jax.random.key(0), 4), losses.batch(jax.random.key(1), 4)
    backward = passes_of(losses.loss, params, batch, 4)[2][1].backward
    first, second = split_backward(backward)
    products = [sum(eqn.primitive.name == "dot_general" for eqn in one.jaxpr.jaxpr.eqns) for one in (first, second)]
    assert products[0] >= products[1] > 0
    assert not {id(eqn) for eqn in first.jaxpr.jaxpr.eqns} & {id(eqn) for eqn in second.jaxpr.jaxpr.eqns}


def halted(x):
    return jax.lax.while_loop(lambda own: jnp.sum(own) < 4.0, lambda own: own * 1.5 + 0.1, jax.lax.stop_gradient(jnp.abs(x)))


def answered(x):
    """JAX may call back from a thread that knows nothing of `enable_x64`, with float32."""

    def call(own):
        return np.where(np.asarray(own) > 0, 0.75, 0.25)

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x), vmap_method="sequential")


def chosen(x):
    return jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1], dtype=x.dtype)


@pytest.mark.parametrize("num_chunks", [2, 3, 5])
@pytest.mark.parametrize("still", [halted, answered, chosen])
def test_no_cotangent_is_sent_for_what_has_no_tangent(still, num_chunks):
    """What follows a stop_gradient may have no derivative, wherever the cut lies."""

    def fn(params, batch):
        x = batch
        for own in params:
            x = jnp.tanh(x @ own) * still(x)
        return jnp.mean(x * x)

    with jax.enable_x64(True):
        params, batch = [0.5 * jax.random.normal(jax.random.key(one), (8, 8)) for one in range(5)], jnp.ones((4, 8)) / 3
        value, gradient = gradient_of(fn, params, batch, num_chunks, split=False)
        want, wanted = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert float(value) == pytest.approx(float(want), abs=1e-12)
    for one, other in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_what_leads_to_aux_results_alone_has_no_cotangent_and_keeps_nothing(num_chunks):
    def fn(params, batch, *, with_aux=True):
        x, seen = batch, jnp.zeros(8)
        for own in params:
            x = jnp.tanh(x @ own)
            seen = seen + jnp.sin(x).sum(0) if with_aux else seen
        return jnp.mean(x * x), seen / len(params)

    with jax.enable_x64(True):
        params, batch = [0.5 * jax.random.normal(jax.random.key(one), (8, 8)) for one in range(6)], jnp.ones((4, 8)) / 3
        value, gradient = gradient_of(fn, params, batch, num_chunks, split=False)
        (want, _), wanted = jax.jit(jax.value_and_grad(fn, has_aux=True))(params, batch)
        passes, plain = (passes_of(partial(fn, with_aux=own), params, batch, num_chunks)[2] for own in (True, False))
    assert float(value) == pytest.approx(float(want), abs=1e-12)
    for one, other in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    sent = [[slot.holds for slot in own.backward.inputs].count(Holds.OF_LEAVING) for own in passes]
    assert sent == [1] * (num_chunks - 1) + [0]
    assert [len(own.kept) for own in passes] == [len(own.kept) for own in plain]
    assert not any(eqn.primitive.name == "cos" for own in passes for eqn in own.backward.jaxpr.jaxpr.eqns)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_a_chunk_keeps_nothing_that_its_backward_pass_does_not_read(stacked, remat):
    params, batch = losses.decoder(jax.random.key(0), 4, stacked=stacked), losses.batch(jax.random.key(1), 4)
    for own in passes_of(partial(losses.loss, remat=remat), params, batch, 2)[2]:
        kept = [slot for slot in own.forward.outputs if slot.holds is Holds.KEPT]
        assert kept == [slot for slot in own.backward.inputs if slot.holds is Holds.KEPT]
        body = own.backward.jaxpr.jaxpr
        read = {var for eqn in needed(body.eqns, variables(body.outvars)) for var in variables(eqn.invars)}
        assert {var for slot, var in zip(own.backward.inputs, body.invars, strict=True) if slot.holds is Holds.KEPT} <= read


def test_residuals_of_dead_equations_are_not_kept():
    """The power's exponent is constant, so that nothing reads what its derivative would need."""

    @jax.custom_vjp
    def twice(x):
        return 2.0 * x

    twice.defvjp(lambda x: (2.0 * x, (jnp.sin(x), jnp.cos(x))), lambda kept, g: (2.0 * g + 0.0 * jnp.zeros_like(kept[0]),))

    def fn(params, batch):
        x = batch
        for own in params:
            x = twice(x @ own)
        return jnp.mean(x * x)

    params, batch = [jnp.eye(8) * 0.5 + 0.1] * 4, jnp.ones((4, 8))
    value, gradient = gradient_of(fn, params, batch, 2, split=False)
    want, wanted = jax.value_and_grad(fn)(params, batch)
    assert float(value) == pytest.approx(float(want))
    for one, other in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    # A product's own operand alone is left, and the weights are there.
    assert [len(own.kept) for own in passes_of(fn, params, batch, 2)[2]] == [1, 2]

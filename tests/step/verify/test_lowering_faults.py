"""Faults planted into the lowering itself: what it writes for the right step is changed, and `verify` finds it."""

import functools
from dataclasses import replace

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.gradients import micro_batches, replicas
from spmdctx.lowering import compile as lowering
from spmdctx.lowering.rewrite import local_ops, loop_sums
from spmdctx.machine.presets import PRESETS
from spmdctx.step.entry import Entry
from spmdctx.trace.build.jaxprs.equations import written
from tests.step.verify.mutations import after, dropped, mutated, rolled, twice, with_params, without_first_shard

FREE = replace(PRESETS["cpu"], device="slow devices with fast links", peak_flops_per_s=1e8, memory_bytes_per_s=1e8, latency_s=1e-9)
FREELY = {"parallel_mode": "auto_parallel", "topology": FREE, "dataset_strategy": "data_parallel"}
LOCALLY = {"parallel_mode": "data_parallel", "gradients_mean": True}


def numbers(*shape, seed=0, size=1.0):
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def trained(loss, params, *batch):
    value, gradients = spmdctx.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, gradients), value


def perceptron(params, x, y):
    """Two layers of one shape, whose gradients are reduced in one bucket."""
    return trained(lambda p, x, y: jnp.mean((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] - y) ** 2), params, x, y)


def drawing(params, x, y, key):
    """A loss that draws random numbers."""

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        return jnp.mean((jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0) @ params["down"] - y) ** 2)

    return trained(loss, params, x, y)


def grouped(params, x):
    """A grouped convolution over rows that are padded on one side, as a causal one is."""

    def loss(params, x):
        hidden = jax.lax.conv_general_dilated(
            jnp.pad(x, ((0, 0), (2, 0), (0, 0))),
            params["kernel"],
            (1,),
            [(0, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=4,
        )
        return jnp.mean(jnp.tanh(hidden).mean(1) @ params["out"] ** 2)

    return trained(loss, params, x)


def recurrent(params, x):
    """A state that a loop carries."""

    def loss(params, x):
        def iteration(state, row):
            state = jnp.tanh(state @ params["own"] + row @ params["in"])
            return state, state.mean()

        state, means = jax.lax.scan(iteration, jnp.zeros((x.shape[0], 16)), x.swapaxes(0, 1))
        return jnp.mean(state**2) + means[0]

    return trained(loss, params, x)


def manual(params, x):
    """A product whose sum the user writes, over one of two axes."""

    def product(x, w):
        mapped = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "model"),
            mesh=spmdctx.get_mesh(),
            in_specs=(jax.P("data", "model"), jax.P("model")),
            out_specs=jax.P("data"),
            check_vma=False,
        )
        return mapped(x, w)

    value, gradients = jax.value_and_grad(lambda params: jnp.mean(jnp.tanh(product(x, params["up"])) ** 2))(params)
    return jax.tree.map(lambda param, gradient: param - gradient, params, gradients), value


LAYERS = {"up": numbers(16, 16, size=0.3), "bias": np.zeros(16, np.float32), "down": numbers(16, 16, seed=1, size=0.3)}
ROWS = numbers(32, 16, seed=2), numbers(32, 16, seed=3)

PROGRAMS = {
    "local": (perceptron, LOCALLY, (LAYERS, *ROWS)),
    "local micro-batches": (perceptron, {**LOCALLY, "grad_accumulation_step": 2}, (LAYERS, *ROWS)),
    "drawing": (drawing, LOCALLY, (LAYERS, *ROWS, jax.random.key(0))),
    "micro-batches": (perceptron, {**FREELY, "grad_accumulation_step": 2}, (LAYERS, *ROWS)),
    "grouped": (grouped, FREELY, ({"kernel": numbers(3, 2, 16, size=0.3), "out": numbers(16, 4, seed=1)}, numbers(16, 8, 8, seed=2))),
    "manual": (manual, {"parallel_mode": "hybrid_parallel", "mesh": {"data": 2, "model": 4}}, ({"up": LAYERS["up"]}, ROWS[0])),
    "recurrent": (recurrent, FREELY, ({"own": numbers(16, 16, size=0.3), "in": numbers(8, 16, seed=1)}, numbers(16, 4, 8, seed=2))),
}


@functools.cache
def right(program):
    fn, options, args = PROGRAMS[program]
    return spmdctx.parallel(fn, **options), args


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_that_is_lowered_rightly_is_the_same(program):
    step, args = right(program)
    report = step.verify(*args)
    assert report.ok, report


def is_found(monkeypatch, program):
    """Whether `verify` of the right step finds the results of one that is lowered now, with a fault."""
    fn, options, args = PROGRAMS[program]
    results = jax.tree.leaves(spmdctx.parallel(fn, **options)(*args))
    step, _ = right(program)
    step.plan(*args)
    monkeypatch.setattr(Entry, "execute", lambda *_: results)
    return not step.verify(*args).ok


def again(eqn):
    _, number = eqn.invars
    (result,) = eqn.outvars
    between = jexc.Var(result.aval)
    return [eqn.replace(outvars=[between]), eqn.replace(invars=[between, number])]


def halves(_):
    return ((0, 1, 2, 3), (4, 5, 6, 7))


def swapped(config):
    return tuple((high, low, inside) for low, high, inside in config)


def moved_by_one(_):
    return ((1, -1),)


@pytest.mark.parametrize(
    ("program", "primitive", "change", "number"),
    [
        pytest.param("local", "psum", dropped, 0, id="gradients are not summed over devices"),
        pytest.param("local", "psum", twice, 0, id="gradients are summed twice"),
        pytest.param("local", "psum", dropped, 1, id="the loss is not averaged over devices"),
        pytest.param("local", "psum", with_params(axis_index_groups=halves), 0, id="gradients are summed over half of the devices"),
        pytest.param("drawing", "axis_index", after(lambda place: place * 0), 0, id="all devices fold one number into their key"),
        pytest.param("drawing", "random_fold_in", again, 0, id="a number is folded twice"),
        pytest.param("micro-batches", "sharding_constraint", after(without_first_shard), 0, id="a constraint loses a shard of a weight"),
        pytest.param("micro-batches", "sharding_constraint", after(rolled), 1, id="shards of an operand go to the next devices"),
        pytest.param("micro-batches", "scan", with_params(length=lambda _: 1), 0, id="a loop ends too early"),
        pytest.param("manual", "psum", with_params(axes=lambda _: ("data",)), 0, id="a sum is over the wrong axis"),
        pytest.param("grouped", "pad", with_params(padding_config=swapped), 0, id="rows are padded on the other side"),
        pytest.param("grouped", "conv_general_dilated", with_params(padding=moved_by_one), 0, id="a halo comes from the other side"),
        pytest.param("recurrent", "scan", with_params(reverse=lambda reverse: not reverse), 0, id="a loop runs backwards"),
        pytest.param("recurrent", "scan", with_params(reverse=lambda reverse: not reverse), 1, id="a loop's gradient runs forwards"),
    ],
)
def test_a_fault_in_a_lowered_program_is_found(monkeypatch, program, primitive, change, number):
    constrain = lowering.constrain
    monkeypatch.setattr(lowering, "constrain", lambda *given: mutated(constrain(*given), primitive, change, number))
    assert is_found(monkeypatch, program)


def unreduced(reduced, gradients, options):
    return [gradients[0] / options.num_replicas, *reduced[1:]]


def exchanged(reduced, gradients, options):
    return [reduced[2] if value.shape == reduced[2].shape and index != 2 else value for index, value in enumerate(reduced)]


def rounded(reduced, gradients, options):
    return [value.astype(jnp.bfloat16).astype(value.dtype) for value in reduced]


@pytest.mark.parametrize("program", ["local", "local micro-batches"])
@pytest.mark.parametrize("change", [unreduced, exchanged, rounded])
def test_a_fault_in_the_reduction_of_one_gradient_is_found(monkeypatch, program, change):
    reduce = replicas.reduce_gradients

    def wrong(gradients, dtypes, scatter_dims, order, options):
        return change(reduce(gradients, dtypes, scatter_dims, order, options), gradients, options)

    monkeypatch.setattr(replicas, "reduce_gradients", wrong)
    assert is_found(monkeypatch, program)


@pytest.mark.parametrize("program", ["local micro-batches", "micro-batches"])
def test_a_wrong_slice_of_the_batch_is_found(monkeypatch, program):
    parted = micro_batches._parted
    monkeypatch.setattr(micro_batches, "_parted", lambda x, dim, count: parted(x, dim, count).at[1].set(parted(x, dim, count)[0]))
    assert is_found(monkeypatch, program)


def test_a_loop_sum_that_is_not_reduced_is_found(monkeypatch):
    def first(var, source_info):
        eqns, (result,) = written(lambda value: value[0], [var], source_info)
        return eqns, result

    monkeypatch.setattr(loop_sums, "complete", first)
    assert is_found(monkeypatch, "micro-batches")


def test_a_local_sum_that_is_not_reduced_is_found(monkeypatch):
    monkeypatch.setattr(local_ops, "partial_axes", lambda rule, axes: ())
    assert is_found(monkeypatch, "grouped")

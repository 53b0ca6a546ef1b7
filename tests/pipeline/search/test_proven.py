"""Bounds that are proven: no cut of any loss multiplies less, no split of an op takes less, and no plan is below them."""

import itertools
import random
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cost.roofline import least_device_s, least_matrix_s, sliced_time_s
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import topology
from spmdctx.pipeline.programs.split import split_backward
from spmdctx.pipeline.search.proven import least_of_all_s, least_of_cuts_s, least_work
from spmdctx.pipeline.stages.staging import cut_loss
from spmdctx.trace.build.build import Argument, build
from tests.pipeline import losses

MACHINE = topology("h100")
WIDTH, ROWS = 8, 16


def half(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def plain(params, batch):
    x = batch
    for own in params:
        x = x + half(own, x)
    return jnp.mean(x**2)


def with_regions(params, batch, **options):
    """Each region ends with a product that is not recomputed, or begins with one that a cut keeps."""
    x = batch
    for number, own in enumerate(params):
        x = jax.checkpoint(lambda own, x, end=number % 2: jnp.sin(half(own, x)) @ own["up"] @ own["down"] + end * x, **options)(own, x)
    return jnp.mean(x**2)


def frozen(params, batch):
    x = batch
    for number, own in enumerate(params):
        own = jax.lax.stop_gradient(own) if number != 1 else own
        x = jax.checkpoint(lambda own, x: x + half(own, x))(own, x)
    return jnp.mean(x**2)


def merged(params, batch):
    """Products of weights alone, and of numbers alone."""
    x, table = batch, jnp.ones((WIDTH, 3)) @ jnp.ones((3, WIDTH))
    for own in params:
        x = x + jnp.tanh(x @ (own["up"] @ own["down"])) * (x @ table)
    return jnp.mean(x**2)


def scanned(params, batch, *, remat=False):
    def body(x, own):
        return x + half(own, x) @ (fixed["up"] @ fixed["down"]), x @ own["up"]

    fixed, stack = params[0], jax.tree.map(lambda *own: jnp.stack(own), *params)
    x, rows = jax.lax.scan(jax.checkpoint(body) if remat else body, batch, stack)
    return jnp.mean(x**2) + jnp.mean(rows)


@jax.custom_vjp
def _steep(x, weight):
    return x @ weight


_steep.defvjp(lambda x, weight: (x @ weight, (x, weight)), lambda kept, back: (2 * back @ kept[1].T, jnp.zeros_like(kept[1])))


def custom(params, batch):
    x = batch
    for own in params:
        x = jax.lax.cond(
            jnp.sum(x) > 0, lambda x, own: _steep(x, own["up"]) @ own["down"], lambda x, own: x @ own["up"] @ own["down"], x, own
        )
    return jnp.mean(x**2)


def shared(params, batch):
    """One weight is read by all layers, and a product is written twice."""
    x, own = batch, params[0]
    for _ in range(3):
        x = x + half(own, x) + jnp.tanh(x @ own["up"]) @ own["down"]
    return jnp.mean(x**2)


def beside(params, batch):
    """What the loss gives beside its value passes products of its own, for which nothing is sent back."""
    x, y = batch, batch
    for own in params:
        x, y = x + half(own, x), half(own, y) + x
    return jnp.mean(x**2), jnp.mean(y)


LOSSES = {
    "plain": plain,
    "regions": with_regions,
    "saved": partial(with_regions, policy=jax.checkpoint_policies.dots_saveable),
    "frozen": frozen,
    "merged": merged,
    "scanned": scanned,
    "scanned regions": partial(scanned, remat=True),
    "custom": custom,
    "shared": shared,
    "beside": beside,
}


def params_of(num_layers=3):
    return [{"up": jnp.ones((WIDTH, 2 * WIDTH)), "down": jnp.ones((2 * WIDTH, WIDTH))} for _ in range(num_layers)]


def loss_of(fn, params, batch, num_micro=2, *, has_aux=False):
    def step(params, batch):
        return spmdctx.value_and_grad(spmdctx.PipelineCell(fn, micro_size=num_micro), has_aux=has_aux)(params, batch)

    run = spmdctx.parallel(step, parallel_mode="auto_parallel", device_num=4, topology=MACHINE, pipeline_stages=2)
    entry = run._entry_of(jax.eval_shape(lambda: (params, batch)), {})
    return cut_loss(entry._step, entry.environment.settings)


def products_s(jaxpr):
    """The seconds of one device for the products of a program."""
    program = build(jaxpr, [Argument("", Role.ARGUMENT)] * len(jaxpr.jaxpr.invars))
    ops = [op for op in program.graph.ops if not program.from_literals.issuperset(op.results)]
    return sum(op.repeats * least_matrix_s(program.graph, op, MACHINE) for op in ops)


def cuts_of(loss, draw):
    """All cuts into two chunks, or some of very many, and some cuts into more."""
    places = range(len(loss.line.eqns) - 1)
    two = [(place,) for place in places]
    more = [tuple(sorted(draw.sample(places, count))) for count in (2, 3) if count <= len(places) for _ in range(2)]
    return [*(two if len(two) < 12 else draw.sample(two, 12)), *more]


@pytest.mark.parametrize("name", LOSSES)
def test_no_cut_multiplies_less_than_is_proven(name):
    loss = loss_of(LOSSES[name], params_of(), jnp.ones((ROWS, WIDTH)), has_aux=name == "beside")
    work, tight = least_work(loss, MACHINE), []
    assert work.device_s > 0
    for places in cuts_of(loss, random.Random(name)):
        passes = loss.divided(places).passes
        whole = sum(products_s(program.jaxpr) for own in passes for program in (own.forward, own.backward))
        parts = sum(products_s(program.jaxpr) for own in passes for program in (own.forward, *split_backward(own.backward)))
        least = work.in_chunks(len(places) + 1)
        assert min(whole, parts) >= least * (1 - 1e-9), places
        tight.append(whole / least)
    # A cut does not see that two values that are kept are equal, nor that zeros are sent back.
    assert min(tight) <= (1.6 if name in ("shared", "beside") else 1.3)


@pytest.mark.parametrize(("tied", "stacked", "remat"), [(True, False, True), (False, True, True), (False, False, False)])
def test_decoders_multiply_what_is_proven(tied, stacked, remat):
    params = losses.decoder(jax.random.key(0), 4, tied=tied, stacked=stacked)
    loss = loss_of(partial(losses.loss, remat=remat), params, losses.batch(jax.random.key(1), 4))
    work, draw = least_work(loss, MACHINE), random.Random(1)
    for places in draw.sample(range(len(loss.line.eqns) - 1), 3):
        found = sum(products_s(program.jaxpr) for own in loss.divided((places,)).passes for program in (own.forward, own.backward))
        assert work.in_chunks(2) * (1 - 1e-9) <= found <= work.device_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["tpu-v5p", "h100"])
def test_no_split_of_an_op_takes_less_than_its_part(name):
    machine, params = topology(name), losses.decoder(jax.random.key(0), 1, times=4)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(partial(losses.loss, remat=True)))(params, losses.batch(jax.random.key(1), 6, 10))
    graph = build(jaxpr, [Argument("", Role.ARGUMENT)] * len(jaxpr.jaxpr.invars)).graph
    for op in dict(zip(graph.kinds, graph.ops, strict=True)).values():
        least = least_device_s(graph, op, machine)
        assert least <= sliced_time_s(graph, op, [1] * len(op.rule.sizes), machine) * (1 + 1e-9)
        for factors in itertools.combinations(range(len(op.rule.sizes)), min(2, len(op.rule.sizes))):
            for ways in itertools.product((1, 2, 3, 4, 8), repeat=len(factors)):
                slices = [dict(zip(factors, ways, strict=True)).get(factor, 1) for factor in range(len(op.rule.sizes))]
                count = 1
                for own in slices:
                    count *= own
                assert sliced_time_s(graph, op, slices, machine) * count >= least * (1 - 1e-9), (op.primitive, slices)


SCHEDULERS = [
    {},
    {"pipeline_scheduler": "gpipe"},
    {"pipeline_scheduler": "zero_bubble_h1"},
    {"pipeline_scheduler": "zero_bubble_v"},
    {"pipeline_interleave": True},
]


@pytest.mark.parametrize("config", SCHEDULERS)
def test_plans_are_above_their_bounds(config):
    def step(params, batch):
        return spmdctx.value_and_grad(spmdctx.PipelineCell(with_regions, micro_size=4))(params, batch)

    shapes = jax.eval_shape(lambda: (params_of(4), jnp.ones((4 * ROWS, WIDTH))))
    options = {"pipeline_config": config} if config else {}
    run = spmdctx.parallel(step, parallel_mode="auto_parallel", device_num=4, topology=MACHINE, pipeline_stages=2, **options)
    entry = run._entry_of(shapes, {})
    pipeline, settings = entry.pipeline, entry.environment.settings
    work = least_work(cut_loss(entry._step, settings), MACHINE)
    bounds, schedule = pipeline.bounds, pipeline.schedule
    assert bounds.cuts_s == least_of_cuts_s(work, schedule, 4)
    assert 0 < least_of_all_s(work, 4, 4, None, settings) <= bounds.cuts_s <= bounds.chunks_s <= pipeline.simulation.makespan_s
    (note,) = (note for note in run.plan(*shapes).notes if note.startswith("Proven"))
    assert ("in two parts" if schedule.splits_backward else "in one part") in note

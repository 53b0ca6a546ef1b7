"""Gradients in buckets by index: the operands of every compiled all-reduce are those of one bucket."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.audit import audit_program
from spmdctx.lowering.rewrite.buckets import Sum, separate_buckets
from spmdctx.lowering.rewrite.equations import variables
from spmdctx.machine.xla.collectives.ways import WAYS
from spmdctx.models import UNSPLIT, abstract_program
from tests.audit.compile_only import need_gpu, need_tpu
from tests.lowering.gradients import arguments, combined, step
from tests.zoo.llama import config

TARGETS = {"tpu": (need_tpu, "tpu-v5e"), "gpu": (need_gpu, "h100")}
INDEX = {
    "all_reduce_fusion_config": {"all_reduce_fusion_config": [3, 10]},
    "comm_fusion": {"comm_fusion": {"allreduce": {"mode": "index", "config": [3, 10]}}},
}


def reduced(compiled):
    """Of every all-reduce of a compiled program the elements of its operands, without scalars: the loss may ride along."""
    program = combined(compiled.as_text())
    assert {one.kind for one in program} == {"all_reduce"}
    sizes = [sorted(math.prod(shape) for shape in one.shapes if math.prod(shape) > 1) for one in program]
    return sorted(own for own in sizes if own)


def by_bucket(plan):
    """The elements of the parameters in each of the buckets [3, 10], in the order of gradients that the plan gives."""
    sizes = {leaf.path: math.prod(leaf.shape) for leaf in plan.inputs}
    own = [sizes[one.path] for one in plan.gradients]
    return sorted(sorted(part) for part in (own[:3], own[3:10], own[10:]))


def audit_of_twelve_in_buckets(backend, function, args):
    """Compiles a step of twelve gradients, which are reduced in the buckets [3, 10], and audits it."""
    need, topology = TARGETS[backend]
    parallel = spmdctx.parallel(
        function, parallel_mode="semi_auto_parallel", devices=need(), topology=topology, all_reduce_fusion_config=[3, 10]
    )
    plan = parallel.plan(*args)
    compiled = parallel.lower(*args).compile()
    assert len(plan.gradients) == 12
    assert reduced(compiled) == by_bucket(plan)
    return audit_program(plan, compiled, WAYS)


@pytest.mark.parametrize("option", INDEX)
@pytest.mark.parametrize("backend", TARGETS)
def test_twenty_gradients_are_reduced_in_exactly_the_three_buckets(backend, option):
    need, topology = TARGETS[backend]
    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", devices=need(), topology=topology, **INDEX[option])
    plan = parallel.plan(*arguments())
    assert [(one.path, one.bucket) for one in plan.gradients] == [(f"weights/{n}", (n >= 3) + (n >= 10)) for n in range(20)]
    compiled = parallel.lower(*arguments()).compile()
    assert reduced(compiled) == by_bucket(plan)
    report = audit_program(plan, compiled, WAYS)
    assert report.ok, str(report)


@pytest.mark.parametrize("backend", TARGETS)
def test_gradients_of_a_llama_step_with_remat_are_reduced_in_three_buckets(backend):
    function, args = abstract_program(
        replace(config(), num_layers=1, vocab_size=512, width=128, hidden=256, num_heads=4, num_kv_heads=4, max_seq=64), 16, split=UNSPLIT
    )
    report = audit_of_twelve_in_buckets(backend, function, args)
    assert report.ok, str(report)


@pytest.mark.parametrize("backend", TARGETS)
def test_gradients_of_layers_in_a_scan_are_reduced_with_their_bucket_after_it(backend):
    sizes = {"vocab_size": 512, "width": 128, "hidden": 256, "num_heads": 4, "num_kv_heads": 4, "max_seq": 64}
    function, args = abstract_program(replace(config(scan_layers=True), num_layers=3, **sizes), 16, split=UNSPLIT)
    report = audit_of_twelve_in_buckets(backend, function, args)
    assert (report.found_share, report.unplanned_share) == (1, 0)


def test_gradients_that_a_loop_reduces_in_each_turn_are_named():
    """The loop's next iteration reads the update."""

    def looped(weight, x):
        def turn(weight, part):
            return weight - jax.grad(lambda own: jnp.mean((part @ own) ** 2))(weight), None

        return jax.lax.scan(turn, weight, jnp.swapaxes(x.reshape(32, 4, 16), 0, 1))[0]

    parallel = spmdctx.parallel(looped, parallel_mode="semi_auto_parallel", devices=need_tpu(), all_reduce_fusion_config=[1])
    with pytest.warns(spmdctx.ContextWarning, match="A loop reduces these gradients in each of its turns, .* 'weight'"):
        parallel.plan(jnp.ones((16, 16)), jnp.ones((128, 16)))


def test_buckets_change_no_numbers_and_the_plan_says_which_gradient_is_in_which():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(8, 16)).astype(np.float32) / 4 for _ in range(6)]
    batch = rng.normal(size=(16, 16)).astype(np.float32)
    whole = spmdctx.parallel(step, parallel_mode="data_parallel")
    parallel = whole.with_options(all_reduce_fusion_config=[2, 4])
    with pytest.warns(spmdctx.ContextWarning, match="the CPU compiler drops what keeps them apart"):
        plan = parallel.plan(weights, batch)
    assert any("CPU compiler" in note for note in plan.notes)
    for got, want in zip(jax.tree.leaves(parallel(weights, batch)), jax.tree.leaves(whole(weights, batch)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    causes = [row.cause for row in plan.collectives if row.cause.startswith("bucket")]
    assert sorted(causes) == [f"bucket {index // 2} of gradients: partial result of dot_general" for index in range(6)]
    assert [line.split()[-2:] for line in str(plan).splitlines() if "weights/" in line][-6:] == [[str(n), f"weights/{n}"] for n in range(6)]


@pytest.mark.parametrize("backend", TARGETS)
def test_regions_with_a_fusion_number_are_reduced_together_and_apart_from_the_rest(backend):
    """The products with the parameters 4 to 7 are one group, and the last one too; the other fifteen share what is left."""
    group = {4, 5, 6, 7, 19}

    def grouped(weights, x):
        def loss(weights):
            hidden = x
            for index, weight in enumerate(weights):
                product = spmdctx.shard(jnp.matmul, ((8, 1), (1, 1)), fusion=1 if index in group else None)
                hidden = jnp.tanh(product(hidden[:, : weight.shape[0]], weight))
            return jnp.mean(hidden**2)

        return [weight - 0.1 * one for weight, one in zip(weights, jax.grad(loss)(weights), strict=True)]

    need, topology = TARGETS[backend]
    parallel = spmdctx.parallel(grouped, parallel_mode="semi_auto_parallel", devices=need(), topology=topology)
    sizes = [math.prod(leaf.shape) for leaf in arguments()[0]]
    wanted = sorted(sorted(size for index, size in enumerate(sizes) if (index in group) == inside) for inside in (True, False))
    assert reduced(parallel.lower(*arguments()).compile()) == wanted


@pytest.mark.filterwarnings("ignore:By the plan the step takes")
def test_a_step_that_needs_compiler_options_cannot_run_inside_another_jit():
    devices = need_tpu()
    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", devices=devices, all_reduce_fusion_config=[3])
    with pytest.raises(spmdctx.UnsupportedError, match="needs compiler options"):
        jax.make_jaxpr(parallel)(*arguments())


def chained(first_weight, second_weight, x):
    """The second gradient is computed from the first."""
    first = x.sum(0) * first_weight
    return first, (first * second_weight).sum()


def test_buckets_that_depend_on_each_other_the_wrong_way_are_joined_and_named():
    jaxpr = jax.make_jaxpr(chained)(jnp.ones(4), jnp.ones(4), jnp.ones((8, 4))).jaxpr
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    separated = separate_buckets(jaxpr.eqns, jaxpr.outvars, [Sum(0, sums[0], jaxpr.outvars[0]), Sum(1, sums[1], jaxpr.outvars[1])])
    assert separated.joined == (0,)
    assert "optimization_barrier" not in {eqn.primitive.name for eqn in separated.eqns}


def test_a_bucket_waits_for_the_one_before_and_its_readers_for_the_barrier():
    jaxpr = jax.make_jaxpr(lambda a, b: (a.sum(0) * 2, b.sum(0) * 3))(jnp.ones((4, 3)), jnp.ones((4, 3))).jaxpr
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    separated = separate_buckets(jaxpr.eqns, jaxpr.outvars, [Sum(bucket, eqn, eqn.outvars[0]) for bucket, eqn in enumerate(sums)])
    names = [eqn.primitive.name for eqn in separated.eqns]
    assert names.index("optimization_barrier") < len(names) - 1
    (barrier,) = [eqn for eqn in separated.eqns if eqn.primitive.name == "optimization_barrier"]
    made = {var: place for place, eqn in enumerate(separated.eqns) for var in eqn.outvars}
    for place, eqn in enumerate(separated.eqns):
        assert all(made.get(var, -1) < place for var in variables(eqn))
    readers = [eqn for eqn in separated.eqns if not {*barrier.outvars}.isdisjoint(variables(eqn))]
    assert sorted(eqn.primitive.name for eqn in readers) == ["mul", "reduce_sum"]

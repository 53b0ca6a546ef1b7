"""The parallel optimizer inside of dynamic programming: the search keeps to it, and its bound is one of such plans."""

import jax
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.ir.domain import domain
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.problem.coupled import allowed_alone, allowed_pairs
from spmdctx.search.setup.request import Coupling
from tests.search.optimizer.test_parallel_optimizer import arguments, parallel, step_of

MESH = LogicalMesh.of({"data": 2, "model": 4})


def partners(how, sharding, shape=(16, 8)):
    """The shardings that go with one of a parameter."""
    known = domain(MESH, shape)
    numbers = np.arange(len(known))
    row = allowed_pairs(MESH, shape, numbers, numbers, Coupling(0, 1, 0, how))[known.number(sharding)]
    return [known.shardings[place] for place in np.flatnonzero(row == 0)]


@pytest.mark.parametrize(
    ("sharding", "wanted"),
    [
        (((), ()), (("data", "model"), ())),
        ((("model",), ()), (("model", "data"), ())),
        (((), ("model",)), (("data",), ("model",))),
        (((), ("data", "model")), ((), ("data", "model"))),
    ],
)
def test_state_is_split_as_its_parameter_and_over_all_other_axes(sharding, wanted):
    assert partners("further", sharding) == [wanted]


def test_what_does_not_divide_further_stays_as_its_parameter():
    assert partners("further", ((), ("model",)), (7, 8)) == [((), ("model",))]


def test_sums_that_are_not_split_use_no_axis_that_the_parameter_does_not():
    assert set(partners("within", ((), ("model",)))) == {((), ()), ((), ("model",)), (("model",), ())}
    assert partners("alike", ((), ("model",))) == [((), ("model",))]


def test_weights_that_are_split_too_use_all_axes():
    known = domain(MESH, (16, 8))
    free = np.flatnonzero(allowed_alone(MESH, (16, 8), np.arange(len(known)), 0) == 0)
    assert all(known.slices[place] == 8 for place in free)
    assert known.number((("data", "model"), ())) in free


def planned(level, rows=8192, config=None, **options):
    tx = optax.adamw(1e-2)
    params, state, *_ = arguments(tx)
    batch = [jax.ShapeDtypeStruct((rows, 128), np.float32)] * 2
    step = parallel(step_of(tx, spmdctx.value_and_grad), level, "dynamic_programming", config=config or {}, **options)
    return step, (params, state, *batch)


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_the_bound_is_that_of_plans_whose_state_is_split(level):
    step, args = planned(level, topology="tpu-v5e", dataset_strategy="data_parallel", device_num=8)
    plan = step.plan(*args)
    assert -1e-6 < plan.gap < 0.02
    used = {leaf.path: np.prod([plan.mesh[name] for names in leaf.sharding for name in names]) for leaf in plan.inputs}
    big = ("up", "down", "bias")
    assert {used[f"state/0/{moment}/{name}"] for moment in ("mu", "nu") for name in big} == {8}
    if level == "level3":
        assert {used[f"params/{name}"] for name in big} == {8}
    assert all(leaf.sharding == ((),) for leaf in plan.inputs if leaf.path.endswith("/odd"))
    assert [leaf.reason for leaf in plan.inputs if leaf.path == "state/0/mu/up"] == [
        "enable_parallel_optimizer splits it over the replicas"
    ]
    assert any("leaves whole" in note and "params/odd" in note for note in plan.notes)


@pytest.mark.parametrize("shards", [True, False])
def test_accumulators_of_a_searched_plan_are_split_where_asked(shards):
    config = {"gradient_accumulation_shard": shards}
    options = {"dataset_strategy": "data_parallel", "grad_accumulation_step": 4, "config": config}
    step, args = planned("level1", rows=65536, **options)
    report = step.audit(*args)
    assert report.ok, str(report)
    big = [row for row in step.plan(*args).collectives if row.kind in ("all_reduce", "reduce_scatter") and row.payload_bytes > 1024]
    assert {row.repeats for row in big} == {4 if shards else 1}


def test_no_optimizer_no_couplings():
    tx = optax.adamw(1e-2)
    whole = spmdctx.parallel(step_of(tx), parallel_mode="auto_parallel", search_mode="dynamic_programming", device_num=8)
    plan = whole.plan(*arguments(tx))
    assert all("enable_parallel_optimizer" not in leaf.reason for leaf in plan.inputs if leaf.role is not Role.BATCH)


def test_a_small_step_has_no_gap_either():
    step, args = planned("level1", rows=32, topology="tpu-v5e", device_num=8)
    assert step.plan(*args).gap < 1e-3

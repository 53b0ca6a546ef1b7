"""Whole training steps of the zoo: dynamic programming finds what trying everything finds, and all prices agree."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx import plan
from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import priced_directives
from spmdctx.cost.step import Step
from spmdctx.ir.analysis.loop_sums import holds_of, loop_sums
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.search.setup.request import Setup
from spmdctx.trace.build.build import Argument, build
from tests.oracles.exhaustive import exhaustive
from tests.trace.capture import capture
from tests.zoo import CASES, UNSPLIT

MODELS = ("mlp", "tied", "gnn", "moe", "lstm")
_STEPS: dict[str, Step] = {}


def _step(model: str) -> Step:
    """The model's step, traced once."""
    if model not in _STEPS:
        case = next(one for one in CASES if (one.name, one.flavor) == (model, "pytree"))
        fn, args = case.make(UNSPLIT, np.float32)
        captured = capture(fn, args)
        program = build(captured.jaxpr, [Argument(leaf.path, leaf.role) for leaf in captured.inputs], captured.carried)
        _STEPS[model] = Step(program.graph, program.scopes, program.from_literals, frozenset())
    return _STEPS[model]


def _machine(name: str) -> Topology:
    """A slow device with fast links, on which small models are worth splitting."""
    return replace(PRESETS[name], latency_s=1e-8, peak_flops_per_s=1e12, memory_bytes_per_s=1e11)


@pytest.mark.parametrize("machine", ["h100", "tpu-v5p", "cpu"])
@pytest.mark.parametrize("shape", [(2,), (4,)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_the_plan_of_a_training_step_is_the_cheapest_of_all(model: str, shape: tuple[int, ...], machine: str) -> None:
    step, mesh, topology = _step(model), LogicalMesh.of(shape), _machine(machine)
    found = Searcher(step, topology, DynamicOptions()).search(Setup(mesh))
    truth = exhaustive(step.graph, step.scopes, step.from_literals, mesh, topology)
    assert found.cost_s == pytest.approx(truth.cost_s, rel=1e-9)
    assert found.lower_bound_s <= truth.cost_s * (1 + 1e-9)


@pytest.mark.parametrize("machine", ["h100", "tpu-v5p", "cpu"])
@pytest.mark.parametrize("model", MODELS)
def test_search_evaluation_and_bill_have_one_number(model: str, machine: str) -> None:
    step, mesh, topology = _step(model), LogicalMesh.of((2, 4)), _machine(machine)
    found = Searcher(step, topology, DynamicOptions()).search(Setup(mesh))
    seconds = evaluate(step.graph, step.scopes, step.from_literals, found.assignment, mesh, topology).total_s
    holds = holds_of(step.graph, loop_sums(step.graph), found.assignment, mesh)
    directives = replace(priced_directives(Assigned(step, found.assignment, mesh, topology)), loop_sums=holds)
    bill = price(step, found.assignment, mesh, topology, directives)
    assert seconds == pytest.approx(found.cost_s, rel=1e-9)
    # The bill moves values straight to where they are read; the search may price a stop on the way.
    assert found.cost_s * (1 - 5e-3) <= bill.compute_s + bill.exposed_communication_s <= found.cost_s * 1.02


def test_a_sum_of_products_that_is_scattered_is_billed_as_written_once() -> None:
    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - y) ** 2)

    def step(weights: dict[str, jax.Array], direction: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        gradient, change = jax.jvp(lambda weights: jax.grad(loss)(weights, x, y), (weights,), (direction,))
        return jax.tree.map(lambda own, down, more: own - 0.01 * down - 0.001 * more, weights, gradient, change)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights, batch = {"up": floats(1024, 2048), "down": floats(2048, 1024)}, floats(512, 1024)
    found = plan(step, weights, weights, batch, batch, parallel_mode="auto_parallel", device_num=8, topology="tpu-v5e")
    assert found.cost.total_s == pytest.approx(found.lower_bound_s, rel=1e-9)
    assert "reduce_scatter" in {row.kind for row in found.collectives}


@pytest.mark.parametrize("num", [8, 16])
def test_the_writing_of_a_weight_that_moves_hides_in_no_search(num: int) -> None:
    """A memory is transposed on the way to its product; gathers of weights hide in part on this machine."""

    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(2):
            scores, places = jax.lax.top_k(x @ weights["query"] @ weights["keys"].T, 32)
            x = x + jnp.einsum("bk,bkd->bd", jax.nn.softmax(scores), weights["values"][places])
        return jnp.mean((x - y) ** 2)

    def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(lambda own, down: own - 0.1 * down, weights, jax.grad(loss)(weights, x, y))

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = {"keys": floats(65536, 512), "values": floats(65536, 512), "query": floats(512, 512)}
    batch = floats(1024, 512), floats(1024, 512)
    found = plan(step, weights, *batch, parallel_mode="auto_parallel", device_num=num, topology="tpu-v5e", memory_bytes=1 << 60)
    assert found.cost.total_s == pytest.approx(found.lower_bound_s, rel=1e-9)


def _accumulated(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ weights["up"]) @ weights["down"] - y) ** 2)

    def micro(total: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(jnp.add, total, gradient), value

    total, values = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, weights), (x, y))
    return jax.tree.map(lambda own, more: own - 0.01 * more / 4, weights, total), values.mean()


def test_what_enters_a_loop_is_stored_as_it_is_read_only_where_that_costs_nothing() -> None:
    machine = replace(PRESETS["cpu"], device="slow", peak_flops_per_s=1e8, memory_bytes_per_s=1e8, latency_s=1e-9)
    weights = {"up": jax.ShapeDtypeStruct((256, 1024), jnp.float32), "down": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    batch = jax.ShapeDtypeStruct((4, 64, 256), jnp.float32)
    found = plan(_accumulated, weights, batch, batch, parallel_mode="auto_parallel", device_num=8, topology=machine)
    assert found.cost.total_s == pytest.approx(found.lower_bound_s, rel=1e-9)


@pytest.mark.parametrize("mesh", [{}, {"mesh": {"data": 2, "model": 4}}], ids=["any", "2x4"])
def test_no_bound_is_above_the_price_of_the_plan_that_it_certifies(mesh: dict[str, dict[str, int]]) -> None:
    weights = {"up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32), "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    batch = jax.ShapeDtypeStruct((4, 256, 1024), jnp.float32)
    options = mesh or {"device_num": 8}
    found = plan(
        _accumulated,
        weights,
        batch,
        batch,
        parallel_mode="auto_parallel",
        search_mode="recursive_programming",
        topology="tpu-v5e",
        **options,
    )
    certified = found.certify()
    assert certified.lower_bound_s is not None
    assert certified.gap is not None
    assert certified.lower_bound_s <= certified.cost.total_s
    assert certified.gap >= 0


@pytest.mark.parametrize("search", ["recursive_programming", "dynamic_programming", "sharding_propagation"])
def test_a_step_without_ops_is_planned(search: str) -> None:
    for step, arguments in ((lambda x: x, (jnp.ones(8),)), (lambda state: state, ({},)), (lambda x: None, (jnp.ones(8),))):
        found = plan(step, *arguments, parallel_mode="auto_parallel", search_mode=search, device_num=8)
        assert found.cost.total_s == 0

"""Arguments that are only read in slices go in sliced."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import topology
from spmdctx.models import abstract_program, preset
from spmdctx.models.training import train_step
from spmdctx.search.dynamic import formulation
from spmdctx.search.dynamic.plans.stored_inputs import store_as_read
from spmdctx.search.problem.space import Space
from tests.search.random_graphs import StepMaker

MESH = LogicalMesh.of((2, 2))
X, Y = MESH.names


def _step(splits, stored):
    """An argument that element-wise ops read, each split so, and its assignment."""
    make = StepMaker()
    argument = make.input(8, 4)
    for _ in splits:
        make.same("neg", argument)
    step = make.finish()
    ops = tuple(OpSharding(split) for split in splits)
    values = [((), ())] * len(step.graph.values)
    for op, split in zip(step.graph.ops, splits, strict=True):
        values[op.results[0]] = split
    values[step.graph.inputs[0]] = stored
    return step, Assignment(ops, tuple(values), "test")


@pytest.mark.parametrize(
    ("splits", "stored", "expected"),
    [
        ([((X,), ()), ((X,), ())], ((), ()), ((X,), ())),
        ([((X, Y), ()), ((X,), (Y,))], ((), ()), ((X,), ())),
        ([((X, Y), ()), ((X,), ())], ((X,), ()), ((X,), ())),
        ([((X,), ()), ((), (Y,))], ((), ()), ((), ())),
        ([((X,), ()), ((X,), ())], ((), (Y,)), ((), (Y,))),
    ],
    ids=["all alike", "common part", "no less than now", "nothing in common", "moved for all"],
)
def test_an_argument_is_split_as_far_as_all_of_its_readers_split_it(splits, stored, expected):
    step, assignment = _step(splits, stored)
    space = Space(step.graph, MESH, topology("h100"), step.from_literals)
    found = store_as_read(space, assignment, {})
    argument = step.graph.inputs[0]
    assert found.values[argument] == expected
    bills = [price(Step(step.graph, step.scopes, step.from_literals), one, MESH, topology("h100")) for one in (assignment, found)]
    assert bills[1].communication_s == bills[0].communication_s
    assert bills[1].memory_bytes <= bills[0].memory_bytes
    assert store_as_read(space, assignment, {space.slot_of[argument]: (None, None)}) == assignment


def test_what_enters_a_loop_for_nothing_is_split_as_the_loop_reads_it(monkeypatch):
    def step(weights, x):
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((256, 256), bool)), (64, 256, 256))

        def layer(x, weight):
            scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x, x @ weight), -1e9)
            return jax.nn.softmax(scores) @ x, None

        return jax.lax.scan(layer, x, weights)[0].sum()

    weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 64, 64), (64, 256, 64)))
    options = {"parallel_mode": "auto_parallel", "mesh": {"data": 8}, "device_num": 8, "topology": "h100", "batch_argnums": 1}
    found = spmdctx.plan(step, weights, x, **options)
    assert found.inputs[1].sharding[0] == ("data",)
    monkeypatch.setattr(formulation, "store_as_read", lambda space, assignment, pins: assignment)
    whole = spmdctx.plan(step, weights, x, **options)
    assert found.cost.total_s == whole.cost.total_s
    # Seven eighths of the mask's 4 MiB and of the batch's.
    assert whole.cost.memory_bytes - found.cost.memory_bytes > 6 * 2**20


def test_one_way_is_priced_where_loops_take_slices_of_what_needs_no_input(monkeypatch):
    sizes = {"num_layers": 4, "width": 1024, "num_heads": 8, "num_kv_heads": 8, "hidden": 2816}
    config = replace(preset("llama2-7b"), dtype="bfloat16", remat=True, **sizes)
    _, args = abstract_program(config, 32, 512)
    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "tpu-v5p", "grad_accumulation_step": 4}
    planned = partial(spmdctx.plan, train_step, *args, **options)
    priced, entered = [], []
    price_s, as_stored = formulation.Formulation._price_s, formulation.enter_as_stored
    monkeypatch.setattr(formulation.Formulation, "_price_s", lambda *own, **how: priced.append(price_s(*own, **how)) or priced[-1])

    def enters(space, chosen):
        entered.append((found := as_stored(space, chosen)) is not chosen)
        return found

    monkeypatch.setattr(formulation, "enter_as_stored", enters)
    one = planned()
    assert any(entered)
    assert not priced
    monkeypatch.setattr(formulation, "only_free_enter", lambda *own: False)
    both = planned()
    assert priced
    assert all(first == other for first, other in zip(priced[::2], priced[1::2], strict=True))
    assert one.cost == both.cost

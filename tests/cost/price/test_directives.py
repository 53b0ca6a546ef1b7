"""The directives of a plan are derived once: its price, its program and its lists all have them from one record."""

from dataclasses import FrozenInstanceError, replace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.context.layers import current_context
from spmdctx.cost.price import price
from spmdctx.cost.price.assigned import Assigned, Step
from spmdctx.cost.price.directives import Directives, completed, directives_of, priced_directives, with_copies
from spmdctx.cost.step import bill_of
from spmdctx.ir.analysis.loop_sums import NO_HOLDS
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.topology import Preferences, as_asked
from spmdctx.step.planning import bills
from spmdctx.step.planning.planner import plan_program
from spmdctx.step.planning.request import step_of
from spmdctx.trace.scope.settings import Settings
from tests.road import CPU, MESH, spread, trace
from tests.trace.capture import capture

ROWS = (("data",), ())
WEIGHTS = [jnp.ones((16, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16)]
X = jnp.ones((32, 16), jnp.bfloat16)


def step(weights, x):
    """Two gradients, each reduced over the batch."""

    def loss(weights):
        return (jnp.tanh(x @ weights[0]) @ weights[1]).sum()

    return [weight - 0.1 * slope for weight, slope in zip(weights, jax.grad(loss)(weights), strict=True)]


def assigned(machine=CPU):
    roles = [Role.PARAMETER, Role.PARAMETER, Role.BATCH]
    program = trace(step, WEIGHTS, X, carried=[(0, 0), (1, 1)], roles=roles)
    return Assigned(Step(program.graph, program.scopes, program.from_literals), spread(program, {2: ROWS}), MESH, machine)


def by_index(*ends):
    return current_context().replace(all_reduce_fusion_config=list(ends), parallel_mode="semi_auto_parallel")


def test_the_record_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Directives().waits = ()


def test_buckets_are_those_of_the_context_and_their_reductions_are_priced_by_number():
    case = assigned()
    directives = directives_of(case, by_index(1), has_regions=False)
    assert directives.gradients.buckets == (0, 1)
    assert sorted(set(directives.buckets.values())) == [0, 1]
    bill = price(case.step, case.assignment, case.mesh, case.topology, directives)
    assert sorted(row.cause[:8] for row in bill.collectives if row.cause.startswith("bucket")) == ["bucket 0", "bucket 1"]


def test_nobody_who_asks_for_no_buckets_gets_any():
    directives = directives_of(assigned(), current_context(), has_regions=False)
    assert directives.gradients.ordered == ()
    assert dict(directives.grouped) == {}


@pytest.mark.parametrize("widens", [False, True])
def test_gradients_are_widened_and_priced_so_only_where_the_user_asks_for_it(widens):
    case = assigned(as_asked(CPU, Preferences(widens_gradients=widens)))
    directives = priced_directives(case)
    assert bool(directives.widened) == widens
    payloads = [
        row.payload_bytes
        for row in price(case.step, case.assignment, MESH, CPU, directives).collectives
        if row.cause == "partial result of dot_general"
    ]
    assert payloads == [16 * 16 * (4 if widens else 2)] * 2


def test_groups_are_numbered_behind_the_buckets():
    case = assigned()
    directives = replace(directives_of(case, by_index(1), has_regions=False), groups={10**6: 0})
    assert directives.grouped[10**6] == 2


def test_a_bill_without_directives_has_those_that_it_would_be_given():
    case = assigned(PRESETS["tpu-v5e"])
    own = bill_of(case.step, case.assignment, case.mesh, case.topology)
    given = price(case.step, case.assignment, case.mesh, case.topology, priced_directives(case))
    assert (own.collectives, own.memory_profile) == (given.collectives, given.memory_profile)


@pytest.mark.parametrize("device", ["tpu-v5p", "h100"])
def test_a_search_bills_sums_of_micro_batches_once_a_step_as_the_plan_does(device):
    """Billed in every micro-batch, each would stay in memory until the iteration ends, and plans that fit would be rejected."""

    def accumulated(weights, x):
        return spmdctx.grad(lambda weights, x: jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2))(weights, x)

    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 2
    options = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": device, "grad_accumulation_step": 4}
    entry = spmdctx.parallel(accumulated, **options)._entry_of((weights, jax.ShapeDtypeStruct((1 << 16, 1024), jnp.bfloat16)), {})
    found, topology = entry.planned, entry.environment.settings.topology
    case = Assigned(step_of(found.program, entry.captured), found.assignment, found.mesh, topology)
    assert found.priced.loop_sums.totals
    assert priced_directives(case).loop_sums == found.priced.loop_sums
    own = bill_of(case.step, case.assignment, case.mesh, topology)
    assert (own.total_s, own.memory_bytes) == (found.plan.cost.total_s, found.plan.cost.memory_bytes)
    in_turns = price(case.step, case.assignment, case.mesh, topology, replace(found.priced, loop_sums=NO_HOLDS))
    assert in_turns.communication_s > 2 * own.communication_s


def test_what_follows_from_the_assignment_alone_needs_no_machine():
    case = assigned()
    alone = completed(Directives(), case.graph, case.step.scopes, case.assignment, case.mesh)
    full = with_copies(directives_of(case, current_context(), has_regions=False), case.graph, case.step.scopes, case.assignment)
    assert (alone.moved, alone.recomputed, alone.repeated, alone.loop_sums) == (full.moved, full.recomputed, full.repeated, full.loop_sums)


def test_the_planner_hands_on_the_directives_of_the_plan_and_not_of_other_options(monkeypatch):
    made = []
    monkeypatch.setattr(bills, "directives_of", lambda *args, **kwargs: made.append(directives_of(*args, **kwargs)) or made[-1])
    context = by_index(1)
    captured = capture(step, (WEIGHTS, X))
    found = plan_program(captured, Settings(context=context, num_devices=8, mesh=None, topology=PRESETS["h100"]))
    derived = made[0]
    assert found.priced == replace(derived, waits=found.plan.early)
    assert found.directives == with_copies(found.priced, found.program.graph, found.program.scopes, found.assignment)
    assert [one.bucket for one in found.plan.gradients] == list(derived.gradients.buckets)


def test_lowering_derives_none_again(monkeypatch):
    made = []
    monkeypatch.setattr(bills, "directives_of", lambda *args, **kwargs: made.append(directives_of(*args, **kwargs)) or made[-1])
    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", device_num=8)
    parallel.plan(WEIGHTS, X)
    planned = len(made)
    parallel.lower(WEIGHTS, X)
    assert len(made) == planned > 0

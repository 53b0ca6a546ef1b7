"""Rows that count what a plan reserves for results: they count that plan nearly as its bill does, and nothing where all is donated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.cost.memory.lives import compiled_memory
from spmdctx.cost.memory.reserved import ReservedShare
from spmdctx.cost.step import Step, bill_of
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.search.dynamic.formulation import Formulation
from spmdctx.search.dynamic.plans.free_values import place_free_values
from spmdctx.search.problem.memory.reserved import at_least, with_reserved
from spmdctx.search.problem.memory.rows import completed, counted_bytes, passing_at, with_memory
from spmdctx.search.problem.tables import Tables
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.request import Setup
from spmdctx.search.solver.solve import solve
from tests.road import trace
from tests.search.problem.memory.test_rows import chained

WEIGHTS, ROWS = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 5, jax.ShapeDtypeStruct((2048, 1024), jnp.float32)


def _problem(scratch_bytes=0):
    machine, program = replace(topology("tpu-v5e"), scratch_bytes=scratch_bytes), trace(chained, WEIGHTS, ROWS)
    step, mesh = Step(program.graph, program.scopes, program.from_literals, frozenset()), LogicalMesh.of((2, 4))
    tables = Formulation(step, machine, AlgoLimits(), Tables, mode="dynamic_programming").tables(Setup(mesh))
    memory = compiled_memory(step.graph, step.scopes, step.donated, machine.compiler)
    passing = dict.fromkeys(one for time in range(len(step.graph.ops)) for one in passing_at(tables.network, memory, time))
    problem = tables.problem()
    states = solve(problem).states
    bill = bill_of(step, place_free_values(tables.space, tables.assignment(states, "test"), tables.pins), mesh, machine)
    plain = with_memory(tables, problem, memory, np.inf, passing)
    return tables, memory, plain, completed(plain, states), bill


def test_the_plan_that_the_shares_are_of_is_counted_nearly_as_in_its_bill():
    tables, memory, plain, states, bill = _problem()
    counted = counted_bytes(with_reserved(plain, tables, memory, bill.reserved, 0.0), states)
    assert counted == pytest.approx(bill.memory_bytes, rel=0.03)
    assert counted_bytes(plain, states) < 0.97 * bill.memory_bytes


def test_rows_of_what_is_off_the_chip_count_them_too():
    tables, memory, plain, _, bill = _problem(2**20)
    every = with_reserved(plain, tables, memory, bill.reserved, 0.0).memory
    added = every.lives[len(plain.memory.lives) :]
    num_ops = len(memory.times)
    assert {life[:2] for life in added if life.start < num_ops} == {
        (life.node, life.start - num_ops) for life in added if life.start >= num_ops
    }


def test_without_shares_nothing_changes():
    tables, memory, plain, _, _ = _problem()
    assert with_reserved(plain, tables, memory, (), 0.0) is plain


def test_of_two_plans_the_larger_share_counts():
    pieces = [ReservedShare(0, 4, 0.5), ReservedShare(4, 8, 0.25)], [ReservedShare(4, 8, 0.75), ReservedShare(8, 12, 1.0)]
    assert at_least(*pieces) == (ReservedShare(0, 4, 0.5), ReservedShare(4, 8, 0.75), ReservedShare(8, 12, 1.0))

"""Plans of a small two-layer step, made by hand: no tracing, no search."""

from __future__ import annotations

import dataclasses

from spmdctx.ir.collective import Cause, Collective
from spmdctx.ir.graph import Graph, Op, Origin, Role, Value
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.plan.data import Cost, OpTable, PlannedTensor, Reshard, Timing
from spmdctx.plan.plan import Plan

P, R = FactorKind.PASS_THROUGH, FactorKind.REDUCTION
DOT = OpRule((((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), (64, 32, 32), (P, R, P))
GRAD = OpRule((((2,), (0,)), ((2,), (1,))), (((0,), (1,)),), (32, 32, 64), (P, P, R))
SUB = OpRule((((0,), (1,)), ((0,), (1,))), (((0,), (1,)),), (32, 32), (P, P))

PATHS = ("state/layers/0/w", "state/layers/1/w", "batch")
VALUES = [
    Value(0, (32, 32), "float32", Role.PARAMETER, PATHS[0]),
    Value(1, (32, 32), "float32", Role.PARAMETER, PATHS[1]),
    Value(2, (64, 32), "float32", Role.BATCH, PATHS[2]),
    *(Value(number, (64, 32) if number < 5 else (32, 32), "float32", Role.INTERMEDIATE, "") for number in range(3, 9)),
]
OPS = (
    Op(0, "dot_general", (2, 0), (3,), DOT, 2 * 64 * 32 * 32, 1),
    Op(1, "dot_general", (3, 1), (4,), DOT, 2 * 64 * 32 * 32, 1),
    Op(2, "dot_general", (2, 4), (5,), GRAD, 2 * 64 * 32 * 32, 1),
    Op(3, "dot_general", (3, 4), (6,), GRAD, 2 * 64 * 32 * 32, 1),
    Op(4, "sub", (0, 5), (7,), SUB, 32 * 32, 1),
    Op(5, "sub", (1, 6), (8,), SUB, 32 * 32, 1),
)
ORIGINS = tuple(
    Origin(name, source)
    for name, source in [
        ("layers/0/w", "model.py:12 (step.<locals>.loss)"),
        ("layers/1/w", "model.py:12 (step.<locals>.loss)"),
        ("transpose(layers/0/w)", "model.py:12 (step.<locals>.loss)"),
        ("transpose(layers/1/w)", "model.py:12 (step.<locals>.loss)"),
        ("update", "model.py:30 (step)"),
        ("update", "model.py:30 (step)"),
    ]
)


def small_graph() -> Graph:
    return Graph(tuple(VALUES), OPS, (0, 1, 2), (7, 8), ((0, 7), (1, 8)), ORIGINS, "f" * 64)


def small_plan(**changes) -> Plan:
    """Data parallel over 8 devices, written as zero-1: parameters split, gathered where they are read."""
    graph = small_graph()
    split, rows, whole = (("data",), ()), (("data",), ()), ((), ())
    choices = [(("data",), (), ()), (("data",), (), ()), ((), (), ("data",)), ((), (), ("data",)), (("data",), ()), (("data",), ())]
    assignment = Assignment(
        tuple(OpSharding(axes) for axes in choices), (split, split, rows, rows, rows, whole, whole, split, split), "sharding_propagation"
    )
    inputs = tuple(
        PlannedTensor(VALUES[number].path, VALUES[number].role, VALUES[number].shape, "float32", assignment.values[number])
        for number in graph.inputs
    )
    outputs = tuple(
        PlannedTensor(f"result/layers/{index}/w", Role.PARAMETER, (32, 32), "float32", split) for index, _ in enumerate(graph.outputs)
    )
    gathers = [
        Collective("all_gather", ("data",), 4096, 2e-5, 1, Cause.move(1, "dot_general", path, "[data, -]", "[-, -]"), ORIGINS[0].source)
        for path in PATHS[:2]
    ]
    scatters = [Collective("reduce_scatter", ("data",), 4096, 3e-5, 1, Cause.sum("dot_general"), ORIGINS[0].source)] * 2
    plan = Plan(
        fingerprint=graph.fingerprint,
        mode="auto_parallel",
        search_mode="sharding_propagation",
        logical_mesh=LogicalMesh.of({"data": 8}),
        topology="h100",
        inputs=inputs,
        outputs=outputs,
        op_table=OpTable.of(graph, assignment),
        assignment=assignment,
        reshards=tuple(Reshard(path, split, whole, "dot_general", ORIGINS[0].source, 2e-5) for path in PATHS[:2]),
        collectives=(*gathers, *scatters),
        cost=Cost(3e-4, 1e-4, 4e-4, 5 * 2**20),
        options=(("device_num", 8),),
        notes=("The batch is split over data by default.",),
        timing=Timing(0.5, 0.1),
    )
    return dataclasses.replace(plan, **changes)

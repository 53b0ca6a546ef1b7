"""The parallel optimizer on graphs written by hand: what joins which axes, and what stays as the search has it."""

import pytest

from spmdctx.cost.step import Step
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.projection import project
from spmdctx.ir.rule import FactorKind
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import PRESETS
from spmdctx.rules import rule_for
from spmdctx.rules.builder import RuleBuilder, identity
from spmdctx.search.optimizer.refined_mesh import refined
from spmdctx.search.optimizer.state import scattered_gradients, split_optimizer
from spmdctx.search.problem.space import Space
from spmdctx.search.propagation import propagate
from spmdctx.search.setup.request import OptimizerSharding, Setup
from tests.search.graphs import GraphMaker

D, M = ("data",), ("model",)
MESH = LogicalMesh.of({"data": 4, "model": 2})
CPU = PRESETS["cpu"]
BATCH, ROWS, COLUMNS = 32, 64, 48


def dot(left, right, contracted):
    free = [(shape, (0, 1)[1 - dim]) for shape, dim in zip((left, right), contracted, strict=True)]
    result = tuple(shape[dim] for shape, dim in free)
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return rule_for("dot_general", (left, right), (result,), {"dimension_numbers": dims}), result


class Made:
    """`w' = w + m'` with `m' = m + x^T (x w)`, beside an average of w and a vector that only the batch touches."""

    def __init__(self, rows=ROWS):
        make, shape = GraphMaker(), (rows, COLUMNS)
        self.x = make.input(BATCH, rows, role=Role.BATCH, path="x")
        self.w = make.input(*shape, role=Role.PARAMETER, path="params/layer/w")
        self.m = make.input(*shape, role=Role.OPTIMIZER, path="opt/mu/layer/w")
        self.ema = make.input(*shape, role=Role.STATE, path="ema/layer/w")
        self.other = make.input(*shape, role=Role.STATE, path="cache/layer/v")
        self.row = make.input(rows, role=Role.OPTIMIZER, path="opt/row/layer/w")
        rule, result = dot((BATCH, rows), shape, (1, 0))
        self.y = make.op("dot_general", rule, self.x, self.w, shape=result)
        rule, result = dot((BATCH, rows), (BATCH, COLUMNS), (0, 0))
        self.gradient = make.op("dot_general", rule, self.x, self.y, shape=result)
        self.next_m = make.op("add", identity(shape, num_operands=2), self.m, self.gradient, shape=shape)
        self.next_w = make.op("add", identity(shape, num_operands=2), self.w, self.next_m, shape=shape)
        self.next_ema = make.op("add", identity(shape, num_operands=2), self.ema, self.next_w, shape=shape)
        ties = [(self.w, self.next_w), (self.m, self.next_m), (self.ema, self.next_ema)]
        self.graph = make.graph(self.next_w, self.next_m, self.next_ema, ties=ties)
        self.step = Step(self.graph, (0,) * len(self.graph.ops), frozenset(), frozenset())

    def plan(self, pins=None):
        """What a search would have found: the batch split, and what `pins` say."""
        pins = {self.x: (D, ()), **(pins or {})}
        space = Space(self.graph, MESH, CPU, frozenset())
        fixed = {value: pins.get(value, replicated(len(self.graph.values[value].shape))) for value in self.graph.inputs}
        return propagate(space, fixed, {}, {})

    def split(self, level=1, size=-1, threshold=0, pins=None, layerwise=()):
        asked = OptimizerSharding(level, threshold, size, splits_accumulators=True)
        return split_optimizer(self.step, Setup(MESH), self.plan(pins), asked, CPU, frozenset(layerwise))


def test_state_takes_the_replicas_of_its_parameter():
    made = Made()
    setup, assignment = made.split()
    assert assignment.values[made.m] == assignment.values[made.ema] == (("data", "model"), ())
    assert assignment.values[made.w] == assignment.values[made.other] == ((), ())
    assert assignment.values[made.row] == (("data", "model"),)
    assert setup.notes == ["enable_parallel_optimizer leaves whole what is no weight and no optimizer state: 'cache/layer/v' [64, 48]."]


def test_a_gradient_is_scattered_into_its_state():
    made = Made()
    _, assignment = made.split()
    assert assignment.values[made.gradient] == (("data", "model"), ())


def test_ops_outside_of_the_update_stay_as_they_are():
    made = Made()
    before = made.plan()
    for level in (1, 2, 3):
        _, after = made.split(level)
        producers = made.graph.producers
        for value in (made.y, made.gradient):
            assert after.ops[producers[value]] == before.ops[producers[value]]


def test_the_third_level_stores_weights_split_and_their_readers_gather_them():
    made = Made()
    _, assignment = made.split(level=3)
    assert assignment.values[made.w] == assignment.values[made.next_w] == (("data", "model"), ())
    op = made.graph.ops[made.graph.producers[made.y]]
    assert project(op.rule.operands[1], assignment.ops[op.id].axes) == ((), ())
    update = made.graph.ops[made.graph.producers[made.next_w]]
    assert project(update.rule.operands[0], assignment.ops[update.id].axes) == (("data", "model"), ())


def test_axes_of_the_parameter_stay_first():
    made = Made()
    pins = dict.fromkeys((made.w, made.m, made.ema), (M, ()))
    _, assignment = made.split(pins=pins)
    assert assignment.values[made.m] == (("model", "data"), ())
    pins = dict.fromkeys((made.w, made.m, made.ema), ((), M))
    _, assignment = made.split(pins=pins)
    assert assignment.values[made.m] == (D, M)


def test_what_the_search_split_on_its_own_account_stays_so():
    made = Made()
    _, assignment = made.split(pins={made.m: ((), D)})
    assert assignment.values[made.m] == ((), D)
    assert assignment.values[made.ema] == (("data", "model"), ())


def test_layerwise_parameters_are_left_alone():
    made = Made()
    _, assignment = made.split(level=3, layerwise=[made.w])
    assert assignment.values[made.w] == assignment.values[made.m] == ((), ())


def test_what_does_not_divide_or_is_small_is_named():
    made = Made(rows=36)
    setup, assignment = made.split(level=3)
    assert assignment.values == made.plan().values
    assert len(setup.notes) == 2
    assert all(f"'{path}' [36, 48]" in setup.notes[0] for path in ("params/layer/w", "opt/mu/layer/w", "ema/layer/w"))
    assert "does not divide" in setup.notes[0]
    made = Made()
    num_bytes = ROWS * COLUMNS * 4
    assert made.split(threshold=num_bytes)[1].values[made.m] == (("data", "model"), ())
    setup, assignment = made.split(threshold=num_bytes + 1)
    assert assignment.values[made.m] == ((), ())
    assert "'params/layer/w'" in setup.notes[0]


@pytest.mark.parametrize(
    ("size", "axes", "target"),
    [
        (2, MESH.axes, M),
        (4, (("data", 2), ("data_shard", 2), ("model", 2)), ("data_shard", "model")),
        (8, MESH.axes, ("data", "model")),
    ],
)
def test_groups_are_of_neighbouring_devices(size, axes, target):
    made = Made()
    setup, assignment = made.split(size=size)
    assert setup.mesh.axes == axes
    assert assignment.values[made.m] == (target, ())
    whole = tuple(name for name, _ in axes if name.startswith("data"))
    assert assignment.values[made.x] == (whole, ())


def test_groups_of_another_size_than_the_replicas_allow_are_named():
    setup, assignment = Made().split(size=3)
    assert not any(any(dims) for value, dims in enumerate(assignment.values) if value in (1, 2, 3))
    assert "has no groups of 3 of its replicas" in setup.notes[0]


def test_layers_of_a_scan_are_no_dimension_to_split():
    make = GraphMaker()
    stacked = make.input(8, ROWS, COLUMNS, role=Role.PARAMETER, path="params/w")
    state = make.input(8, ROWS, COLUMNS, role=Role.OPTIMIZER, path="mu/w")
    builder = RuleBuilder()
    layers = builder.factor(8, FactorKind.PASS_THROUGH, blocked=True)
    rest = builder.factors((ROWS, COLUMNS))
    make.op("scan.enter", builder.build([[layers, *rest]], [rest]), stacked, shape=(ROWS, COLUMNS))
    graph = make.graph(state)
    step = Step(graph, (0,), frozenset(), frozenset())
    values = tuple(replicated(len(value.shape)) for value in graph.values)
    plan = Assignment((OpSharding(((),) * 3),), values, "data_parallel")
    asked = OptimizerSharding(3, 0, -1, splits_accumulators=True)
    _, assignment = split_optimizer(step, Setup(MESH), plan, asked, CPU, frozenset())
    assert assignment.values[state] == ((), ("data", "model"), ())
    assert assignment.values[2] == (("data", "model"), ())
    assert scattered_gradients(graph, MESH, asked, frozenset()) == {stacked: 1}


def test_gradients_leave_a_local_loss_in_pieces_where_something_of_theirs_is_split():
    made, size = Made(), ROWS * COLUMNS * 4
    asked = OptimizerSharding(1, size, -1, splits_accumulators=True)
    assert scattered_gradients(made.graph, MESH, asked, frozenset()) == {made.w: 0}
    assert scattered_gradients(made.graph, MESH, asked, frozenset([made.w])) == {}
    larger = OptimizerSharding(1, size + 1, -1, splits_accumulators=True)
    assert scattered_gradients(made.graph, MESH, larger, frozenset()) == {}


def test_a_refined_axis_gets_a_name_that_is_free():
    mesh, parts = refined(LogicalMesh.of({"data": 8, "data_shard": 2}), {"data": 2})
    assert mesh.axes == (("data", 4), ("data_shard_", 2), ("data_shard", 2))
    assert parts == {"data": ("data", "data_shard_"), "data_shard": ("data_shard",)}
